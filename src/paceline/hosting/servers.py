"""Servers in processes that an engine starts, and one in a thread of this process."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from paceline import ps
from paceline.core.errors import Disconnected, TimedOut
from paceline.engines.base import Engine, Exit, Listener, Stream, Task, TaskSpec, show
from paceline.hosting.base import OnEnd
from paceline.server.loop import Server
from paceline.session import Session

_log = logging.getLogger("paceline")

START_LIMIT, LOOK, PAUSE = 60.0, 0.1, 0.01
"""Seconds within which a server is there that was started, and from one look to the next."""

NOTICE = 1.0
"""Seconds within which the end of a server that no longer answers is noticed."""


class InProcess(Listener):
    """A server in a process of its own."""

    def __init__(self, engine: Engine, name: str, on_end: OnEnd) -> None:
        self._engine = engine
        self.name = name
        self._on_end = on_end
        self._task: Task | None = None
        self._exit: Exit | None = None
        self._target: str | None = None
        self._placed = threading.Event()
        self._up, self._ended = threading.Event(), threading.Event()

    def start(self, setup: ps.Serve | ps.ServeAt) -> None:
        """Start it; it serves at a socket that it inherits, or says where."""
        self._up.clear()
        self._ended.clear()
        self._exit = None
        inherit = (setup.descriptor,) if isinstance(setup, ps.Serve) else ()
        spec = TaskSpec(self.name, ps.run, inherit=inherit, stays=True)
        self._task = self._engine.start(spec, self)
        self._task.send(setup)

    def send(self, message: object) -> None:
        """Tell it something.

        Raises:
            Closed: it has ended.
        """
        assert self._task is not None
        self._task.send(message)

    def place(self, timeout: float) -> str | None:
        """What opens a session on it, once it says so; `None` where it does not, or has ended."""
        self._placed.wait(timeout)
        return self._target

    def is_up(self, timeout: float) -> bool:
        """Whether it takes sessions, within so many seconds."""
        return self._up.wait(timeout)

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self._task is not None and self._task.alive

    def stop(self, timeout: float) -> None:
        """End it."""
        if self._task is not None:
            self._engine.stop(self._task, timeout)

    @property
    def pid(self) -> int | None:
        """Its process, while that lives."""
        return self._task.pid if self._task is not None and self._task.alive else None

    def received(self, task: Task, message: object, /) -> None:
        """It says where it is, and then that it takes sessions."""
        if isinstance(message, ps.Place):
            self._target = message.target
            self._placed.set()
        elif task is self._task:
            self._up.set()

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        show(task, line, stream)

    def ended(self, task: Task, how: Exit, /) -> None:
        self._exit = how
        self._up.clear()
        self._placed.set()
        self._on_end(self.name, how.told, how.hopeless)
        self._ended.set()

    def became(self) -> str | None:
        """What became of a server that no longer answers, if it has ended."""
        self._ended.wait(NOTICE)
        if self._exit is None:
            return None
        error = f"\n{self._exit.error.rstrip()}" if self._exit.error else ""
        return f"the server, {self.name}, {self._exit.told}{error}"


class Fleet:
    """All servers of a cluster, and sessions on them; `target` opens one."""

    def __init__(self, secret: bytes) -> None:
        self.all: list[InProcess | InThread] = []
        self.target = ""
        self.given_up = False
        """Whether nobody waits for them any more."""
        self._secret = secret

    def processes(self) -> dict[str, int]:
        """The processes of those that live, where they are on this host."""
        found = {server.name: server.pid for server in self.all}
        return {name: pid for name, pid in found.items() if pid is not None}

    def joined(self, job: str, index: int | None = None, limit: float = START_LIMIT) -> Session:
        """A session, once all are there.

        Raises:
            Disconnected: one of them has ended, the message says how; or they do not answer within
                `limit` seconds.
        """
        until = time.monotonic() + limit
        while True:
            missing = [server for server in self.all if not server.is_up(LOOK)]
            for server in missing:
                if not server.alive:
                    raise Disconnected(server.became() or f"the server, {server.name}, has ended")
            try:
                return Session(self.target, secret=self._secret, job=job, index=index, timeout=1.0)
            except TimedOut as e:
                if time.monotonic() > until or self.given_up:
                    raise Disconnected(f"servers that were started do not answer: {e}") from e

    def chief(self, *, lasts: bool, limit: float = START_LIMIT) -> Session:
        """The chief's session; where nothing `lasts`, no server is started again."""
        session = self.joined("chief", 0, limit)
        for line, server in zip(session.lines.all, self.all, strict=True):
            line.explain = server.became
        if not lasts:
            session.lines.end()
        return session

    def ended(self) -> list[tuple[str, str]]:
        """Those that have ended, and for each a sentence that says how."""
        until = time.monotonic() + NOTICE
        while all(server.alive for server in self.all) and time.monotonic() < until:
            time.sleep(PAUSE)
        told = [(server.name, server.became()) for server in self.all if not server.alive]
        return [(name, how) for name, how in told if how is not None]

    def end(self) -> list[InProcess]:
        """End those that are processes, now; these."""
        found = [each for each in self.all if isinstance(each, InProcess)]
        for server in found:
            server.stop(0.0)
            server.became()
        return found


class InThread:
    """A server in a thread of this process, which takes turns with whatever else runs in it."""

    name = "in this process"

    def __init__(self, listener: Any, secret: bytes, on_end: OnEnd, least_epoch: int) -> None:
        try:
            self._server = Server(
                [listener], secret, linger=0.0, on_note=_log.warning, least_epoch=least_epoch
            )
        except BaseException:
            listener.close()
            raise
        self._on_end = on_end
        self._error: str | None = None
        self.pid = None
        self._thread = threading.Thread(target=self._run, name="paceline-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.serve()
        except BaseException as e:
            self._error = f"the server in this process failed: {e!r}"
            self._on_end(self.name, f"failed: {e!r}", True)

    def is_up(self, timeout: float) -> bool:
        """It takes sessions from the beginning."""
        return True

    @property
    def alive(self) -> bool:
        """Whether it has not failed."""
        return self._error is None

    def stop(self, timeout: float) -> None:
        """End it."""
        if self._thread.is_alive():
            self._server.stop()
        self._thread.join(timeout)
        self._server.close()

    def became(self) -> str | None:
        """What became of it, if it has ended."""
        return self._error
