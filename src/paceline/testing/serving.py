"""A fresh server for a test, with any number of sessions on it."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from paceline import ps
from paceline.core.errors import UnknownName, Unsupported
from paceline.engines.base import Exit, Listener, Stream, Task, TaskSpec, engine
from paceline.server.local import LocalServer
from paceline.server.loop import Server
from paceline.session import Session
from paceline.transports.base import transport

DEADLINE_SECONDS = 30.0

Carrier = Literal["memory", "unix", "tcp"]
Where = Literal["process", "thread"]


class Serving(ABC):
    """A server, and the sessions on it.

    Attributes:
        target: its address, for sessions of other processes.
        secret: what they need to get in.
        notes: what it told its operator, a line each.
    """

    target: str
    secret: bytes
    notes: list[str]

    def __init__(self, target: str) -> None:
        self.target = target
        self.secret = secrets.token_bytes(32)
        self.notes = []
        self._sessions: list[Session] = []

    def session(self, **options: Any) -> Session:
        """A new session, with the options of `Session`; it is closed with the server."""
        made = self._open(options)
        self._sessions.append(made)
        return made

    def _open(self, options: dict[str, Any]) -> Session:
        return Session(self.target, **{"secret": self.secret, **options})

    def kill(self) -> None:
        """End the server by SIGKILL; returns when it is dead.

        Raises:
            Unsupported: it is no process of its own.
        """
        raise Unsupported("only a server in a process of its own can be killed")

    def close(self) -> None:
        """Close the sessions and end the server. Idempotent."""
        for session in self._sessions:
            session.close()
        self._sessions.clear()
        self._end()

    @abstractmethod
    def _end(self) -> None: ...


@contextmanager
def serving(carrier: Carrier = "unix", *, where: Where = "process") -> Iterator[Serving]:
    """A fresh server that ends with the block, and all sessions on it too.

    Over `"unix"` and `"tcp"` (at 127.0.0.1) it is a process of its own, or a thread of this one,
    which starts sooner. Over `"memory"` it is always within this process, and `target` leads
    nowhere.

    Raises:
        UnknownName: there is no such transport.
    """
    if carrier not in get_args(Carrier):
        there = list(get_args(Carrier))
        raise UnknownName(f"nothing to serve {carrier!r} with; there are {there}")
    made: Serving
    if carrier == "memory":
        made = _Within()
    else:
        made = _Threaded(carrier) if where == "thread" else _Launched(carrier)
    try:
        yield made
    finally:
        made.close()


def _listener(carrier: str) -> Any:
    place = "127.0.0.1:0" if carrier == "tcp" else f"@paceline-{secrets.token_hex(8)}"
    return transport(carrier).listen(place)


class _Within(Serving):
    """Whoever calls it runs it."""

    def __init__(self) -> None:
        super().__init__("memory:nowhere")
        self._server = LocalServer()

    def _open(self, options: dict[str, Any]) -> Session:
        return Session(channel=self._server.connect(), **options)

    def _end(self) -> None:
        """There is nothing that runs."""


class _Threaded(Serving):
    """A real server and its socket, in a thread of this process."""

    def __init__(self, carrier: str) -> None:
        listener = _listener(carrier)
        super().__init__(f"{carrier}:{listener.place}")
        server = Server([listener], self.secret, on_note=self.notes.append)
        self._server: Server | None = server
        self._thread = threading.Thread(target=server.serve, name="paceline-test-server")
        self._thread.start()

    def _end(self) -> None:
        # Its memory goes with it, even if somebody keeps this object.
        server, self._server = self._server, None
        if server is None:
            return
        if self._thread.is_alive():
            server.stop()
            self._thread.join()
        server.close()


class _Launched(Serving, Listener):
    """A server as a cluster launches it."""

    def __init__(self, carrier: str) -> None:
        listener = _listener(carrier)
        super().__init__(f"{carrier}:{listener.place}")
        self._ended = threading.Event()
        self._engine = engine("processes")
        try:
            number = listener.fileno()
            self._task = self._engine.start(TaskSpec("ps:0", ps.run, inherit=(number,)), self)
            self._task.send(ps.Serve(carrier, listener.place, number, self.secret))
        except BaseException:
            self._engine.close()
            raise
        finally:
            listener.close()

    def kill(self) -> None:
        self._task.kill()
        assert self._ended.wait(DEADLINE_SECONDS), "the server outlived SIGKILL"

    def _end(self) -> None:
        self._engine.close()

    def received(self, task: Task, message: object, /) -> None:
        """A server has nothing to say."""

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        self.notes.append(line)

    def ended(self, task: Task, end: Exit, /) -> None:
        self._ended.set()
