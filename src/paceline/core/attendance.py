"""Which tasks are there, which failed: what is new since somebody last looked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Ended: TypeAlias = Mapping[str, Sequence[Any]]
"""For each task that failed or was lost how often it did, and how the last time."""


class Attendance:
    """The tasks of a cluster, as they were at the last look; those that `ended` before are known.

    Attributes:
        ended: how often each has failed or was lost.
    """

    def __init__(self, tasks: Iterable[str], ended: Ended) -> None:
        self._tasks = list(tasks)
        self._missing: list[str] = []
        self.ended: dict[str, int] = {}
        self.failures(ended)

    def failures(self, ended: Ended) -> list[str]:
        """Say who has failed or was lost since the last look, in a line each."""
        told = []
        for name, (count, how) in ended.items():
            more = int(count) - self.ended.get(name, 0)
            if more > 0:
                self.ended[name] = int(count)
                told.append(f"{name} {how}" + (f" ({more} times since)" if more > 1 else ""))
        return told

    def missing(self, members: Iterable[str], when: str = "") -> list[str]:
        """Say who is missing, if these are others than at the last look, or `when` is said."""
        there = set(members)
        missing = [name for name in self._tasks if name not in there]
        if missing == self._missing and not (missing and when):
            return []
        self._missing = missing
        return [f"missing{when}: {', '.join(missing)}" if missing else "everybody is here"]
