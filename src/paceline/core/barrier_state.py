"""A meeting of `n`, round after round."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from paceline.core.errors import Closed, SchemaError
from paceline.core.facts import BarrierFacts, Noted
from paceline.core.waiting import NOT_YET, NotYet


class BarrierState:
    """Lets `n` arrivals through together, each with its place in the order of arrival.

    An arrival is any object, and the task that it is of. Who is taken out before the round is
    complete never was in it.

    Raises:
        SchemaError: `n` is less than 1.
    """

    def __init__(self, name: str, n: int) -> None:
        if n < 1:
            raise SchemaError(f"barrier '{name}': n is 1 or more, not {n}")
        self.name = name
        self.n = n
        self.rounds = 0
        """How many were completed."""
        self.gone: list[str] = []
        """Tasks that died while they waited in the round that is open, newest last."""
        self._arrived: dict[Hashable, str] = {}
        self._places: dict[Hashable, int | Closed] = {}

    @property
    def definition(self) -> dict[str, Any]:
        """What it was made with."""
        return {"n": self.n}

    @property
    def arrived(self) -> list[str]:
        """The tasks that wait in the round that is open, in the order of arrival."""
        return list(self._arrived.values())

    def arrive(self, arrival: Hashable, task: str) -> bool:
        """Take an arrival in; whether the round is complete with it."""
        self._arrived[arrival] = task
        if len(self._arrived) < self.n:
            return False
        self._end({each: place for place, each in enumerate(self._arrived)})
        self.rounds += 1
        return True

    def place(self, arrival: Hashable) -> int | NotYet:
        """Its place, 0 to n-1, once its round is complete; it is told once.

        Raises:
            Closed: its round was aborted.
        """
        place = self._places.pop(arrival, NOT_YET)
        if isinstance(place, Closed):
            raise place
        return place

    def leave(self, arrival: Hashable) -> None:
        """Take out an arrival that waits no longer."""
        self._arrived.pop(arrival, None)
        self._places.pop(arrival, None)

    def died(self, arrival: Hashable) -> None:
        """Take out an arrival whose task is gone, and remember that for the others."""
        task = self._arrived.get(arrival)
        if task is not None:
            self.gone = [*self.gone[-7:], task]
        self.leave(arrival)

    def abort(self, by: str) -> None:
        """End the waits of all who have arrived."""
        error = f"wait at barrier '{self.name}': {by} aborted the round"
        self._end({each: Closed(error) for each in self._arrived})

    def missing(self) -> str:
        """Who is there and who is not, as part of a message."""
        there = ", ".join(self.arrived[:16]) or "nobody"
        more = ", ..." if len(self._arrived) > 16 else ""
        gone = f"; gone since: {', '.join(self.gone)}" if self.gone else ""
        return (
            f"{len(self._arrived)} of {self.n} have arrived ({there}{more}),"
            f" {self.n - len(self._arrived)} missing{gone}"
        )

    @property
    def pristine(self) -> bool:
        """Whether nobody has arrived yet."""
        return not self.rounds and not self._arrived

    def noted(self) -> Noted:
        """What it was made with: who waits here is to arrive again."""
        return Noted(BarrierFacts(self.n))

    def stats(self) -> dict[str, Any]:
        """What it is now, as plain data."""
        return {"n": self.n, "arrived": self.arrived, "rounds": self.rounds}

    def _end(self, places: dict[Hashable, Any]) -> None:
        self._places |= places
        self._arrived.clear()
        self.gone = []
