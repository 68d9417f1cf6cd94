"""Starts servers again that have ended, and has what they held brought back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from paceline.core.budget import WINDOW, Budget
from paceline.core.errors import Disconnected, PacelineError
from paceline.core.numbers import times

_log = logging.getLogger("paceline")

NOTICE = 5.0
"""Seconds within which it is known that a server has ended which no longer answers."""


class Revival:
    """Starts servers again, each at most `restarts` times a minute, after pauses that double.

    `start` starts one of them, `restore` brings back what those that were started held, and
    `give_up` hears why they are not; the last two on a thread of this, which there is once a server
    has ended.
    """

    def __init__(
        self,
        start: Callable[[str], None],
        restore: Callable[[], None],
        give_up: Callable[[str], None],
        restarts: int,
    ) -> None:
        self.counts: dict[str, int] = {}
        """How often each was started again."""
        self._start = start
        self._restore = restore
        self._give_up = give_up
        self._restarts = restarts
        self._budgets: dict[str, Budget] = {}
        self._ended: dict[str, str] = {}
        self._changed = threading.Condition()
        self._over = False
        self._thread: threading.Thread | None = None

    def ended(self, task: str, how: str) -> None:
        """A server has ended; `how` is the end of a sentence about it. Never waits."""
        with self._changed:
            if self._over:
                return
            self._ended[task] = how
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paceline-revival", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Start none from now on, without waiting. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until nothing is done any more. Idempotent."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        # They are parts of what this is a part of, which would be kept by that.
        self._start, self._restore, self._give_up = _nothing, _nothing, _nothing

    def _run(self) -> None:
        try:
            while self._next(None):
                self._revive()
        except PacelineError as e:
            self._end(f"it could not be brought back: {e}")
        except BaseException as e:
            _log.exception("a server could not be started again")
            self._end(f"it could not be started again: {e!r}")

    def _revive(self) -> None:
        """Start all that have ended, and bring back what they held; again if another one ends."""
        while True:
            with self._changed:
                ended, self._ended = self._ended, {}
            for task, how in ended.items():
                if not self._again(task, how):
                    return
            try:
                self._restore()
                return
            except Disconnected as e:
                # One of them has ended again.
                if not self._next(NOTICE):
                    raise e from None

    def _again(self, task: str, how: str) -> bool:
        """Start one again after a pause; whether that was done."""
        budget = self._budgets.setdefault(task, Budget(self._restarts))
        if not budget.allow(time.monotonic()):
            self._end(
                f"the server, {task}, {how}: it ended {times(budget.used + 1)} within"
                f" {WINDOW:.0f} s, its budget is restarts={self._restarts}"
            )
            return False
        _log.warning("the server, %s, %s; it is started again", task, how)
        with self._changed:
            if self._changed.wait_for(lambda: self._over, budget.back_off):
                return False
        self._start(task)
        self.counts[task] = self.counts.get(task, 0) + 1
        return True

    def _next(self, limit: float | None) -> bool:
        """Wait until a server has ended; not so when this has."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._over, limit)
            return bool(self._ended) and not self._over

    def _end(self, why: str) -> None:
        with self._changed:
            if self._over:
                return
            self._over = True
        self._give_up(why)


def _nothing(*_: object) -> None:
    """There is nothing to do any more."""
