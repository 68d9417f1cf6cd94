"""The engine starts tasks on any hosts: servers say where they are, and workers are told."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from paceline import ps
from paceline.core.cluster_state import RESTORER
from paceline.core.errors import Closed, Disconnected, SchemaError
from paceline.engines.base import engine
from paceline.hosting.base import GRACE, Hosting, OnEnd, Wanted
from paceline.hosting.mirrors import Mirrors
from paceline.hosting.servers import START_LIMIT, Fleet, InProcess
from paceline.session import Session
from paceline.worker.line import Setup

REACH_LIMIT = 10.0
"""Seconds within which this process reaches servers that say that they are there."""


class Anywhere(Hosting):
    """Where the engine places tasks on hosts that this one may not be among.

    A server listens at its host's address, and for those on its own host at a name. One that is
    started again has to be where it was, since sessions look for it there.
    """

    def __init__(self, wanted: Wanted) -> None:
        if wanted.servers == 0:
            raise SchemaError(
                f"ps=0: a server in this process is for engines of this host, not {wanted.engine!r}"
            )
        if wanted.carrier != "unix":
            raise SchemaError(
                f"transport={wanted.carrier!r}: tasks on several hosts use TCP, and those of one"
                " host its shared memory, by themselves"
            )
        self.engine = engine(wanted.engine)
        self.lasts = wanted.lasts
        self._least_epoch = wanted.least_epoch
        self._secret = secrets.token_bytes(32)
        self._names = [f"ps:{index}" for index in range(wanted.servers)]
        self._fleet = Fleet(self._secret)
        self._mirrors = Mirrors(self.engine, self._secret)
        self.engine.placed = self._mirrors.placed
        self._targets: tuple[str, ...] = ()

    def start(self, on_end: OnEnd, workers: Sequence[str]) -> None:
        self.engine.reserve([*self._names, *workers])
        servers = [InProcess(self.engine, name, on_end) for name in self._names]
        self._fleet.all = [*servers]
        for index, server in enumerate(servers):
            server.start(self._serve(index))
        self._targets = tuple(self._placed(server) for server in servers)
        self._fleet.target = self._targets[0]
        for server in servers:
            server.send(ps.Servers(self._targets))
        self._mirrors.servers = tuple(zip(self._names, self._targets, strict=True))

    def setup(self, job: str, index: int, seed: int) -> Setup:
        return Setup(
            self._targets[0], self._secret, job, index, seed, alone=True, lasting=self.lasts
        )

    def preflight(self, workers: int, threads: int) -> list[str]:
        # What fits where is the engine's.
        return []

    def chief(self) -> Session:
        try:
            return self._fleet.chief(lasts=self.lasts, limit=REACH_LIMIT)
        except Disconnected as e:
            if self._fleet.ended():
                raise
            raise Disconnected(
                f"the chief cannot reach the servers that run as {' and '.join(self._told())}: {e};"
                " this host has to reach these addresses: see its network, and firewalls"
            ) from e

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
        self._start(self._names.index(task), restoring=True)

    def restorer(self) -> Session:
        return self._fleet.joined(RESTORER)

    def _start(self, index: int, *, restoring: bool = False) -> None:
        """Start a server again, where and in an epoch above that it had before."""
        server = self._fleet.all[index]
        assert isinstance(server, InProcess)
        self._least_epoch = max(self._least_epoch, round(time.time())) + 1
        with suppress(Closed):  # it has ended once more, which its listener is told
            server.start(self._serve(index, self._targets[index], restoring=restoring))
            server.send(ps.Servers(self._targets))

    def give_up(self) -> None:
        self._mirrors.close()
        self._fleet.given_up = True

    def close(self) -> None:
        self.give_up()
        with ExitStack() as steps:
            steps.callback(self.engine.close, GRACE)
            for server in self._fleet.all:
                steps.callback(server.stop, GRACE)

    def _placed(self, server: InProcess) -> str:
        """Where a server is that was started."""
        place = server.place(START_LIMIT)
        if place is None:
            what = server.became() or f"{server.name} has not begun after {START_LIMIT} s"
            raise Disconnected(f"launch: {what}")
        return place

    def _told(self) -> list[str]:
        return [f"{n} at {t}" for n, t in zip(self._names, self._targets, strict=True)]

    def _serve(self, index: int, target: str = "", *, restoring: bool = False) -> ps.ServeAt:
        return ps.ServeAt(
            target, self._secret, index=index, least_epoch=self._least_epoch, restoring=restoring
        )
