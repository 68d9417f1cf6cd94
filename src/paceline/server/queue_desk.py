"""What a server does with queues."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from paceline.core import messages as m
from paceline.core.errors import ProtocolError, SchemaError
from paceline.core.facts import QueueFacts
from paceline.core.queue_items import Run
from paceline.core.queue_orders import Definition
from paceline.core.queue_state import QueueState
from paceline.core.tree import MAX_INT, decoded
from paceline.core.waiting import NOT_YET
from paceline.server.brought import Brought
from paceline.server.frames import buffer
from paceline.server.kept_desk import KeptDesk
from paceline.server.lines import Peer
from paceline.server.service import Handler
from paceline.transports.base import Frame


class QueueDesk(KeptDesk[QueueState]):
    """The queues of a server."""

    kind = "queue"
    made_by = "queue('{}', capacity)"
    facts = QueueFacts

    def handlers(self) -> dict[type, Handler]:
        return {
            m.DefineQueue: self._define,
            m.FindQueue: self._find,
            m.Enqueue: self._enqueue,
            m.Dequeue: self._dequeue,
            m.Receipt: self._receipt,
            m.CloseQueue: self._close,
            m.QueueStats: self._stats,
        }

    def lost(self, peer: Peer) -> None:
        for name, queue in self.states.items():
            queue.lost(peer)
            self._changed(name)

    def again(self, brought: Brought) -> QueueState:
        wanted: Definition = brought.facts.definition
        wanted.check(brought.key)
        return QueueState(brought.key, *wanted)

    def fill(self, state: QueueState, brought: Brought) -> None:
        state.revive(brought.facts, unowned(brought))
        if state.name in self.states:
            self._changed(state.name)

    def _changed(self, name: str) -> None:
        """Ask those who wait: first for room, then for items."""
        parking = self._service.parking
        parking.changed(("room", name), in_order=True)
        self.states[name].pending_enqueues = parking.waiting(("room", name))
        parking.changed(("items", name))

    def _define(self, peer: Peer, request: m.DefineQueue, frame: Frame) -> None:
        wanted = Definition(
            request.capacity,
            request.capacity_bytes,
            request.per_producer,
            request.order,
            request.min_after_dequeue,
            request.seed,
        )

        def make() -> QueueState:
            wanted.check(request.name)
            return QueueState(request.name, *wanted)

        self.keep(peer, request.name, wanted, make)
        self._service.answer(peer, frame.request, m.Done())

    def _find(self, peer: Peer, request: m.FindQueue, frame: Frame) -> None:
        self.find(peer, frame, request.name, request.timeout)

    def _enqueue(self, peer: Peer, request: m.Enqueue, frame: Frame) -> None:
        name = request.name
        queue = self.state(name)
        runs = received(peer, request.runs, frame)
        ranked(queue, runs, request.priorities)
        ticket = queue.ticket()
        # What cannot get in hears so now, also behind those who wait.
        many, _ = queue.check(runs, ticket)

        def attempt() -> Any:
            done = queue.enqueue(runs, ticket)
            if done is not True:
                return done
            self._service.parking.changed(("items", name))
            return m.Done()

        def what() -> str:
            return (
                f"enqueue of {many} items to '{name}': {queue.why_not(runs)}; whoever dequeues"
                f" ends the wait; {self._service.who()}"
            )

        key = ("room", name)
        self._service.ask(
            peer, frame, key, attempt, request.timeout, what,
            behind=True, in_vain=lambda: self._changed(name),
        )  # fmt: skip
        queue.pending_enqueues = self._service.parking.waiting(key)

    def _dequeue(self, peer: Peer, request: m.Dequeue, frame: Frame) -> None:
        name = request.name
        queue = self.state(name)

        def attempt() -> Any:
            runs = queue.dequeue(request.least, request.most)
            if runs is NOT_YET:
                return NOT_YET
            return handed_out(queue, runs, [], peer)

        def what() -> str:
            return (
                f"dequeue of {request.least} items from '{name}': it holds {queue.size}"
                f"{_kept(queue)}; whoever enqueues ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, ("items", name), attempt, request.timeout, what)

    def _receipt(self, peer: Peer, request: m.Receipt, frame: Frame) -> None:
        self.state(request.name).receipt(request.delivery, peer, returned=request.returned)
        self._changed(request.name)

    def _close(self, peer: Peer, request: m.CloseQueue, frame: Frame) -> None:
        self.state(request.name).close(cancel=request.cancel)
        self._changed(request.name)
        self._service.answer(peer, frame.request, m.Done())

    def _stats(self, peer: Peer, request: m.QueueStats, frame: Frame) -> None:
        self._service.answer(peer, frame.request, m.Text(self.state(request.name).stats()))


def unowned(brought: Brought) -> list[Run]:
    """Items that were noted, as those of nobody who is here."""
    for run, (producer, priority) in zip(brought.runs, brought.about, strict=True):
        run.producer, run.priority, run.owner = str(producer), int(priority), None
    return brought.runs


def ranked(queue: QueueState, runs: list[Run], priorities: Sequence[int]) -> None:
    """Give runs the priorities that came with them."""
    if len(priorities) != (len(runs) if queue.definition.order == "priority" else 0):
        raise SchemaError(
            f"enqueue '{queue.name}': {len(priorities)} priorities came for {len(runs)} runs of a"
            f" queue with order={queue.definition.order!r}"
        )
    for run, priority in zip(runs, priorities, strict=False):
        run.priority = priority


def _kept(queue: QueueState) -> str:
    """What of it may not be taken now, as part of a message."""
    if queue.min_after_dequeue == 0 or queue.closed:
        return ""
    return f", of which min_after_dequeue={queue.min_after_dequeue} stay until it is closed"


def received(peer: Peer, heads: list[m.RunHead], frame: Frame) -> list[Run]:
    """The items of a request, checked.

    Raises:
        ProtocolError: a run's memory or its plain values are not what its layout says.
    """
    runs = []
    for place, head in enumerate(heads):
        row, kinds, texts = _plain(head.layout)
        memory = buffer(frame, place)
        found = 0 if memory is None else memory.nbytes
        if found != head.count * row:
            raise ProtocolError(f"{head.count} items of {row} bytes came with {found} in one run")
        if kinds or head.columns or head.metrics:
            _check(head, kinds)
        runs.append(Run(head, memory, len(head.layout) + row, peer.name, peer, texts))
    return runs


@functools.lru_cache(maxsize=256)
def _plain(layout: bytes) -> tuple[int, tuple[type, ...], tuple[int, ...]]:
    """Bytes of a row, the types of the columns, and which of these are texts or bytes."""
    plan = decoded(layout)
    texts = tuple(n for n, kind in enumerate(plan.plain) if kind in (str, bytes))
    return plan.nbytes, plan.plain, texts


def _check(head: m.RunHead, kinds: tuple[type, ...]) -> None:
    """Check a run's columns and what was logged."""
    if len(head.columns) != len(kinds):
        raise ProtocolError(f"{len(head.columns)} columns came for {len(kinds)} plain leaves")
    if head.metrics and len(head.metrics) != head.count:
        raise ProtocolError(f"{len(head.metrics)} logs came for {head.count} items")
    for kind, column in zip(kinds, head.columns, strict=True):
        other = len(column) != head.count or set(map(type, column)) != {kind}
        if other or (kind is int and max(column) > MAX_INT):
            raise ProtocolError(
                f"a column of {kind.__name__} for {head.count} items has other values"
            )


def handed_out(queue: QueueState, runs: list[Run], lags: list[int], peer: Peer) -> Any:
    """The reply that hands items over, and their memory."""
    delivery = queue.hand_out(runs, peer)
    content = [run.content() for run in runs]
    names = [run.producer for run in runs]
    reply = m.Items(delivery, [head for head, _ in content], lags, names)
    return reply, [memory for _, memory in content]
