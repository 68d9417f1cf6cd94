"""How often something may be started again, and how long to wait before."""

from __future__ import annotations

from collections import deque

WINDOW = 60.0
"""Seconds in which something may be restarted as often as its budget says."""

BACK_OFF = 0.1
MOST_BACK_OFF = 5.0


class Budget:
    """At most `restarts` within `WINDOW`."""

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self._at: deque[float] = deque()

    @property
    def used(self) -> int:
        """Restarts within the window that ended with the last question."""
        return len(self._at)

    def allow(self, now: float) -> bool:
        """Whether there may be another restart, which is then counted."""
        while self._at and now - self._at[0] > WINDOW:
            self._at.popleft()
        if len(self._at) >= self.restarts:
            return False
        self._at.append(now)
        return True

    @property
    def back_off(self) -> float:
        """Seconds to wait before the next start; they double with each restart."""
        return float(min(MOST_BACK_OFF, BACK_OFF * 2.0 ** (len(self._at) - 1)))
