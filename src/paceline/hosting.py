"""Where a cluster lives: its engine, its server, and how its processes reach that."""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeAlias

from paceline import ps
from paceline.core.cluster_state import RESTORER
from paceline.core.errors import Closed, Disconnected, TimedOut, UnknownName
from paceline.engines.base import Engine, Exit, Listener, Stream, Task, TaskSpec, engine, show
from paceline.preflight import limits, preflight
from paceline.server.local import LocalServer
from paceline.server.loop import Server
from paceline.session import Session
from paceline.transports.base import transport
from paceline.worker.line import Setup

_log = logging.getLogger("paceline")

GRACE = 2.0
"""Seconds that processes have to end by themselves."""

START_LIMIT, LOOK, PAUSE = 60.0, 0.1, 0.01
"""Seconds within which a server is there that was started, and from one look to the next."""

OnEnd: TypeAlias = Callable[[str, str], None]
"""Hears which server has ended, and how, as the end of a sentence about it."""

CARRIERS = ("unix", "tcp")

NOTICE = 1.0
"""Seconds within which the end of a server that no longer answers is noticed."""


class Launched:
    """Where the engine starts processes, which reach their servers over sockets.

    There are `servers` of them, each in a process of its own; or, for 0, one in a thread of this.
    Those in processes can be started again, if this `lasts`: the addresses are kept.
    """

    def __init__(
        self, name: str, carrier: str, servers: int, least_epoch: int, *, lasts: bool
    ) -> None:
        self.engine = engine(name)
        self.lasts = lasts and servers > 0
        self._least_epoch = least_epoch
        self._secret = secrets.token_bytes(32)
        self._carrier = carrier
        # Names without files, where the kernel has such names: nothing to leave behind.
        self._folder = None if sys.platform == "linux" else tempfile.mkdtemp(prefix="paceline-")
        self._servers: list[_Process | _Thread] = []
        self._processes = servers
        self._listeners: dict[str, Any] = {}
        self._targets: list[str] = []

    def start(self, on_end: OnEnd) -> None:
        count = max(1, self._processes)
        listeners: list[Any] = []
        try:
            for index in range(count):
                listeners.append(transport(self._carrier).listen(self._place(index)))
            # The kernel has chosen the ports.
            self._targets = [f"{self._carrier}:{listener.place}" for listener in listeners]
            if self._processes:
                started = [_Process(self.engine, f"ps:{index}", on_end) for index in range(count)]
                self._servers = [*started]
                pairs = list(zip(started, listeners, strict=True))
                for index, (server, listener) in enumerate(pairs):
                    server.start(self._serve(index, listener), listener.fileno())
                if self.lasts:
                    self._listeners = {server.name: listener for server, listener in pairs}
        finally:
            if self._processes and not self._listeners:
                _hand_over(listeners)
        if not self._processes:
            self._servers = [_Thread(listeners[0], self._secret, on_end, self._least_epoch)]

    def setup(self, job: str, index: int, seed: int) -> Setup:
        return Setup(
            self._targets[0], self._secret, job, index, seed, alone=True, lasting=self.lasts
        )

    def preflight(self, workers: int, threads: int) -> list[str]:
        return preflight(workers, threads, *limits())

    def chief(self) -> Session:
        """The chief's session, once all servers are there.

        Raises:
            Disconnected: one has ended; the message says which, and how.
        """
        session = self._joined("chief", 0)
        for line, server in zip(session.lines.all, self._servers, strict=True):
            line.explain = server.became
        if not self.lasts:
            # None of them is started again.
            session.lines.end()
        return session

    def ended(self) -> list[tuple[str, str]]:
        """The servers that have ended, and for each a sentence that says how.

        That is known within `NOTICE` seconds of a broken line.
        """
        until = time.monotonic() + NOTICE
        while all(server.alive for server in self._servers) and time.monotonic() < until:
            time.sleep(PAUSE)
        told = [(server.name, server.became()) for server in self._servers if not server.alive]
        return [(name, how) for name, how in told if how is not None]

    def anew(self, forget: Callable[[], None]) -> None:
        """End all servers and start them anew, with nothing; `forget` is called between."""
        servers = [each for each in self._servers if isinstance(each, _Process)]
        for server in servers:
            # What they have is in the checkpoint.
            server.stop(0.0)
            server.became()
        forget()
        self._least_epoch = max(self._least_epoch, round(time.time())) + 1
        for index, server in enumerate(servers):
            listener = self._listeners[server.name]
            with suppress(Closed):  # it has ended once more, which its listener is told
                server.start(self._serve(index, listener), listener.fileno())

    def processes(self) -> dict[str, int]:
        """The processes of the servers that live."""
        found = {f"ps:{index}": server.pid for index, server in enumerate(self._servers)}
        return {name: pid for name, pid in found.items() if pid is not None}

    def again(self, task: str) -> None:
        """Start the server again that is `task`, in an epoch above those that it had before.

        It takes no session but a `restorer`, until that says that all is there.
        """
        index = [server.name for server in self._servers].index(task)
        server, listener = self._servers[index], self._listeners[task]
        assert isinstance(server, _Process)
        self._least_epoch = max(self._least_epoch, round(time.time())) + 1
        setup = replace(self._serve(index, listener), restoring=True)
        with suppress(Closed):  # it has ended once more, which its listener is told
            server.start(setup, listener.fileno())

    def restorer(self) -> Session:
        """The session that brings back what servers held.

        Raises:
            Disconnected: one of them has ended again, or this has given up.
        """
        return self._joined(RESTORER)

    def _joined(self, job: str, index: int | None = None) -> Session:
        """A session, once all servers are there.

        Raises:
            Disconnected: one of them has ended; the message says how.
            TimedOut: one is not there after `START_LIMIT` seconds.
        """
        until = time.monotonic() + START_LIMIT
        while True:
            missing = [server for server in self._servers if not server.is_up(LOOK)]
            for server in missing:
                if not server.alive:
                    raise Disconnected(server.became() or f"the server, {server.name}, has ended")
            try:
                return Session(
                    self._targets[0], secret=self._secret, job=job, index=index, timeout=1.0
                )
            except TimedOut as e:
                if time.monotonic() > until or not (self._listeners or missing):
                    raise Disconnected(f"servers that were started do not answer: {e}") from e

    def give_up(self) -> None:
        """Start none of the servers again: whoever calls one that has ended hears that."""
        listeners, self._listeners = list(self._listeners.values()), {}
        _hand_over(listeners)

    def close(self) -> None:
        self.give_up()
        with ExitStack() as steps:
            if self._folder:
                steps.callback(shutil.rmtree, self._folder, ignore_errors=True)
            steps.callback(self.engine.close, GRACE)
            for server in self._servers:
                steps.callback(server.stop, GRACE)

    def _place(self, index: int) -> str:
        if self._carrier == "tcp":
            return "127.0.0.1:0"
        return f"{self._folder}/{index}" if self._folder else f"@paceline-{secrets.token_hex(8)}"

    def _serve(self, index: int, listener: Any) -> ps.Serve:
        # On this host the end of a connection is the end of its process.
        return ps.Serve(
            self._carrier,
            listener.place,
            listener.fileno(),
            self._secret,
            linger=0.0,
            index=index,
            servers=tuple(self._targets),
            least_epoch=self._least_epoch,
        )


