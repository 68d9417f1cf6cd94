"""Everything is in this process: whoever calls the server runs it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engines.base import engine
from paceline.hosting.base import GRACE, Hosting, OnEnd, Wanted
from paceline.preflight import limits, preflight
from paceline.server.local import LocalServer
from paceline.session import Session
from paceline.worker.line import Setup


class Local(Hosting):
    """One server for all, and workers that share this process."""

    def __init__(self, wanted: Wanted) -> None:
        self.engine = engine(wanted.engine)
        self._server = LocalServer(waits=self.engine.concurrent, least_epoch=wanted.least_epoch)

    def start(self, on_end: OnEnd, workers: Sequence[str]) -> None:
        """There is nothing to start."""

    def give_up(self) -> None:
        """None is started again."""

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
