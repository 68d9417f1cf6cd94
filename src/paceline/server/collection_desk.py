"""What a server does with collections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from paceline.core import messages as m
from paceline.core.collection_state import CollectionState, thinned
from paceline.core.errors import Closed, SchemaError, UnknownName
from paceline.core.facts import CollectionFacts, Noted, Piece
from paceline.core.lockstep_state import LockstepState
from paceline.core.names import beside, checked, quoted
from paceline.core.queue_items import Run, items_in
from paceline.core.queue_state import QueueState, piece
from paceline.core.schedule import Schedule
from paceline.core.waiting import NOT_YET
from paceline.server.brought import Brought, Maker
from paceline.server.lines import Peer, holder_name
from paceline.server.queue_desk import handed_out, received, unowned
from paceline.server.service import Desk, Handler, Service
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame

KIND = "collection"

REMEMBERED = 16
"""Ended collections whose counters can still be asked for."""

_CAUSE = KIND
"""Why workers may not wait, where it is this desk that says so."""


class CollectionDesk(Desk):
    """The collections of a server. Each lives where the variable is that stamps its items."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._variables: VariableDesk = service.desk(VariableDesk)
        self.states: dict[str, Schedule] = {}
        # What each worker makes items for: one collection at a time.
        self._makes: dict[Peer, str] = {}
        # How those were opened that go on; by hand, who has not returned from them yet.
        self._opened: dict[str, m.OpenCollection] = {}
        self._to_return: dict[str, set[str]] = {}
        # What these make is for one that has ended, whatever has its name now.
        self._belated: set[Peer] = set()
        # What those had on their way that were restored, until somebody opens them.
        self._aside: dict[str, tuple[CollectionFacts, list[Run]]] = {}

    def handlers(self) -> dict[type, Handler]:
        return {
            m.OpenCollection: self._open,
            m.Offer: self._offer,
            m.Next: self._next,
            m.Delivered: self._delivered,
            m.Drain: self._drain,
            m.EndCollection: self._end,
            m.Free: self._free,
            m.Make: self._make,
            m.CollectionStats: self._stats,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        return "collections", {name: self._counters(name) for name in self.states}

    def noted(self, wanted: Callable[[str], bool]) -> Iterable[tuple[str, str, Noted]]:
        for name, state in self.states.items():
            if isinstance(state, CollectionState) and not state.queue.closed and wanted(name):
                yield KIND, name, state.noted()
        for name, (facts, runs) in self._aside.items():
            if wanted(name):
                stamps = self._variables.states.get(facts.variable or "")
                if stamps is not None:
                    facts, runs = self._aside[name] = thinned(facts, runs, stamps.version)
                nbytes = sum(run.nbytes for run in runs)
                yield KIND, name, Noted(facts, partial(_pieces, runs), nbytes)

    def makers(self) -> dict[str, Maker]:
        return {KIND: (CollectionFacts, self._put_aside)}

    def _put_aside(self, brought: Brought) -> None:
        """Keep what one had on its way until one of that name is opened."""
        if brought.key in self._opened or brought.key in self._aside:
            raise SchemaError("it exists")
        self._aside[brought.key] = brought.facts, unowned(brought)

    def _counters(self, name: str) -> dict[str, Any]:
        waiting = self._service.parking.waiting(("start", name))
        return self.states[name].stats() | {"workers_waiting": waiting}

    def lost(self, peer: Peer) -> None:
        self._makes.pop(peer, None)
        self._belated.discard(peer)
        self._variables.rounds.pin(peer, None)
        for name, state in self.states.items():
            state.lost(peer)
            if not self._service.parking.waiting(("batch", name)):
                state.give_up()
            self._changed(name)

    def reset(self, gone: Callable[[str], bool]) -> None:
        for name in [name for name in self.states if gone(name)]:
            self._stop(name, self._service.containers.state.was_reset(name))
            self._forget(name)
        self._aside = {name: each for name, each in self._aside.items() if not gone(name)}

    def _collection(self, name: str) -> Schedule:
        found = self.states.get(name)
        if found is None:
            raise UnknownName(f"no collection '{name}'; there are {beside(name, self.states)}")
        return found

    def _changed(self, name: str) -> None:
        """Ask the trainer, then the workers."""
        self._service.parking.changed(("batch", name))
        self._service.parking.changed(("start", name))

    def _open(self, peer: Peer, request: m.OpenCollection, frame: Frame) -> None:
        name = checked(request.name)
        if name in self.states and request.makers is None:
            raise SchemaError(f"collection '{name}' exists already")
        self._forget_ended()
        if not 1 <= request.batch_size <= request.capacity:
            raise SchemaError(
                f"collection '{name}': batch_size={request.batch_size} is outside of 1 to"
                f" capacity={request.capacity}"
            )
        if request.makers is not None and self._opened.get(name) == request:
            # A chief that was started again goes on with it.
            self._service.answer(peer, frame.request, m.Done())
            return
        made = self._made(name, request)
        if request.makers is not None:
            self._replace(name)
            self._to_return[name] = set(request.makers)
        self.states[name], self._opened[name] = made, request
        if name in self._aside:
            made.revive(*self._aside.pop(name))
        self._service.containers.made(KIND, name, peer)
        self._service.answer(peer, frame.request, m.Done())

    def _replace(self, name: str) -> None:
        """End what has that name, if it has not ended yet, for another one."""
        self._belated |= {worker for worker, makes in self._makes.items() if makes == name}
        if name in self._opened:
            self._stop(name, self.states[name].ended())

    def _made(self, name: str, request: m.OpenCollection) -> Schedule:
        current = None
        if request.variable is not None:
            variable = self._variables.variable(request.variable)
            current = lambda: variable.version  # noqa: E731
        queue = QueueState(name, request.capacity, request.capacity_bytes)
        if request.turns is None:
            return CollectionState(
                queue, request.batch_size, request.max_lag, current, request.variable
            )
        going = self._variables.rounds.begin(f"a lockstep round of '{name}'")
        return LockstepState(
            queue, request.batch_size, request.turns, current, going, name_of=holder_name
        )

    def _forget(self, name: str) -> None:
        del self.states[name]
        self._opened.pop(name, None)
        self._to_return.pop(name, None)

    def _forget_ended(self) -> None:
        ended = [name for name, state in self.states.items() if state.over]
        for name in ended[:-REMEMBERED]:
            self._forget(name)
            self._service.containers.state.remove(KIND, name)

    def _offer(self, peer: Peer, request: m.Offer, frame: Frame) -> None:
        state = self._collection(request.name)
        if peer in self._belated:
            raise state.ended()
        if self._makes.get(peer) != request.name:
            self._makes[peer] = peer.making = request.name
            self._variables.rounds.pin(peer, state.round)
            self._service.parking.allow(peer, _CAUSE)
        runs = received(peer, request.runs, frame)
        state.offer(peer, runs, request.abandoned)
        if request.times is not None:
            self._service.report(peer, request.times)
        if runs:
            peer.items += items_in(runs)
            peer.version = runs[-1].version

        def attempt() -> Any:
            granted = state.admit(peer, request.want)
            return NOT_YET if granted is NOT_YET else m.Granted(granted)

        def what() -> str:
            return f"start an item of '{request.name}': the trainer is {state.queue.size} behind"

        if request.runs or request.abandoned:
            self._service.parking.changed(("batch", request.name))
        if request.want:
            key = ("start", request.name)
            # In lockstep nobody takes what is another's.
            behind = state.kind == "lag"
            self._service.ask(peer, frame, key, attempt, request.timeout, what, behind=behind)
        else:
            state.check_open()
            self._service.answer(peer, frame.request, m.Granted(0))
        # What was dropped or abandoned lets others start, also those who wait longer than this one.
        self._service.parking.changed(("start", request.name))

    def _next(self, peer: Peer, request: m.Next, frame: Frame) -> None:
        state = self._collection(request.name)
        retry = request.retry

        def attempt() -> Any:
            nonlocal retry
            again, retry = retry, True
            found = state.next(retry=again)
            if found is NOT_YET:
                return NOT_YET
            return handed_out(state.queue, *found, peer)

        def what() -> str:
            whose = f"; it is the turn of {', '.join(state.owing)}" if state.owing else ""
            return (
                f"next batch of '{request.name}': {state.queue.size} of {state.batch_size} items"
                f" are there, {state.running} more are admitted{whose}; {self._service.who()}"
            )

        key = ("batch", request.name)
        # A trainer that only looks (timeout 0) will look again; the workers may go on for it.
        in_vain = state.give_up if request.timeout != 0 else None
        self._service.ask(peer, frame, key, attempt, request.timeout, what, in_vain=in_vain)
        self._service.parking.changed(("start", request.name))

    def _delivered(self, peer: Peer, request: m.Delivered, frame: Frame) -> None:
        self._collection(request.name).queue.receipt(
            request.delivery, peer, returned=request.returned
        )
        self._changed(request.name)

    def _drain(self, peer: Peer, request: m.Drain, frame: Frame) -> None:
        state, to_return = self._collection(request.name), self._to_return.get(request.name, set())
        if peer not in self._belated:
            to_return.discard(peer.name)
            # In lockstep each says so for its own turns.
            if not to_return or state.kind == "lockstep":
                state.drain(peer)
        self._changed(request.name)
        self._service.answer(peer, frame.request, m.Done())

    def _end(self, peer: Peer, request: m.EndCollection, frame: Frame) -> None:
        state = self.states.get(request.name)
        if state is not None:
            self._stop(request.name, state.ended())
        else:
            self._interrupt(request.name, Closed(f"collection {quoted(request.name)} has ended"))
        self._service.answer(peer, frame.request, m.Done())

    def _make(self, peer: Peer, request: m.Make, frame: Frame) -> None:
        self._makes[peer] = request.name
        self._service.parking.allow(peer, _CAUSE)
        self._service.answer(peer, frame.request, m.Done())

    def _free(self, peer: Peer, request: m.Free, frame: Frame) -> None:
        self._belated.discard(peer)
        if self._makes.pop(peer, None) is not None:
            peer.making = None
            self._variables.rounds.pin(peer, None)
            self._service.parking.allow(peer, _CAUSE)
        self._service.answer(peer, frame.request, m.Done())

    def _stop(self, name: str, why: Closed) -> None:
        """End a collection, and all waits of those who make items for it."""
        state = self.states[name]
        state.end()
        self._opened.pop(name, None)
        self._to_return.pop(name, None)
        self._variables.rounds.forget(state.round)
        self._changed(name)
        self._interrupt(name, why)

    def _interrupt(self, name: str, why: Closed) -> None:
        """End all waits of those who make items for a collection."""
        for worker, makes in list(self._makes.items()):
            if makes == name:
                self._service.parking.interrupt(worker, _CAUSE, why)

    def _stats(self, peer: Peer, request: m.CollectionStats, frame: Frame) -> None:
        self._collection(request.name)
        self._service.answer(peer, frame.request, m.Text(self._counters(request.name)))


def _pieces(runs: list[Run]) -> list[Piece]:
    return [piece(run) for run in runs]
