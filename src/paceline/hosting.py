"""Where a cluster lives: its engine, its server, and how its processes reach that."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable

from paceline import ps
from paceline.core.errors import UnknownName
from paceline.core.numbers import counted
from paceline.engines.base import Exit, Listener, Stream, Task, TaskSpec, engine, show
from paceline.server.local import LocalServer
from paceline.session import Session
from paceline.transports.base import transport
from paceline.worker.line import Setup

GRACE = 2.0
"""Seconds that processes have to end by themselves."""

CARRIERS = ("unix", "tcp")

NOTICE = 1.0
"""Seconds within which the end of a server that no longer answers is noticed."""

DESCRIPTORS, DESCRIPTORS_PER_WORKER = 64, 16
"""Files, sockets and segments that a launcher has open, and those it adds for each worker."""


class Launched:
    """Where the engine starts processes: a server in one of its own, reached over a socket."""

    def __init__(self, name: str, carrier: str) -> None:
        self.engine = engine(name)
        self._secret = secrets.token_bytes(32)
        self._carrier = carrier
        # A name without a file, where the kernel has such names: nothing to leave behind.
        self._folder = None if sys.platform == "linux" else tempfile.mkdtemp(prefix="paceline-")
        self._place = f"{self._folder}/ps" if self._folder else f"@paceline-{secrets.token_hex(8)}"
        if carrier == "tcp":
            self._place = "127.0.0.1:0"
        self._task: Task | None = None

    def start(self, on_end: Callable[[str], None]) -> None:
        listener = transport(self._carrier).listen(self._place)
        # The kernel has chosen the port.
        self._place = listener.place
        try:
            descriptor = listener.fileno()
            self._server = _ServerWatch(on_end)
            spec = TaskSpec("ps:0", ps.run, inherit=(descriptor,))
            self._task = self.engine.start(spec, self._server)
            # On this host the end of a connection is the end of its process.
            setup = ps.Serve(self._carrier, self._place, descriptor, self._secret, linger=0.0)
            self._task.send(setup)
        finally:
            listener.hand_over()

    def setup(self, job: str, index: int, seed: int) -> Setup:
        return Setup(self._target, self._secret, job, index, seed, alone=True)

    def preflight(self, workers: int, threads: int) -> list[str]:
        return preflight(workers, threads, *limits())

    def chief(self) -> Session:
        session = Session(self._target, secret=self._secret, job="chief", index=0)
        session.connection.explain = self._server.became
        return session

    @property
    def _target(self) -> str:
        return f"{self._carrier}:{self._place}"

    def close(self) -> None:
        try:
            if self._task is not None:
                self.engine.stop(self._task, GRACE)
        finally:
            self.engine.close(GRACE)
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)


class _ServerWatch(Listener):
    """Hears of the server's process."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._exit: Exit | None = None
        self._ended = threading.Event()

    def received(self, task: Task, message: object, /) -> None:
        """A server has nothing to say."""

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        show(task, line, stream)

    def ended(self, task: Task, how: Exit, /) -> None:
        self._exit = how
        self._on_end(f"the server, ps:0, {how.told}")
        self._ended.set()

    def became(self) -> str | None:
        """What became of a server that no longer answers, if it has ended."""
        self._ended.wait(NOTICE)
        if self._exit is None:
            return None
        error = f"\n{self._exit.error.rstrip()}" if self._exit.error else ""
        return f"the server, ps:0, {self._exit.told}{error}"


class Local:
    """Where everything is in this process: whoever calls the server runs it."""

    def __init__(self, name: str) -> None:
        self.engine = engine(name)
        self._server = LocalServer(waits=self.engine.concurrent)

    def start(self, on_end: Callable[[str], None]) -> None:
        """There is nothing to start."""

    def setup(self, job: str, index: int, seed: int) -> Setup:
        return Setup(None, b"", job, index, seed, self._server.connect)

    def preflight(self, workers: int, threads: int) -> list[str]:
        return preflight(workers, threads, *limits()) if self.engine.concurrent else []

    def chief(self) -> Session:
        return Session(job="chief", index=0, channel=self._server.connect())

    def close(self) -> None:
        if self.engine.concurrent:
            # Workers that wait for something in the server hear that it has ended.
            self._server.close()
        self.engine.close(GRACE)


def hosting(name: str, carrier: str) -> Launched | Local:
    """Where a cluster with that engine lives; its processes reach the server over `carrier`.

    Raises:
        UnknownName: there is no such engine, or no such way to reach a server.
    """
    if carrier not in CARRIERS:
        raise UnknownName(f"no transport {carrier!r} for a cluster; there are {list(CARRIERS)}")
    return Local(name) if name in ("serial", "threads") else Launched(name, carrier)


def preflight(workers: int, threads: int, cores: int, descriptors: int) -> list[str]:
    """What will not fit on this machine, with the numbers; nothing where all does."""
    found = []
    if workers * threads > cores:
        found.append(
            f"{workers} workers with {counted(threads, 'thread')} each on {cores} cores: they will"
            " take turns"
        )
    needed = DESCRIPTORS + DESCRIPTORS_PER_WORKER * workers
    if needed > descriptors:
        found.append(
            f"{workers} workers need about {needed} file descriptors, {descriptors} are allowed:"
            " raise the limit (ulimit -n)"
        )
    return found


def limits() -> tuple[int, int]:
    """The cores and file descriptors that this process may use."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores, os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else 1 << 20
