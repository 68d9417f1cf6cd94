"""Time, as something a test can hold in its hand."""

import math
import time
from typing import Protocol

FOR_EVER = 1e9
"""Seconds, some 30 years, beyond which a wait has no end; not every system call takes more."""


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"a clock never goes back: advance({seconds})")
        self._now += seconds


def left(limit: float | None, began: float) -> float | None:
    """What is left, in seconds, of a wait that began at that time of the monotonic clock."""
    return None if limit is None else max(0.0, limit - (time.monotonic() - began))


def checked_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Return `timeout` in seconds; `None` waits for ever, `0` not at all.

    Raises:
        ValueError: it is negative or not a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ValueError(f"{name} must be seconds or None, not {timeout!r}")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"{name} must be >= 0 seconds or None, not {timeout!r}")
    return None if timeout > FOR_EVER else float(timeout)
