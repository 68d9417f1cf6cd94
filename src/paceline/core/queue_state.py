"""A bounded queue: accepted = delivered + dropped + stored, at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import Closed, SchemaError
from paceline.core.facts import Noted, Piece, QueueFacts
from paceline.core.queue_items import Run, items_in
from paceline.core.queue_orders import Definition, Order, ordered
from paceline.core.waiting import HELD_BACK, NOT_YET, HeldBack, NotYet


@dataclass(slots=True)
class Counters:
    """What became of everything that a queue accepted."""

    accepted: int = 0
    delivered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def piece(run: Run) -> Piece:
    """A run as note is taken of it."""
    head, memory = run.content()
    return Piece(head, (run.producer, run.priority), memory)


class QueueState:
    """Items in an order, first in, first out unless told; bounded by items and by bytes.

    With `per_producer`, each owner may have so many items accepted and not yet delivered. Items
    handed out count as stored until their receipt. While a queue is open, `min_after_dequeue` of
    the items that a consumer could take stay behind each dequeue.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        capacity_bytes: int,
        per_producer: int | None = None,
        order: str = "fifo",
        min_after_dequeue: int = 0,
        seed: int | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.capacity_bytes = capacity_bytes
        self.per_producer = per_producer
        self.min_after_dequeue = min_after_dequeue
        self.definition = Definition(
            capacity, capacity_bytes, per_producer, order, min_after_dequeue, seed
        )
        """What it was defined with."""
        self.counters = Counters()
        self.nbytes = 0
        self.size = 0
        """Items that no consumer holds."""
        # Enqueues that wait for room, as whoever parks them says: a closed queue still takes them.
        self.pending_enqueues = 0
        self._waiting: Order = ordered(self.definition)
        self._held: dict[int, tuple[object, list[Run]]] = {}
        self._held_items = 0
        # Items accepted and not yet delivered, of each living owner.
        self._owed: Counter[object] = Counter()
        self._deliveries = 0
        self._tickets = 0
        self._closed_at: int | None = None
        self._cancelled = False

    @property
    def closed(self) -> bool:
        """Whether new enqueues are refused."""
        return self._closed_at is not None

    @property
    def stored(self) -> int:
        """Items accepted and neither delivered nor dropped."""
        return self.size + self._held_items

    @property
    def taken(self) -> int:
        """Items that consumers hold or have had."""
        return self.counters.delivered + self._held_items

    def ticket(self) -> int:
        """A place in the order of arrival: what came before `close` may still get in."""
        self._tickets += 1
        return self._tickets

    def check(self, runs: list[Run], ticket: int) -> tuple[int, int]:
        """Refuse what can never get in; the items and the bytes of what can.

        Raises:
            Closed: it was closed before this ticket was drawn, or pending enqueues were cancelled.
            SchemaError: there will never be room for all of them.
        """
        if self._closed_at is not None and (self._cancelled or ticket > self._closed_at):
            raise Closed(f"enqueue '{self.name}': it is closed")
        count, size = items_in(runs), sum(run.nbytes for run in runs)
        if count > self.capacity or size > self.capacity_bytes:
            raise SchemaError(
                f"enqueue '{self.name}': {count} items of {size} bytes in one step; it holds"
                f" {self.capacity} items and {self.capacity_bytes} bytes at most: enqueue fewer at"
                " a time, or give it a larger capacity= or capacity_bytes="
            )
        if self.per_producer is not None and count > self.per_producer:
            raise SchemaError(
                f"enqueue '{self.name}': {count} items in one step, but a producer may have"
                f" {self.per_producer} in it: enqueue fewer at a time, or give it"
                f" per_producer={count} or more"
            )
        return count, size

    def enqueue(self, runs: list[Run], ticket: int) -> bool | NotYet | HeldBack:
        """Accept all items of `runs`, of one owner, once there is room for all; raises as `check`.

        `HELD_BACK` where it is the owner that has as many in it as it may.
        """
        count, size = self.check(runs, ticket)
        room = self.room(runs, count, size)
        if room is True:
            self.accept(runs)
        return room

    def room(self, runs: list[Run], count: int, size: int) -> bool | NotYet | HeldBack:
        """Whether so many items of the owner of `runs`, of `size` bytes, have room now."""
        if self._held_back(runs, count):
            return HELD_BACK
        if self.stored + count > self.capacity or self.nbytes + size > self.capacity_bytes:
            return NOT_YET
        return True

    def can_take(self, n: int, more: int) -> bool:
        """Whether `n` items can be taken after `more` have been put in; raises as `dequeue`."""
        behind = 0 if self.closed else self.min_after_dequeue
        if self.size + more - behind >= n:
            return True
        self._check_hope(n)
        return False

    def why_not(self, runs: list[Run]) -> str:
        """Why these wait, as part of a message."""
        if self._held_back(runs, items_in(runs)):
            owed = self._owed[runs[0].owner]
            return f"this producer has {owed} of its per_producer={self.per_producer} items in it"
        return (
            f"it is full with {self.stored} of {self.capacity} items, {self.nbytes} of"
            f" {self.capacity_bytes} bytes"
        )

    def accept(self, runs: Iterable[Run]) -> None:
        """Append items, for which room was granted before."""
        for run in runs:
            run.number = self.counters.accepted
            self.counters.accepted += run.count
            self.nbytes += run.nbytes
            self.size += run.count
            if self.per_producer is not None:
                self._owed[run.owner] += run.count
            self._waiting.add(run)

    @property
    def ready(self) -> int:
        """Items that one dequeue could take now."""
        if self.min_after_dequeue and self._closed_at is None:
            return max(0, self.size - self.min_after_dequeue)
        return self.size

    def dequeue(self, least: int, most: int) -> list[Run] | NotYet:
        """The next `least` to `most` items in its order, in one step once `least` are ready.

        What is taken is to be named by `hand_out` in the same step.

        Raises:
            Closed: it is closed and will never hold `least` items again.
            SchemaError: `least` is more than can ever be taken in one step.
        """
        ready = self.ready
        if ready < least:
            self._check_hope(least)
            return NOT_YET
        taken = min(most, ready)
        self.size -= taken
        return self._waiting.take(taken)

    def _check_hope(self, least: int) -> None:
        """Raise if `least` items can never be taken."""
        behind = 0 if self.closed else self.min_after_dequeue
        if least + behind > self.capacity:
            stay = f", of which min_after_dequeue={behind} stay behind" if behind else ""
            raise SchemaError(
                f"dequeue '{self.name}': {least} items in one step, but it holds at most"
                f" {self.capacity}{stay}: take fewer, or give it capacity={least + behind} or more"
            )
        if self.closed and not self._held and not self.pending_enqueues:
            raise Closed(
                f"dequeue '{self.name}': it is closed and holds {self.size} items,"
                f" {least} were asked for"
            )

    def hand_out(self, runs: list[Run], consumer: object) -> int:
        """Note who holds `runs`; the delivery that its receipt will name."""
        self._deliveries += 1
        self._held[self._deliveries] = (consumer, runs)
        self._held_items += items_in(runs)
        return self._deliveries

    def receipt(self, delivery: int, consumer: object, *, returned: bool = False) -> None:
        """The consumer has its items for good, or gives them back to their place in its order."""
        holder, runs = self._held.get(delivery, (None, []))
        if holder is not consumer:
            return
        del self._held[delivery]
        count = items_in(runs)
        self._held_items -= count
        if returned:
            self._waiting.put_back(runs)
            self.size += count
            return
        self.counters.delivered += count
        self._gone(runs)

    def lost(self, peer: object) -> None:
        """A session is gone: what it had not receipted goes back, and nothing bounds it any more.

        What it enqueued stays.
        """
        self._owed.pop(peer, None)
        mine = [number for number, (holder, _) in self._held.items() if holder is peer]
        for delivery in mine:
            self.receipt(delivery, peer, returned=True)

    def drop(self, runs: Iterable[Run], reason: str) -> None:
        """Count items that were taken out as dropped."""
        for run in runs:
            self.counters.dropped[reason] += run.count
            self._gone([run])

    def sift(self, keep: Callable[[Run], bool]) -> list[Run]:
        """Take out and return the waiting runs for which `keep(run)` is false."""
        out = self._waiting.sift(keep)
        self.size -= items_in(out)
        return out

    def close(self, *, cancel: bool = False) -> None:
        """Refuse new enqueues; with `cancel` also those that wait."""
        if self._closed_at is None:
            self._closed_at = self._tickets
        self._cancelled = self._cancelled or cancel

    @property
    def pristine(self) -> bool:
        """Whether nothing has been put in yet, and it is open."""
        return not self.counters.accepted and not self.closed

    def noted(self) -> Noted:
        """All that it is: what consumers hold without a receipt counts as come back."""
        held = [run for _, runs in self._held.values() for run in runs]
        waiting = self._waiting.noted(held)
        facts = QueueFacts(
            self.definition,
            self.counters.delivered,
            dict(self.counters.dropped),
            self.closed,
            self._waiting.draws(),
        )

        return Noted(facts, lambda: [piece(run) for run in waiting()], self.nbytes)

    def revive(self, facts: QueueFacts, runs: list[Run]) -> None:
        """Be what was noted of one with this definition; its items belong to no session now.

        Raises:
            ValueError: no queue can have been so.
        """
        if items_in(runs) > self.capacity or sum(run.nbytes for run in runs) > self.capacity_bytes:
            raise ValueError("it held more than it may")
        if facts.draws is not None:
            self._waiting.go_on(facts.draws)
        self.go_on(facts.delivered, facts.dropped, runs)
        self._owed.clear()
        if facts.closed:
            self.close()

    def go_on(self, delivered: int, dropped: Mapping[str, int], runs: Iterable[Run]) -> None:
        """Have what became of earlier items in its counters, and these to hand out."""
        ended = Counter(dropped)
        self.counters = Counters(delivered + ended.total(), delivered, ended)
        self.accept(runs)

    def _held_back(self, runs: list[Run], count: int) -> bool:
        if self.per_producer is None or not runs:
            return False
        return self._owed[runs[0].owner] + count > self.per_producer

    def _gone(self, runs: list[Run]) -> None:
        """Nobody will ask for these any more."""
        for run in runs:
            self.nbytes -= run.nbytes
            if run.owner in self._owed:
                self._owed[run.owner] -= run.count

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
            "per_producer": self.per_producer,
            "order": self.definition.order,
            "closed": self.closed,
        }
