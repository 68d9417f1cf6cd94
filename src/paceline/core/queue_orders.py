"""In which order a queue hands out what waits in it."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from paceline.core.errors import SchemaError
from paceline.core.queue_items import Run

ORDERS = ("fifo", "shuffle", "priority")

Keep = Callable[[Run], bool]


class Definition(NamedTuple):
    """What a queue is defined with."""

    capacity: int
    capacity_bytes: int
    per_producer: int | None = None
    order: str = "fifo"
    min_after_dequeue: int = 0
    seed: int | None = None

    def __str__(self) -> str:
        names = self._fields if self.order == "shuffle" else self._fields[:4]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def check(self, name: str) -> None:
        """Raise SchemaError for what no queue can be."""
        bounds = (self.capacity, self.capacity_bytes, self.per_producer)
        if any(bound is not None and bound < 1 for bound in bounds):
            raise SchemaError(f"queue '{name}': bounds are 1 or more, not {bounds}")
        if self.order not in ORDERS:
            raise SchemaError(f"queue '{name}': order is one of {ORDERS}, not {self.order!r}")
        if self.order != "shuffle" and (self.min_after_dequeue or self.seed is not None):
            raise SchemaError(
                f"queue '{name}': min_after_dequeue and seed are for order='shuffle', this one is"
                f" {self.order!r}"
            )
        if not 0 <= self.min_after_dequeue < self.capacity:
            raise SchemaError(
                f"queue '{name}': min_after_dequeue={self.min_after_dequeue} of"
                f" capacity={self.capacity}: at least one item must be free to go"
            )


class Order(ABC):
    """Runs that wait. Whoever uses it counts the items."""

    @abstractmethod
    def add(self, run: Run) -> None:
        """Take in items that are new: their numbers are the highest."""

    @abstractmethod
    def take(self, count: int) -> list[Run]:
        """Take out the next `count` items; there are that many."""

    @abstractmethod
    def put_back(self, runs: list[Run]) -> None:
        """Take in items that were taken once, in the order in which they were."""

    @abstractmethod
    def sift(self, keep: Keep) -> list[Run]:
        """Take out and return the runs for which `keep(run)` is false."""

    @abstractmethod
    def noted(self, held: list[Run]) -> Callable[[], list[Run]]:
        """What waits, and what is held as if it came back, in an order to be added in again.

        It is put together when it is called, as it was before that.
        """

    def draws(self) -> list[int] | None:
        """How far its draws have got, where they can be made again."""
        return None

    def go_on(self, draws: list[int]) -> None:
        """Draw on from there; raises ValueError if draws never get there."""
        raise ValueError("nothing is drawn in this order")


def ordered(definition: Definition) -> Order:
    """An empty order of that kind."""
    if definition.order == "shuffle":
        return Shuffle(definition.seed)
    return Priority() if definition.order == "priority" else Fifo()


class Fifo(Order):
    """By number: first in, first out. What comes back goes to the head."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()

    def add(self, run: Run) -> None:
        self._runs.append(run)

    def take(self, count: int) -> list[Run]:
        taken = []
        while count:
            run = self._runs.popleft()
            if run.count > count:
                run, rest = run.split(count)
                self._runs.appendleft(rest)
            taken.append(run)
            count -= run.count
        return taken

    def put_back(self, runs: list[Run]) -> None:
        # Others may have returned, or hold, items between these.
        if runs and self._runs and self._runs[0].number < runs[-1].number:
            self._runs = deque(sorted([*runs, *self._runs], key=lambda run: run.number))
        else:
            self._runs.extendleft(reversed(runs))

    def sift(self, keep: Keep) -> list[Run]:
        out = [run for run in self._runs if not keep(run)]
        if out:
            self._runs = deque(run for run in self._runs if keep(run))
        return out

    def noted(self, held: list[Run]) -> Callable[[], list[Run]]:
        runs = [*held, *self._runs]
        return lambda: sorted(runs, key=lambda run: run.number)


class Shuffle(Order):
    """Each item that waits is as likely to be the next; what comes back is one of them again.

    With a seed, the same items come out after the same order of events.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = Random(seed)
        self._seeded = seed is not None
        # A run in which an item is, and its place there: what is not taken is never split.
        self._items: list[tuple[Run, int]] = []

    def add(self, run: Run) -> None:
        self._items += [(run, place) for place in range(run.count)]

    def take(self, count: int) -> list[Run]:
        items, below = self._items, self._random.randrange
        taken = []
        for _ in range(count):
            place = below(len(items))
            items[place], items[-1] = items[-1], items[place]
            run, at = items.pop()
            taken.append(run.part(at, 1))
        return taken

    def put_back(self, runs: list[Run]) -> None:
        for run in runs:
            self.add(run)

    def sift(self, keep: Keep) -> list[Run]:
        judged = [(item, keep(item[0].part(item[1], 1))) for item in self._items]
        self._items = [item for item, kept in judged if kept]
        return [run.part(at, 1) for (run, at), kept in judged if not kept]

    def noted(self, held: list[Run]) -> Callable[[], list[Run]]:
        items = [*self._items, *((run, place) for run in held for place in range(run.count))]
        return lambda: [run.part(at, 1) for run, at in items]

    def draws(self) -> list[int] | None:
        return list(self._random.getstate()[1]) if self._seeded else None

    def go_on(self, draws: list[int]) -> None:
        try:
            self._random.setstate((3, tuple(draws), None))
        except TypeError as e:
            raise ValueError(str(e)) from e


class Priority(Order):
    """The lowest priority first; among equals by number. What comes back goes to its place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run]] = []

    def add(self, run: Run) -> None:
        heapq.heappush(self._heap, _entry(run))

    def take(self, count: int) -> list[Run]:
        taken = []
        while count:
            run = heapq.heappop(self._heap)[2]
            if run.count > count:
                run, rest = run.split(count)
                self.add(rest)
            taken.append(run)
            count -= run.count
        return taken

    def put_back(self, runs: list[Run]) -> None:
        for run in runs:
            self.add(run)

    def sift(self, keep: Keep) -> list[Run]:
        runs = [run for _, _, run in self._heap]
        out = [run for run in runs if not keep(run)]
        if out:
            self._heap = _entries(run for run in runs if keep(run))
        return out

    def noted(self, held: list[Run]) -> Callable[[], list[Run]]:
        runs = [*held, *(run for _, _, run in self._heap)]
        return lambda: sorted(runs, key=lambda run: run.number)


def _entry(run: Run) -> tuple[int, int, Run]:
    return run.priority, run.number, run


def _entries(runs: Iterable[Run]) -> list[tuple[int, int, Run]]:
    made = [_entry(run) for run in runs]
    heapq.heapify(made)
    return made
