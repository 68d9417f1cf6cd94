"""Workers that have said nothing for long: they are told of, and left alone."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.stats import Stats

SILENT = 10.0
"""Seconds without a request from which on a worker that has work is told of."""


class Silences:
    """Looks at one snapshot after the other.

    Each silence is told once, and again when it has become twice as long as the longest that was
    told of that process: items that always take long are told of a few times and no more.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, int, float]] = {}
        self._due: dict[str, float] = {}

    def found(self, now: Stats) -> Iterator[tuple[str, float]]:
        """The workers to tell of, and for how many seconds each has been silent."""
        for worker in now.workers:
            name, starts, requests = worker.name, worker.starts, worker.requests
            before = self._since.get(name)
            if before is None or before[0] != starts:
                self._due[name] = SILENT
            # One that has not joined is on its way; one that waits has said for what.
            works = worker.alive and worker.busy and requests > 0 and worker.waits is None
            if before is None or not works or before[:2] != (starts, requests):
                self._since[name] = starts, requests, now.wall
                continue
            silent = now.wall - before[2]
            if silent >= self._due[name]:
                self._due[name] = 2 * silent
                yield name, silent
