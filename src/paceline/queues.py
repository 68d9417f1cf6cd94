"""Queues: bounded, shared by all sessions, each item to exactly one consumer."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Generic, SupportsIndex, TypeVar

import numpy as np

from paceline.batches import Batch, assembled, lent, padded
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.errors import SchemaError
from paceline.core.numbers import whole
from paceline.core.queue_orders import Definition
from paceline.handles import Handle, lasting
from paceline.packing import copied, pack_items, views
from paceline.pending import limited
from paceline.requests import Request
from paceline.transports.base import Buffers

D = TypeVar("D")


class Queue(Handle, Generic[D]):
    """A queue, first in, first out unless made with another order; bounded by items and by bytes.

    A full queue makes producers wait, an empty one consumers. Accepted items are not lost when
    their producer dies, and go back to their place in the queue when a consumer dies before it had
    them: to the head, by their priority, or among those that are drawn from. Waits that time out
    have changed nothing.
    """

    kind = "queue"

    def __init__(self, connection: Connection, key: str, definition: Definition) -> None:
        super().__init__(connection, key)
        self._definition = definition
        self.capacity = definition.capacity
        self.capacity_bytes = definition.capacity_bytes
        self.per_producer = definition.per_producer
        self.order = definition.order
        self.min_after_dequeue = definition.min_after_dequeue

    def __repr__(self) -> str:
        order = "" if self.order == "fifo" else f", {self.order}"
        return (
            f"<Queue {self.called} of {self.capacity} items, {self.capacity_bytes} bytes{order}, on"
            f" {self._connection.address}>"
        )

    def enqueue(
        self,
        item: D,
        *,
        priority: SupportsIndex | None = None,
        version: int | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        """Add one item; return when the server has accepted it.

        The item is any tree of arrays and plain values, of any shapes, and is copied. `version` is
        its stamp: the version of the parameters it was made with. A queue with `order="priority"`
        needs a `priority`, an int64: the lowest comes out first, and of equal ones the oldest.

        Raises:
            TimedOut: there was no room within `timeout` seconds.
            Closed: the queue is closed.
            SchemaError: a leaf may not travel, the item is larger than the queue, or a priority is
                missing, too many, or no int64.
        """
        self.enqueue_many([item], priority=priority, version=version, timeout=timeout)

    @lasting
    @limited
    def enqueue_many(
        self,
        items: Sequence[D],
        *,
        priority: SupportsIndex | Sequence[SupportsIndex] | None = None,
        version: int | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        """Add all of `items` in one step, or none; raises as `enqueue`.

        `items` is a list, or another sequence, of whole items: one tree that has them stacked is
        refused. `priority` is that of all of them, or there is one for each.
        """
        limit = checked_timeout(timeout)
        stamp = m.NO_VERSION if version is None else operator.index(version)
        what = f"enqueue {self.called}"
        _checked_items(items, what)
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
        ranks = self._ranks(priority, len(items))
        if not items:
            return
        line = self._connection
        with line.interrupts:
            request, blocks = self._packed(line, items, ranks, stamp, limit)
            line.call(request, blocks, limit)

    def enqueueing(
        self, item: D, *, priority: SupportsIndex | None = None, version: int | None = None
    ) -> Request[None]:
        """As `enqueue`, for `session.run` together with others."""
        stamp = m.NO_VERSION if version is None else operator.index(version)
        line = self._connection
        message, blocks = self._packed(line, [item], self._ranks(priority, 1), stamp, 0.0)
        return Request(line, message, blocks, lambda reply, _: None)

    def dequeueing(self) -> Request[D]:
        """As `dequeue`, for `session.run` together with others; what it gives is a copy."""

        def settle(items: m.Items, had: bool) -> m.Receipt:
            return m.Receipt(self.key, items.delivery, not had)

        return Request(self._connection, m.Dequeue(self.key, 1, 1, 0.0), (), _first, settle)

    def _packed(
        self,
        line: Connection,
        items: Sequence[D],
        ranks: list[int],
        stamp: int,
        limit: float | None,
    ) -> tuple[m.Enqueue, Buffers]:
        packed, priorities = [], []
        for rank, alike in _by_rank(items, ranks):
            runs = pack_items(line.arena, alike, f"enqueue {self.called}", stamp)
            packed += runs
            priorities += [rank] * len(runs) if ranks else []
        heads = [head for head, _ in packed]
        request = m.Enqueue(self.key, heads, limit, tuple(priorities))
        return request, [block for _, block in packed]

    def dequeue(self, *, copy: bool = True, timeout: float | None = 60.0) -> D:
        """Take one item: the oldest, or the next in the queue's order. Its arrays own their memory.

        With `copy=False` they are read-only views of the memory that its producer wrote. That
        memory, and that of up to 256 KB of small items enqueued together with it, is not used again
        while a view of it is left, whoever closes or dies. The item no longer counts in the queue's
        `capacity_bytes`: who keeps views sees to the memory. torch ignores the flag, so give it
        copies: an in-place operation on read-only memory ends the process.

        Raises:
            TimedOut: none came within `timeout` seconds; nothing was taken.
            Closed: the queue is closed and empty.
            SchemaError: a shuffled queue whose `min_after_dequeue` lets so many never go.
        """
        item: D = self._take(1, 1, timeout, _first if copy else _first_lent)
        return item

    def dequeue_many(
        self,
        n: int,
        *,
        pad: float | None = None,
        copy: bool = True,
        timeout: float | None = 60.0,
    ) -> Batch[D]:
        """Take `n` items in one step, stacked into a batch, or none; raises as `dequeue`.

        Items whose arrays differ in size are not stacked: the batch's `data` is a list of `n`
        trees. With `pad`, each array is padded with that value, at the end of every axis, to the
        largest of the batch, so they are stacked all the same; `batch.shapes` has the true sizes.
        With `copy=False` nothing is stacked: `data` is a list of views as `dequeue` gives them.

        Raises:
            SchemaError: `n` is more than the queue can hold. With `pad`: the items differ in more
                than sizes, or `pad` is no value of a leaf's dtype; the message names the leaf, and
                the items are in the queue again.
        """
        n = _number(n)
        batch: Batch[D] = self._take(n, n, timeout, self._maker(copy, pad))
        return batch

    def dequeue_up_to(
        self,
        n: int,
        *,
        pad: float | None = None,
        copy: bool = True,
        timeout: float | None = 60.0,
    ) -> Batch[D]:
        """Take what there is, at least one item and at most `n`; else as `dequeue_many`."""
        batch: Batch[D] = self._take(1, _number(n), timeout, self._maker(copy, pad))
        return batch

    @property
    def size(self) -> int:
        """How many items it holds, those in delivery included."""
        return int(self.stats()["stored"])

    @lasting
    def stats(self) -> dict[str, Any]:
        """Its counters: accepted = delivered + dropped (by reason) + stored, always."""
        content: dict[str, Any] = self._connection.call(m.QueueStats(self.key)).content
        return content

    @lasting
    def close(self, *, cancel_pending_enqueues: bool = False) -> None:
        """No new items. What waits to get in still does, unless cancelled; what is in can be taken.

        When nothing is left, `dequeue` raises `Closed`. Closing twice is fine.
        """
        self._connection.call(m.CloseQueue(self.key, bool(cancel_pending_enqueues)))

    def _made_at(self, line: Connection, timeout: float | None) -> None:
        line.call(m.DefineQueue(self.key, *self._definition))

    def _maker(self, copy: bool, pad: Any) -> Any:
        """What makes the batch of a delivery."""
        if pad is None:
            return assembled if copy else lent
        what = f"dequeue {self.called}: pad={pad!r}"
        if not copy:
            raise SchemaError(f"{what} with copy=False: what is not copied cannot be padded")
        # bool, int, float, and NumPy's.
        if not isinstance(pad, numbers.Real | np.bool_):
            raise SchemaError(f"{what}: it is a number")
        return functools.partial(padded, pad=pad, what=what)

    def _ranks(self, priority: Any, count: int) -> list[int]:
        """The priority of each item; empty where the queue has none."""
        what = f"enqueue {self.called}"
        if self.order != "priority":
            if priority is None:
                return []
            raise SchemaError(
                f"{what}: priority={priority!r} is for order='priority', this queue is"
                f" {self.order!r}"
            )
        if priority is None:
            raise SchemaError(f"{what}: its order is 'priority', so an item needs priority=")
        try:
            ranks = [operator.index(priority)] * count
        except TypeError:
            ranks = [_rank(one, what) for one in priority] if np.iterable(priority) else []
        if len(ranks) != count or not all(-(1 << 63) <= rank < 1 << 63 for rank in ranks):
            raise SchemaError(
                f"{what}: priority is an int64, or one for each of the {count} items, not"
                f" {priority!r}"
            )
        return ranks

    @lasting
    @limited
    def _take(self, least: int, most: int, timeout: float | None, made: Any) -> Any:
        limit = checked_timeout(timeout)

        def back(items: m.Items) -> m.Receipt:
            return m.Receipt(self.key, items.delivery, True)

        request = m.Dequeue(self.key, least, most, limit)
        line = self._connection
        with line.interrupts as interrupts:
            items, buffers = line.exchange(request, timeout=limit, undo=back)
            try:
                result = made(items, buffers)
                interrupts.check()
            except BaseException:
                line.tell(back(items))
                raise
            # The memory is given back together with the receipt.
            del buffers
            line.tell(m.Receipt(self.key, items.delivery))
        return result


def _by_rank(items: Sequence[Any], ranks: list[int]) -> Iterator[tuple[int, Sequence[Any]]]:
    """The items, in parts of those that follow each other with one priority."""
    if not ranks:
        yield 0, items
        return
    for rank, pairs in groupby(zip(ranks, items, strict=True), itemgetter(0)):
        yield rank, [item for _, item in pairs]


def _rank(number: Any, what: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise SchemaError(f"{what}: a priority is an int64, not {number!r}") from None


def _first(items: m.Items, buffers: Any) -> Any:
    head = items.runs[0]
    return copied(head.layout, [column[0] for column in head.columns], buffers[0])


def _first_lent(items: m.Items, buffers: Any) -> Any:
    return views(items.runs, buffers)[0]


def _number(n: Any) -> int:
    return whole(n, "the number of items")


def _checked_items(items: Any, what: str) -> None:
    """Refuse what is one item, or all of them stacked.

    Raises:
        SchemaError: it is no sequence of items.
    """
    one = isinstance(items, str | bytes | bytearray) or hasattr(items, "_fields")
    if one or not isinstance(items, Sequence):
        raise SchemaError(
            f"{what}: enqueue_many takes a list of items, found {type(items).__name__}; list(...)"
            " makes one of what can be iterated, a tree of stacked arrays is to be taken apart:"
            " [{'x': x[i]} for i in range(n)]"
        )
