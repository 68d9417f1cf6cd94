"""A bounded queue: accepted = delivered + dropped + stored, at every step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import Closed, SchemaError
from paceline.core.messages import Head
from paceline.core.waiting import NOT_YET, NotYet


@dataclass(slots=True, eq=False)
class Item:
    """One accepted item: what is said of it, and its arrays' memory, unread."""

    head: Head
    memory: Any
    nbytes: int
    producer: str
    number: int = -1


@dataclass(slots=True)
class Counters:
    """What became of everything that a queue accepted."""

    accepted: int = 0
    delivered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class QueueState:
    """First in, first out, per producer and over all; bounded by items and by bytes.

    Items handed out count as stored until their receipt.
    """

    def __init__(self, name: str, capacity: int, capacity_bytes: int) -> None:
        self.name = name
        self.capacity = capacity
        self.capacity_bytes = capacity_bytes
        self.counters = Counters()
        self.nbytes = 0
        # Enqueues that wait for room, as whoever parks them says: a closed queue still takes them.
        self.pending_enqueues = 0
        self._waiting: deque[Item] = deque()
        self._held: dict[int, tuple[object, list[Item]]] = {}
        self._held_items = 0
        self._deliveries = 0
        self._tickets = 0
        self._closed_at: int | None = None
        self._cancelled = False

    @property
    def closed(self) -> bool:
        """Whether new enqueues are refused."""
        return self._closed_at is not None

    @property
    def size(self) -> int:
        """Items that a consumer could take now."""
        return len(self._waiting)

    @property
    def stored(self) -> int:
        """Items accepted and neither delivered nor dropped."""
        return len(self._waiting) + self._held_items

    @property
    def taken(self) -> int:
        """Items that consumers hold or have had."""
        return self.counters.delivered + self._held_items

    def ticket(self) -> int:
        """A place in the order of arrival: what came before `close` may still get in."""
        self._tickets += 1
        return self._tickets

    def check(self, items: list[Item], ticket: int) -> int:
        """Refuse what can never get in; the bytes of what can.

        Raises:
            Closed: it was closed before this ticket was drawn, or pending enqueues were cancelled.
            SchemaError: there will never be room for all of them.
        """
        if self._closed_at is not None and (self._cancelled or ticket > self._closed_at):
            raise Closed(f"enqueue '{self.name}': it is closed")
        size = sum(item.nbytes for item in items)
        if len(items) > self.capacity or size > self.capacity_bytes:
            raise SchemaError(
                f"enqueue '{self.name}': {len(items)} items of {size} bytes in one step; it holds"
                f" {self.capacity} items and {self.capacity_bytes} bytes at most: enqueue fewer at"
                " a time, or give it a larger capacity= or capacity_bytes="
            )
        return size

    def enqueue(self, items: list[Item], ticket: int) -> bool | NotYet:
        """Accept all of `items` once there is room for all; raises as `check`."""
        size = self.check(items, ticket)
        if self.stored + len(items) > self.capacity or self.nbytes + size > self.capacity_bytes:
            return NOT_YET
        self.accept(items)
        return True

    def accept(self, items: Iterable[Item]) -> None:
        """Append items, for which room was granted before."""
        for item in items:
            item.number = self.counters.accepted
            self.counters.accepted += 1
            self.nbytes += item.nbytes
            self._waiting.append(item)

    def dequeue(self, least: int, most: int) -> list[Item] | NotYet:
        """The `least` to `most` oldest items, taken in one step once `least` are there.

        What is taken is to be named by `hand_out` in the same step.

        Raises:
            Closed: it is closed and will never hold `least` items again.
            SchemaError: `least` is more than it can hold.
        """
        if least > self.capacity:
            raise SchemaError(
                f"dequeue '{self.name}': {least} items in one step, but it holds at most"
                f" {self.capacity}: take fewer, or give it capacity={least} or more"
            )
        if len(self._waiting) < least:
            if self.closed and not self._held and not self.pending_enqueues:
                raise Closed(
                    f"dequeue '{self.name}': it is closed and holds {self.size} items,"
                    f" {least} were asked for"
                )
            return NOT_YET
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def hand_out(self, items: list[Item], consumer: object) -> int:
        """Note who holds `items`; the delivery that its receipt will name."""
        self._deliveries += 1
        self._held[self._deliveries] = (consumer, items)
        self._held_items += len(items)
        return self._deliveries

    def receipt(self, delivery: int, consumer: object, *, returned: bool = False) -> None:
        """The consumer has its items for good, or gives them back to the head of the queue."""
        holder, items = self._held.get(delivery, (None, []))
        if holder is not consumer:
            return
        del self._held[delivery]
        self._held_items -= len(items)
        if returned:
            self._put_back(items)
            return
        self.counters.delivered += len(items)
        self.nbytes -= sum(item.nbytes for item in items)

    def lost(self, consumer: object) -> None:
        """A consumer is gone: what it had not receipted goes back."""
        mine = [number for number, (holder, _) in self._held.items() if holder is consumer]
        for delivery in mine:
            self.receipt(delivery, consumer, returned=True)

    def drop(self, items: Iterable[Item], reason: str) -> None:
        """Count items that were taken out as dropped."""
        for item in items:
            self.counters.dropped[reason] += 1
            self.nbytes -= item.nbytes

    def sift(self, keep: Any) -> list[Item]:
        """Take out and return the waiting items for which `keep(item)` is false."""
        out = [item for item in self._waiting if not keep(item)]
        if out:
            self._waiting = deque(item for item in self._waiting if keep(item))
        return out

    def close(self, *, cancel: bool = False) -> None:
        """Refuse new enqueues; with `cancel` also those that wait."""
        if self._closed_at is None:
            self._closed_at = self._tickets
        self._cancelled = self._cancelled or cancel

    def _put_back(self, items: list[Item]) -> None:
        # Others may have returned, or hold, items between these.
        if items and self._waiting and self._waiting[0].number < items[-1].number:
            self._waiting = deque(sorted([*items, *self._waiting], key=lambda i: i.number))
        else:
            self._waiting.extendleft(reversed(items))

    def stats(self) -> dict[str, Any]:
        """The counters, as plain data."""
        return {
            "accepted": self.counters.accepted,
            "delivered": self.counters.delivered,
            "dropped": dict(self.counters.dropped),
            "stored": self.stored,
            "bytes": self.nbytes,
            "capacity": self.capacity,
            "capacity_bytes": self.capacity_bytes,
            "closed": self.closed,
        }
