"""A whole number that many add to, and wait for."""

from __future__ import annotations

from typing import Any

from paceline.core.errors import SchemaError
from paceline.core.facts import CounterFacts, Noted
from paceline.core.waiting import NOT_YET, NotYet

LEAST, MOST = -(1 << 63), (1 << 63) - 1


class CounterState:
    """An int64 that starts at `start`.

    Raises:
        SchemaError: `start` is no int64.
    """

    def __init__(self, name: str, start: int) -> None:
        self.name = name
        self.start = _int64(start, f"counter '{name}': start")
        self.value = start

    @property
    def definition(self) -> dict[str, Any]:
        """What it was made with."""
        return {"start": self.start}

    def add(self, n: int) -> int:
        """Add `n`; the value after.

        Raises:
            SchemaError: it would leave the range of int64; nothing was added.
        """
        self.value = _int64(self.value + n, f"counter '{self.name}' at {self.value}, plus {n}")
        return self.value

    def check(self, n: int) -> None:
        """Raise as `add` would."""
        _int64(self.value + n, f"counter '{self.name}' at {self.value}, plus {n}")

    def reached(self, at_least: int) -> int | NotYet:
        """The value, once it is `at_least` or more."""
        return NOT_YET if self.value < at_least else self.value

    @property
    def pristine(self) -> bool:
        """Whether it is as it was made."""
        return self.value == self.start

    def noted(self) -> Noted:
        """All that it is."""
        return Noted(CounterFacts(self.start, self.value))

    def revive(self, facts: CounterFacts) -> None:
        """Be at what was noted of one that started alike; raises as making one does."""
        self.value = _int64(facts.value, f"counter '{self.name}'")

    def stats(self) -> dict[str, Any]:
        """What it is now, as plain data."""
        return {"value": self.value, "start": self.start}


def _int64(number: int, what: str) -> int:
    if LEAST <= number <= MOST:
        return number
    raise SchemaError(f"{what} is {number}, which is no int64 ({LEAST} to {MOST})")
