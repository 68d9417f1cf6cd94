"""Connections that have not proved themselves: how many there are, for how long, and whose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from paceline.transports.greeting import LIMIT, Greeting

STRANGERS = 256
"""How many there are at once. One more takes the place of the oldest of whoever has most."""

TOLD, WINDOW = 20, 10.0
"""How many refusals are told within so many seconds; more are counted."""


class Strangers:
    """All connections of one server that are being greeted.

    `drop` ends one for whoever watches it. A host over TCP, and a process over a Unix socket, has
    a share of the places: one that keeps calling takes them from itself as long as it has more than
    any other, and an honest host that calls meanwhile has the time to answer.
    """

    def __init__(self, drop: Callable[[Greeting], None], note: Callable[[str], None]) -> None:
        self._drop = drop
        self._note = note
        self._until: dict[Greeting, float] = {}
        self._origins: Counter[str] = Counter()
        self._window = 0.0
        self._told = 0

    def __bool__(self) -> bool:
        return bool(self._until)

    def __len__(self) -> int:
        return len(self._until)

    def add(self, greeting: Greeting) -> None:
        """Take one in, and drop another if there are too many."""
        if len(self._until) >= STRANGERS:
            self.drop_one()
        self._until[greeting] = time.monotonic() + greeting.patience
        self._origins[greeting.origin] += 1

    def drop_one(self) -> None:
        """Drop the oldest of the origin that has most of them; of several such, the oldest."""
        most = max(self._origins.values())
        self.drop(next(each for each in self._until if self._origins[each.origin] == most))

    def drop(self, greeting: Greeting) -> None:
        """End one."""
        self.remove(greeting)
        self._drop(greeting)

    def remove(self, greeting: Greeting) -> None:
        """One of them has proved itself."""
        del self._until[greeting]
        self._origins[greeting.origin] -= 1
        if not self._origins[greeting.origin]:
            del self._origins[greeting.origin]

    def refused(self, greeting: Greeting, why: object) -> None:
        """End one, and say why, unless many such were told just now."""
        self.drop(greeting)
        now = time.monotonic()
        if now - self._window > WINDOW:
            self._window, more, self._told = now, self._told - TOLD, 0
            if more > 0:
                self._note(f"refused {more} connections more")
        self._told += 1
        if self._told <= TOLD:
            self._note(f"refused a connection: {why}")

    def expire(self) -> float:
        """Drop those whose time is up; seconds until there is more to do."""
        now = time.monotonic()
        for greeting, deadline in list(self._until.items()):
            if deadline > now:
                continue
            if more := greeting.more_time():
                self._until[greeting] = now + more
            else:
                self.drop(greeting)
        return min(self._until.values(), default=now + LIMIT) - now

    def close(self) -> None:
        """End all of them."""
        for greeting in list(self._until):
            self.drop(greeting)
