"""Says which servers of a session are gone, and which are back, also where nobody asks them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from contextlib import suppress

from paceline.connection import Connection
from paceline.core.errors import Closed, PacelineError
from paceline.lines import AGAIN, Lines

_log = logging.getLogger("paceline")

EVERY = 2.0
"""Seconds from one look to the next."""


class Lookout:
    """A thread that looks at a session's lines until they end.

    It joins again at a server that was started again, which so knows who belongs to its cluster.
    """

    def __init__(self, lines: Lines, task: str) -> None:
        # Who forgets a session without closing it leaves no thread behind.
        known = weakref.ref(lines)
        self._thread = threading.Thread(
            target=_run, args=(known, lines.ending, task), name="paceline-lookout", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended, which it does when the lines are."""
        self._thread.join()


def _run(known: weakref.ref[Lines], ending: threading.Event, task: str) -> None:
    seen: dict[str, weakref.ref[Connection]] = {}
    gone: dict[str, float] = {}
    while not ending.wait(EVERY):
        lines = known()
        if lines is None or not _looked(lines, task, seen, gone):
            return
        del lines


def _looked(
    lines: Lines, own: str, seen: dict[str, weakref.ref[Connection]], gone: dict[str, float]
) -> bool:
    """Say what is new; whether to go on, which there is no need to once the cluster is done."""
    for task, line in lines.now(lines.tasks).items():
        if not line.alive():
            why = line.ending()
            if isinstance(why, Closed):
                return False
            if task not in gone:
                gone[task] = time.monotonic()
                said = "it has ended" if why is None else str(why)
                _log.warning("%s: the server %s is gone: %s", own, line.where, said)
            with suppress(PacelineError):
                line = lines.line(task, AGAIN)
        if line.alive():
            before = seen.get(task)
            if task in gone:
                away = time.monotonic() - gone.pop(task)
                _log.warning("%s: the server %s is back, after %.0f s", own, line.where, away)
            elif before is not None and before() is not line:
                _log.warning("%s: the server %s was started again", own, line.where)
            seen[task] = weakref.ref(line)
    return True
