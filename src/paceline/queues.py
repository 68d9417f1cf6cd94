"""Queues: bounded, shared by all sessions, each item to exactly one consumer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from paceline.batches import Batch, assembled, lent
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.errors import SchemaError
from paceline.core.numbers import whole
from paceline.packing import copied, pack_items, views

D = TypeVar("D")


class Queue(Generic[D]):
    """A first-in, first-out queue, bounded by items and by bytes.

    A full queue makes producers wait, an empty one consumers. Accepted items are not lost when
    their producer dies, and go back to the head of the queue when a consumer dies before it had
    them. Waits that time out have changed nothing.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        capacity: int,
        capacity_bytes: int,
        per_producer: int | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.capacity_bytes = capacity_bytes
        self.per_producer = per_producer
        self._connection = connection

    def __repr__(self) -> str:
        return (
            f"<Queue '{self.name}' of {self.capacity} items, {self.capacity_bytes} bytes, on"
            f" {self._connection.address}>"
        )

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("queue", self.name, self._connection.address)

    def enqueue(self, item: D, *, version: int | None = None, timeout: float | None = 60.0) -> None:
        """Add one item; return when the server has accepted it.

        The item is any tree of arrays and plain values, of any shapes, and is copied. `version` is
        its stamp: the version of the parameters it was made with.

        Raises:
            TimedOut: there was no room within `timeout` seconds.
            Closed: the queue is closed.
            SchemaError: a leaf may not travel, or the item is larger than the queue.
        """
        self.enqueue_many([item], version=version, timeout=timeout)

    def enqueue_many(
        self, items: Sequence[D], *, version: int | None = None, timeout: float | None = 60.0
    ) -> None:
        """Add all of `items` in one step, or none; raises as `enqueue`."""
        limit = checked_timeout(timeout)
        stamp = m.NO_VERSION if version is None else operator.index(version)
        what = f"enqueue '{self.name}'"
        if len(items) > self.capacity:
            raise SchemaError(
                f"{what}: {len(items)} items in one step, but it holds {self.capacity} at most;"
                " enqueue fewer at a time, or give it a larger capacity="
            )
        if self.per_producer is not None and len(items) > self.per_producer:
            raise SchemaError(
                f"{what}: {len(items)} items in one step, but a producer may have"
                f" {self.per_producer} in it: enqueue fewer at a time, or give it"
                f" per_producer={len(items)} or more"
            )
        if not items:
            return
        with self._connection.interrupts:
            packed = pack_items(self._connection.arena, items, what, stamp)
            request = m.Enqueue(self.name, [head for head, _ in packed], limit)
            self._connection.call(request, [block for _, block in packed], limit)

    def dequeue(self, *, copy: bool = True, timeout: float | None = 60.0) -> D:
        """Take the oldest item. Its arrays own their memory.

        With `copy=False` they are read-only views of the memory that its producer wrote. That
        memory, and that of up to 256 KB of small items enqueued together with it, is not used again
        while a view of it is left, whoever closes or dies. The item no longer counts in the queue's
        `capacity_bytes`: who keeps views sees to the memory. torch ignores the flag, so give it
        copies: an in-place operation on read-only memory ends the process.

        Raises:
            TimedOut: none came within `timeout` seconds; nothing was taken.
            Closed: the queue is closed and empty.
        """
        item: D = self._take(1, 1, timeout, _first if copy else _first_lent)
        return item

    def dequeue_many(self, n: int, *, copy: bool = True, timeout: float | None = 60.0) -> Batch[D]:
        """Take `n` items in one step, stacked into a batch, or none; raises as `dequeue`.

        With `copy=False` nothing is stacked: the batch's `data` is a list of `n` trees, of views as
        `dequeue` gives them.

        Raises:
            SchemaError: `n` is more than the queue can hold.
        """
        n = _number(n)
        batch: Batch[D] = self._take(n, n, timeout, assembled if copy else lent)
        return batch

    def dequeue_up_to(self, n: int, *, copy: bool = True, timeout: float | None = 60.0) -> Batch[D]:
        """Take what there is, at least one item and at most `n`; else as `dequeue_many`."""
        batch: Batch[D] = self._take(1, _number(n), timeout, assembled if copy else lent)
        return batch

    @property
    def size(self) -> int:
        """How many items it holds, those in delivery included."""
        return int(self.stats()["stored"])

    def stats(self) -> dict[str, Any]:
        """Its counters: accepted = delivered + dropped (by reason) + stored, always."""
        content: dict[str, Any] = self._connection.call(m.QueueStats(self.name)).content
        return content

    def close(self, *, cancel_pending_enqueues: bool = False) -> None:
        """No new items. What waits to get in still does, unless cancelled; what is in can be taken.

        When nothing is left, `dequeue` raises `Closed`. Closing twice is fine.
        """
        self._connection.call(m.CloseQueue(self.name, cancel_pending_enqueues))

    def _take(self, least: int, most: int, timeout: float | None, made: Any) -> Any:
        limit = checked_timeout(timeout)

        def back(items: m.Items) -> m.Receipt:
            return m.Receipt(self.name, items.delivery, True)

        request = m.Dequeue(self.name, least, most, limit)
        with self._connection.interrupts as interrupts:
            items, buffers = self._connection.exchange(request, timeout=limit, undo=back)
            try:
                result = made(items, buffers)
                interrupts.check()
            except BaseException:
                self._connection.tell(back(items))
                raise
            # The memory is given back together with the receipt.
            del buffers
            self._connection.tell(m.Receipt(self.name, items.delivery))
        return result


def _first(items: m.Items, buffers: Any) -> Any:
    head = items.runs[0]
    return copied(head.layout, [column[0] for column in head.columns], buffers[0])


def _first_lent(items: m.Items, buffers: Any) -> Any:
    return views(items.runs, buffers)[0]


def _number(n: Any) -> int:
    return whole(n, "the number of items")
