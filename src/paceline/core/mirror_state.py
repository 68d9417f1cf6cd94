"""A mirror: copies of versions, each fetched once. A version's bytes never change, so it decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.waiting import NOT_YET, NotYet, Stored

KEEP = 2
"""Copies of one thing that are kept though nobody looks at them: those last asked for."""

IDLE = 600.0
"""Seconds after which what nobody has asked for or looks at goes."""


class Thing(NamedTuple):
    """What has versions: a variable at its home, or a part of one; by its server and its key.

    And by which run of its home counts the versions: another one may begin with the same numbers.
    """

    address: str
    key: str
    part: bool
    home: int = 0


@dataclass(eq=False, slots=True)
class Copy:
    """One version of a thing, on its way or here."""

    thing: Thing
    number: int
    asked: float
    """When it was last asked for."""
    stored: Stored | None = None
    lost: bool = False
    """Whether it could not be had."""
    holders: int = 0

    def look(self) -> Stored | NotYet | None:
        """The tree, once it is here; `None` if it could not be had."""
        return NOT_YET if self.stored is None and not self.lost else self.stored


@dataclass(slots=True)
class MirrorState:
    """The copies that there are. At most `keep` of a thing are kept that nobody looks at.

    Attributes:
        asked, fetched, failed: how many copies were asked for, came, and could not be had.
        fetched_bytes: the bytes of those that came.
    """

    keep: int = KEEP
    asked: int = 0
    fetched: int = 0
    failed: int = 0
    fetched_bytes: int = 0
    _copies: dict[Thing, dict[int, Copy]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all copies that are here."""
        return sum(copy.stored.nbytes for copy in self if copy.stored is not None)

    def __iter__(self) -> Iterator[Copy]:
        for copies in self._copies.values():
            yield from copies.values()

    def ask(self, thing: Thing, number: int, now: float) -> tuple[Copy, bool]:
        """The copy of a version, and whether it has to be fetched, which nobody does yet."""
        self.asked += 1
        copies = self._copies.setdefault(thing, {})
        found = copies.get(number)
        if found is not None:
            found.asked = now
            # What was asked for last is last.
            copies[number] = copies.pop(number)
            return found, False
        made = copies[number] = Copy(thing, number, now)
        return made, True

    def came(self, copy: Copy, stored: Stored | None) -> None:
        """A copy is here, or could not be had."""
        if stored is None:
            copy.lost = True
            self.failed += 1
            self._forget(copy)
            return
        copy.stored = stored
        self.fetched += 1
        self.fetched_bytes += stored.nbytes
        self._drop(copy.thing)

    def hold(self, copy: Copy) -> None:
        """Somebody looks at a copy."""
        copy.holders += 1

    def let_go(self, copy: Copy) -> None:
        """Undo one `hold`."""
        copy.holders -= 1
        if not copy.holders:
            self._drop(copy.thing)

    def tidy(self, now: float) -> None:
        """Drop what nobody has asked for in a while, nor looks at."""
        for copy in list(self):
            if copy.stored is not None and not copy.holders and now - copy.asked > IDLE:
                self._forget(copy)

    def _drop(self, thing: Thing) -> None:
        copies = self._copies.get(thing, {}).values()
        idle = [copy for copy in copies if copy.stored is not None and not copy.holders]
        for copy in idle[: max(0, len(idle) - self.keep)]:
            self._forget(copy)

    def _forget(self, copy: Copy) -> None:
        copies = self._copies[copy.thing]
        del copies[copy.number]
        if not copies:
            del self._copies[copy.thing]
