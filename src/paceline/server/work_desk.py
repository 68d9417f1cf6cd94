"""What a server does with counters and barriers."""

from __future__ import annotations

from typing import Any

from paceline.core import messages as m
from paceline.core.barrier_state import BarrierState
from paceline.core.counter_state import CounterState
from paceline.core.facts import BarrierFacts, CounterFacts
from paceline.core.waiting import NOT_YET
from paceline.server.brought import Brought
from paceline.server.kept_desk import KeptDesk
from paceline.server.lines import Peer
from paceline.server.service import Handler, Service
from paceline.transports.base import Frame


class CounterDesk(KeptDesk[CounterState]):
    """The counters of a server."""

    kind = "counter"
    made_by = "counter('{}', start)"
    facts = CounterFacts

    def handlers(self) -> dict[type, Handler]:
        return {
            m.DefineCounter: self._define,
            m.AddToCounter: self._add,
            m.AwaitCounter: self._await,
        }

    def lost(self, peer: Peer) -> None:
        """What was added stays."""

    def again(self, brought: Brought) -> CounterState:
        return CounterState(brought.key, brought.facts.start)

    def fill(self, state: CounterState, brought: Brought) -> None:
        state.revive(brought.facts)
        self._service.parking.changed(("count", state.name))

    def _define(self, peer: Peer, request: m.DefineCounter, frame: Frame) -> None:
        if request.start is None:
            self.find(peer, frame, request.name, request.timeout)
        else:
            self.define(peer, frame, CounterState(request.name, request.start))

    def _add(self, peer: Peer, request: m.AddToCounter, frame: Frame) -> None:
        value = self.state(request.name).add(request.n)
        self._service.answer(peer, frame.request, m.Text(value))
        self._service.parking.changed(("count", request.name))

    def _await(self, peer: Peer, request: m.AwaitCounter, frame: Frame) -> None:
        counter = self.state(request.name)

        def attempt() -> Any:
            value = counter.reached(request.at_least)
            return NOT_YET if value is NOT_YET else m.Text(value)

        def what() -> str:
            return (
                f"wait for counter '{counter.name}' to be at {request.at_least}: it is at"
                f" {counter.value}; whoever adds ends the wait; {self._service.who()}"
            )

        key = ("count", request.name)
        self._service.ask(peer, frame, key, attempt, request.timeout, what)


class BarrierDesk(KeptDesk[BarrierState]):
    """The barriers of a server."""

    kind = "barrier"
    made_by = "barrier('{}', n)"
    facts = BarrierFacts

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._waiting: dict[Peer, dict[object, BarrierState]] = {}

    def handlers(self) -> dict[type, Handler]:
        return {
            m.DefineBarrier: self._define,
            m.Arrive: self._arrive,
            m.AbortBarrier: self._abort,
        }

    def lost(self, peer: Peer) -> None:
        for arrival, barrier in self._waiting.pop(peer, {}).items():
            barrier.died(arrival)

    def again(self, brought: Brought) -> BarrierState:
        return BarrierState(brought.key, brought.facts.n)

    def fill(self, state: BarrierState, brought: Brought) -> None:
        """There is nothing in it."""

    def _define(self, peer: Peer, request: m.DefineBarrier, frame: Frame) -> None:
        if request.n is None:
            self.find(peer, frame, request.name, request.timeout)
        else:
            self.define(peer, frame, BarrierState(request.name, request.n))

    def _arrive(self, peer: Peer, request: m.Arrive, frame: Frame) -> None:
        barrier = self.state(request.name)
        key, arrival = ("arrivals", request.name), object()

        def attempt() -> Any:
            place = barrier.place(arrival)
            return NOT_YET if place is NOT_YET else m.Text(place)

        def answer(reply: Any) -> None:
            self._forget(peer, arrival)
            self._service.answer(peer, frame.request, reply)

        def in_vain() -> None:
            barrier.leave(arrival)
            self._forget(peer, arrival)

        def what() -> str:
            return (
                f"wait at barrier '{barrier.name}': {barrier.missing()}; whoever else arrives ends"
                f" the wait; {self._service.who()}"
            )

        self._waiting.setdefault(peer, {})[arrival] = barrier
        complete = barrier.arrive(arrival, peer.name)
        self._service.ask(
            peer, frame, key, attempt, request.timeout, what, in_vain=in_vain, then=answer
        )
        if complete:
            self._service.parking.changed(key)

    def _forget(self, peer: Peer, arrival: object) -> None:
        mine = self._waiting.get(peer, {})
        mine.pop(arrival, None)
        if not mine:
            self._waiting.pop(peer, None)

    def _abort(self, peer: Peer, request: m.AbortBarrier, frame: Frame) -> None:
        self.state(request.name).abort(peer.name)
        self._service.answer(peer, frame.request, m.Done())
        self._service.parking.changed(("arrivals", request.name))
