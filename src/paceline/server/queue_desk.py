"""What a server does with queues."""

from __future__ import annotations

from typing import Any

from paceline.core import messages as m
from paceline.core.errors import SchemaError, UnknownName
from paceline.core.queue_state import Item, QueueState
from paceline.core.waiting import NOT_YET
from paceline.server.service import Desk, Handler, Peer, Service, buffer, checked_name, stored
from paceline.transports.base import Frame


class QueueDesk(Desk):
    """The queues of a server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.states: dict[str, QueueState] = {}

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

    def listing(self) -> tuple[str, dict[str, Any]]:
        return "queues", {name: queue.stats() for name, queue in self.states.items()}

    def lost(self, peer: Peer) -> None:
        for name, queue in self.states.items():
            queue.lost(peer)
            self._changed(name)

    def _queue(self, name: str) -> QueueState:
        found = self.states.get(name)
        if found is None:
            raise UnknownName(f"no queue '{name}'; there are {sorted(self.states)}")
        return found

    def _changed(self, name: str) -> None:
        """Ask those who wait: first for room, then for items."""
        parking = self._service.parking
        parking.changed(("room", name), in_order=True)
        self.states[name].pending_enqueues = parking.waiting(("room", name))
        parking.changed(("items", name))

    def _define(self, peer: Peer, request: m.DefineQueue, frame: Frame) -> None:
        found = self.states.get(request.name)
        wanted = (request.capacity, request.capacity_bytes)
        if found is None:
            if request.capacity < 1 or request.capacity_bytes < 1:
                raise SchemaError(f"queue '{request.name}': capacities are 1 or more, not {wanted}")
            self.states[checked_name(request.name)] = QueueState(request.name, *wanted)
            self._service.parking.changed(("queue", request.name))
        elif (found.capacity, found.capacity_bytes) != wanted:
            raise SchemaError(
                f"queue '{request.name}' exists with capacity={found.capacity} and"
                f" capacity_bytes={found.capacity_bytes}; asked for: {wanted[0]} and {wanted[1]}"
            )
        self._service.answer(peer, frame.request, m.Done())

    def _find(self, peer: Peer, request: m.FindQueue, frame: Frame) -> None:
        def attempt() -> Any:
            queue = self.states.get(request.name)
            return NOT_YET if queue is None else m.Text([queue.capacity, queue.capacity_bytes])

        def what() -> str:
            return (
                f"no queue '{request.name}'; there are {sorted(self.states)}; whoever calls"
                f" queue('{request.name}', capacity) ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, ("queue", request.name), attempt, request.timeout, what)

    def _enqueue(self, peer: Peer, request: m.Enqueue, frame: Frame) -> None:
        name = request.name
        queue = self._queue(name)
        items = received(peer, request.items, frame)
        ticket = queue.ticket()
        # What cannot get in hears so now, also behind those who wait.
        queue.check(items, ticket)
        many = len(items)

        def attempt() -> Any:
            done = queue.enqueue(items, ticket)
            if done is NOT_YET:
                return NOT_YET
            self._service.parking.changed(("items", name))
            return m.Done()

        def what() -> str:
            return (
                f"enqueue of {many} items to '{name}': it is full with {queue.stored} of"
                f" {queue.capacity} items, {queue.nbytes} of {queue.capacity_bytes} bytes; whoever"
                f" dequeues ends the wait; {self._service.who()}"
            )

        key = ("room", name)
        self._service.ask(
            peer, frame, key, attempt, request.timeout, what,
            behind=True, in_vain=lambda: self._changed(name),
        )  # fmt: skip
        queue.pending_enqueues = self._service.parking.waiting(key)

    def _dequeue(self, peer: Peer, request: m.Dequeue, frame: Frame) -> None:
        name = request.name
        queue = self._queue(name)

        def attempt() -> Any:
            items = queue.dequeue(request.least, request.most)
            if items is NOT_YET:
                return NOT_YET
            return handed_out(queue, items, [], peer)

        def what() -> str:
            return (
                f"dequeue of {request.least} items from '{name}': it holds {queue.size}; whoever"
                f" enqueues ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, ("items", name), attempt, request.timeout, what)

    def _receipt(self, peer: Peer, request: m.Receipt, frame: Frame) -> None:
        self._queue(request.name).receipt(request.delivery, peer, returned=request.returned)
        self._changed(request.name)

    def _close(self, peer: Peer, request: m.CloseQueue, frame: Frame) -> None:
        self._queue(request.name).close(cancel=request.cancel)
        self._changed(request.name)
        self._service.answer(peer, frame.request, m.Done())

    def _stats(self, peer: Peer, request: m.QueueStats, frame: Frame) -> None:
        self._service.answer(peer, frame.request, m.Text(self._queue(request.name).stats()))


def received(peer: Peer, heads: list[m.Head], frame: Frame) -> list[Item]:
    """The items of a request, checked.

    Raises:
        ProtocolError: an item's memory is not as long as its layout says.
    """
    items = []
    for place, head in enumerate(heads):
        memory = stored(head, buffer(frame, place)).memory
        size = len(head.layout) + (0 if memory is None else memory.nbytes)
        size += sum(len(value) for value in head.values if isinstance(value, (str, bytes)))
        items.append(Item(head, memory, size, peer.name))
    return items


def handed_out(queue: QueueState, items: list[Item], lags: list[int], peer: Peer) -> Any:
    """The reply that hands items over, and their memory."""
    delivery = queue.hand_out(items, peer)
    names = [item.producer for item in items]
    reply = m.Items(delivery, [item.head for item in items], lags, names)
    return reply, [item.memory for item in items]
