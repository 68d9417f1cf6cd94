"""Looks at a run now and then, and warns with numbers when something holds it up."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from paceline.core.errors import Closed, PacelineError
from paceline.core.silence import Silences
from paceline.core.stats import Stats
from paceline.core.verdict import findings

_log = logging.getLogger("paceline")

EVERY = 2.0
WINDOW = 10.0
"""Seconds over which a run is judged."""


class Watch:
    """A thread that judges; each trouble is told once, and again when it has been gone since.

    `at` says what a worker is at that has said nothing for long, as the end of a message. Not
    `beside` others, where all is in one thread, there is none.
    """

    def __init__(
        self,
        look: Callable[[], Stats],
        at: Callable[[str], str] = lambda worker: "",
        *,
        every: float = EVERY,
        window: float = WINDOW,
        beside: bool = True,
    ) -> None:
        self._look = look
        self._at = at
        self._beside = beside
        self._silences = Silences()
        self._every = every
        self._window = window
        self._seen: deque[Stats] = deque(maxlen=1 + round(window / every))
        self._told: set[tuple[str, str]] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on. Idempotent."""
        if self._beside and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        # It is a part of what it looks at, which would be kept by that.
        self._look, self._at = _over, _nowhere

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            try:
                self.judge(self._look())
            except Closed:
                return
            except PacelineError:
                # The server is gone, which whoever trains hears of; it may be started again.
                self._seen.clear()

    def judge(self, now: Stats) -> None:
        """Compare with how it was a window ago, and tell what is new."""
        if self._seen and self._seen[-1].restarted != now.restarted:
            # Counters began anew.
            self._seen.clear()
        for worker, silent in self._silences.found(now):
            _log.warning("%s has said nothing for %.0f s%s", worker, silent, self._at(worker))
        self._seen.append(now)
        before = self._seen[0]
        if now.wall - before.wall < 0.9 * self._window:
            return
        found = list(findings(before, now))
        for about, text in found:
            if about not in self._told:
                _log.warning("%s", text)
        self._told = {about for about, _ in found}


def _nowhere(worker: str) -> str:
    return ""


def _over() -> Stats:
    raise Closed("the cluster is closed")
