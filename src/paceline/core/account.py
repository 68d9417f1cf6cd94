"""Where time goes: at each moment to one cause, so that the causes' sum is the wall time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

STARTING, IDLE, BUSY, HANDING = "starting", "idle", "busy", "handing over"
ADMISSION, BATCH, CALLS = "admission", "batch", "calls"
VARIABLE, QUEUE, SERVER, REQUESTS = "variable", "queue", "server", "requests"


class Times(NamedTuple):
    """An account as it was `at` a time of this machine's monotonic clock, in seconds."""

    at: float
    began: float
    cause: str
    seconds: dict[str, float]


class Account:
    """The time of one thread; `enter` is for that thread, `times` for any.

    `mine` says whether the caller is on that thread: what others do is not counted.
    """

    __slots__ = ("_clock", "_seconds", "_since", "began", "cause", "mine")

    def __init__(
        self,
        cause: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        mine: Callable[[], bool] = lambda: True,
    ) -> None:
        self._clock = clock
        self.mine = mine
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.began = self._since = clock()
        self.cause = cause

    def enter(self, cause: str) -> str:
        """From now on time goes to `cause`; the one before."""
        now, before = self._clock(), self.cause
        self._seconds[before] += now - self._since
        self._since, self.cause = now, cause
        return before

    @contextmanager
    def spent_on(self, cause: str) -> Generator[None, None, None]:
        """Count this block as `cause`, if it is on this account's own thread."""
        if not self.mine():
            yield
            return
        before = self.enter(cause)
        try:
            yield
        finally:
            self.enter(before)

    def times(self) -> Times:
        """What it says now."""
        while True:
            since, cause, seconds = self._since, self.cause, dict(self._seconds)
            if since == self._since:
                break
        now = self._clock()
        seconds[cause] = seconds.get(cause, 0.0) + now - since
        return Times(now, self.began, cause, seconds)


def continued(times: Times, seconds: float, cause: str) -> Times:
    """The same account `seconds` later, all of them spent on `cause`."""
    later = dict(times.seconds)
    later[cause] = later.get(cause, 0.0) + seconds
    return Times(times.at + seconds, times.began, cause, later)
