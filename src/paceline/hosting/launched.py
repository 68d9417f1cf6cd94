"""The engine starts processes on this host, which reach their servers over sockets."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from paceline import ps
from paceline.core.cluster_state import RESTORER
from paceline.core.errors import Closed
from paceline.engines.base import engine
from paceline.hosting.base import GRACE, Hosting, OnEnd, Wanted
from paceline.hosting.servers import Fleet, InProcess, InThread
from paceline.preflight import limits, preflight
from paceline.session import Session
from paceline.transports.base import transport
from paceline.worker.line import Setup


class Launched(Hosting):
    """Where the engine starts processes, which reach their servers over sockets.

    There are `servers` of them, each in a process of its own; or, for 0, one in a thread of this.
    Those in processes can be started again, if this `lasts`: the addresses are kept.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.engine = engine(wanted.engine)
        self.lasts = wanted.lasts and wanted.servers > 0
        self._least_epoch = wanted.least_epoch
        self._secret = secrets.token_bytes(32)
        self._carrier = wanted.carrier
        # Names without files, where the kernel has such names: nothing to leave behind.
        self._folder = None if sys.platform == "linux" else tempfile.mkdtemp(prefix="paceline-")
        self._fleet = Fleet(self._secret)
        self._processes = wanted.servers
        self._listeners: dict[str, Any] = {}
        self._targets: list[str] = []

    def start(self, on_end: OnEnd, workers: Sequence[str]) -> None:
        count = max(1, self._processes)
        listeners: list[Any] = []
        try:
            for index in range(count):
                listeners.append(transport(self._carrier).listen(self._place(index)))
            # The kernel has chosen the ports.
            self._targets = [f"{self._carrier}:{listener.place}" for listener in listeners]
            self._fleet.target = self._targets[0]
            if self._processes:
                started = [InProcess(self.engine, f"ps:{index}", on_end) for index in range(count)]
                self._fleet.all = [*started]
                pairs = list(zip(started, listeners, strict=True))
                for index, (server, listener) in enumerate(pairs):
                    server.start(self._serve(index, listener))
                if self.lasts:
                    self._listeners = {server.name: listener for server, listener in pairs}
        finally:
            if self._processes and not self._listeners:
                _hand_over(listeners)
        if not self._processes:
            self._fleet.all = [InThread(listeners[0], self._secret, on_end, self._least_epoch)]

    def setup(self, job: str, index: int, seed: int) -> Setup:
        return Setup(
            self._targets[0], self._secret, job, index, seed, alone=True, lasting=self.lasts
        )

    def preflight(self, workers: int, threads: int) -> list[str]:
        return preflight(workers, threads, *limits())

    def chief(self) -> Session:
        return self._fleet.chief(lasts=self.lasts)

    def ended(self) -> list[tuple[str, str]]:
        return self._fleet.ended()

    def anew(self, forget: Callable[[], None]) -> None:
        # What they have is in the checkpoint.
        servers = self._fleet.end()
        forget()
        for index in range(len(servers)):
            self._start(index)

    def processes(self) -> dict[str, int]:
        return self._fleet.processes()

    def again(self, task: str) -> None:
        # It takes no session but a `restorer`, until that says that all is there.
        index = [server.name for server in self._fleet.all].index(task)
        self._start(index, restoring=True)

    def restorer(self) -> Session:
        return self._fleet.joined(RESTORER)

    def _start(self, index: int, *, restoring: bool = False) -> None:
        """Start a server again, where and in an epoch above that it had before."""
        server = self._fleet.all[index]
        assert isinstance(server, InProcess)
        self._least_epoch = max(self._least_epoch, round(time.time())) + 1
        setup = replace(self._serve(index, self._listeners[server.name]), restoring=restoring)
        with suppress(Closed):  # it has ended once more, which its listener is told
            server.start(setup)

    def give_up(self) -> None:
        self._fleet.given_up = True
        listeners, self._listeners = list(self._listeners.values()), {}
        _hand_over(listeners)

    def close(self) -> None:
        self.give_up()
        with ExitStack() as steps:
            if self._folder:
                steps.callback(shutil.rmtree, self._folder, ignore_errors=True)
            steps.callback(self.engine.close, GRACE)
            for server in self._fleet.all:
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


def _hand_over(listeners: Sequence[Any]) -> None:
    """Leave listening to the processes that have inherited it."""
    for listener in listeners:
        listener.hand_over()