class _Process(Listener):
    """A server in a process of its own."""

    def __init__(self, engine: Engine, name: str, on_end: OnEnd) -> None:
        self._engine = engine
        self.name = name
        self._on_end = on_end
        self._task: Task | None = None
        self._exit: Exit | None = None
        self._up, self._ended = threading.Event(), threading.Event()

    def start(self, setup: ps.Serve, descriptor: int) -> None:
        """Start it; it serves at the socket with that descriptor."""
        self._up.clear()
        self._ended.clear()
        self._exit = None
        spec = TaskSpec(self.name, ps.run, inherit=(descriptor,))
        self._task = self._engine.start(spec, self)
        self._task.send(setup)

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
        """It takes sessions."""
        if task is self._task:
            self._up.set()

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        show(task, line, stream)

    def ended(self, task: Task, how: Exit, /) -> None:
        self._exit = how
        self._up.clear()
        self._on_end(self.name, how.told)
        self._ended.set()

    def became(self) -> str | None:
        """What became of a server that no longer answers, if it has ended."""
        self._ended.wait(NOTICE)
        if self._exit is None:
            return None
        error = f"\n{self._exit.error.rstrip()}" if self._exit.error else ""
        return f"the server, {self.name}, {self._exit.told}{error}"


class _Thread:
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
            self._on_end(self.name, f"failed: {e!r}")

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


class Local:
    """Where everything is in this process: whoever calls the server runs it."""

    def __init__(self, name: str, least_epoch: int) -> None:
        self.engine = engine(name)
        self._server = LocalServer(waits=self.engine.concurrent, least_epoch=least_epoch)

    lasts = False

    def start(self, on_end: OnEnd) -> None:
        """There is nothing to start."""

    def give_up(self) -> None:
        """None is started again."""

    def setup(self, job: str, index: int, seed: int) -> Setup:
        return Setup(None, b"", job, index, seed, self._server.connect)

    def preflight(self, workers: int, threads: int) -> list[str]:
        return preflight(workers, threads, *limits()) if self.engine.concurrent else []

    def chief(self) -> Session:
        return Session(job="chief", index=0, channel=self._server.connect())

    def processes(self) -> dict[str, int]:
        """There is none but this."""
        return {}

    def close(self) -> None:
        if self.engine.concurrent:
            # Workers that wait for something in the server hear that it has ended.
            self._server.close()
        self.engine.close(GRACE)


def hosting(
    name: str, carrier: str, servers: int, least_epoch: int = 0, *, lasts: bool = False
) -> Launched | Local:
    """Where a cluster with that engine lives; its processes reach their servers over `carrier`.

    Where everything is in one process, one server stands for all. Versions begin with an epoch of
    `least_epoch` or more. Where it `lasts`, servers in processes of their own are started again.

    Raises:
        UnknownName: there is no such engine, or no such way to reach a server.
    """
    if carrier not in CARRIERS:
        raise UnknownName(f"no transport {carrier!r} for a cluster; there are {list(CARRIERS)}")
    if name in ("serial", "threads"):
        return Local(name, least_epoch)
    return Launched(name, carrier, servers, least_epoch, lasts=lasts)


def _hand_over(listeners: Sequence[Any]) -> None:
    """Leave listening to the processes that have inherited it."""
    for listener in listeners:
        listener.hand_over()
