"""Containers: how often each was reset and by whom, and what there is, by whom made.

All resets of a cluster are counted together, by its first server: up from its epoch, so that one
that was started again counts on above all that it has forgotten. A container's generation is the
number of its last reset; a key with an older one is of something that is gone. A key with a newer
one comes from somebody who has heard of a reset that this server has not carried out yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.core.errors import SchemaError, WasReset
from paceline.core.names import BETWEEN, checked_container, parts

EPOCH_BITS = 20
"""Of a reset's number, what counts the resets in one epoch."""

NUMBERS = 10**18
"""Below it are the numbers of resets: keys have as many digits, and messages 64 bits."""

FUTURE = 10 * 366 * 86400
"""Seconds that the epoch of another server may be ahead: what tells of a later reset is a lie."""

CONTAINERS = 4096
"""How many may have been reset by name since all of them were."""


class Reset(NamedTuple):
    """One reset: its number, and who asked for it, if that is known."""

    number: int = 0
    by: str = ""


class Made(NamedTuple):
    """By whom something was made, and when."""

    by: str
    at: float


class ContainerState:
    """The resets that a server knows of, and what it has.

    Attributes:
        latest: the number of the last reset of any container.
        made: what there is, by kind and key.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.latest = epoch << EPOCH_BITS
        self._most = min(NUMBERS, (epoch + FUTURE) << EPOCH_BITS)
        # Whatever lie the first server was told, the others believe the numbers it then gives.
        self._believed = min(NUMBERS, (epoch + FUTURE // 2) << EPOCH_BITS)
        self.made: dict[tuple[str, str], Made] = {}
        self._all = Reset()
        self._of: dict[str, Reset] = {}

    def reset(self, containers: Iterable[str] | None, by: str, number: int | None = None) -> int:
        """Take note of a reset, of all containers for `None`; its number, the next unless told.

        Raises:
            SchemaError: one can be no container, too many were reset by name, or no reset can have
                that number.
        """
        known = None if containers is None else {checked_container(each) for each in containers}
        counts = number is None
        if number is None:
            # Above all that was told of these containers, be it true or not.
            before = self._of.values() if known is None else map(self._last, known)
            number = 1 + max([self.latest, *(each.number for each in before)])
        most = NUMBERS if counts else self._most
        if not 0 < number < most:
            raise SchemaError(f"no reset has the number {number}; they are 1 to {most - 1}")
        many = len(self._of.keys() | (known or ()))
        if many > CONTAINERS:
            raise SchemaError(
                f"{many} containers were reset by name, {CONTAINERS} may be: reset all of them once"
            )
        new = Reset(number, by)
        if counts:
            self.latest += 1
        else:
            self.latest = max(self.latest, min(number, self._believed))
        if known is None:
            self._all = max(self._all, new)
            self._of = {each: last for each, last in self._of.items() if last > self._all}
        for container in known or ():
            self._of[container] = max(self._last(container), new)
        self.made = {each: made for each, made in self.made.items() if not self.gone(each[1])}
        return new.number

    def generation(self, container: str) -> int:
        """What keys of that container have now."""
        return self._last(container).number

    @property
    def resets(self) -> tuple[int, dict[str, int]]:
        """The number of the last reset of all containers, and those of some by name since."""
        return self._all.number, {each: last.number for each, last in self._of.items()}

    def gone(self, key: str) -> bool:
        """Whether a key is of something that a reset has removed."""
        _, container, generation = parts(key)
        return generation < self.generation(container)

    def ahead(self, key: str) -> bool:
        """Whether a key tells of a reset that is not known here.

        Raises:
            WasReset: what it was a key of is gone.
            SchemaError: it is no key.
        """
        if BETWEEN not in key and not (self._of or self._all.number):
            return False
        _, container, generation = parts(key)
        if generation < self.generation(container):
            raise self.was_reset(key)
        return generation > self.generation(container)

    def was_reset(self, key: str) -> WasReset:
        """What those are told who use what is gone, or wait for it."""
        container = parts(key).container
        by = self._last(container).by
        which = f"container '{container}'" if container else "the default container"
        return WasReset(f"{which} was reset{f' by {by}' if by else ''}")

    def add(self, kind: str, key: str, by: str, at: float) -> None:
        """Something was made."""
        self.made.setdefault((kind, key), Made(by, at))

    def remove(self, kind: str, key: str) -> None:
        """It is not there any more."""
        self.made.pop((kind, key), None)

    def _last(self, container: str) -> Reset:
        return max(self._all, self._of.get(container, self._all))
