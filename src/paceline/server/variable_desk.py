"""What a server does with variables."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core import messages as m
from paceline.core.arithmetic import add, add_values
from paceline.core.errors import SchemaError, UnknownName
from paceline.core.tree import Array, decoded
from paceline.core.variable_state import VariableState
from paceline.core.versions import count_of
from paceline.core.waiting import NOT_YET, Stored
from paceline.server.parking import Parked
from paceline.server.service import (
    Desk,
    Handler,
    Peer,
    Service,
    at_once,
    buffer,
    bytes_of,
    checked_name,
    never,
    stored,
)
from paceline.transports.base import Frame

WORDS = 4096
LONG_WORK = 1 << 20


class VariableDesk(Desk):
    """The variables of a server, and their hint words.

    The board has one aligned 8-byte version per variable, which readers on this host look at for
    free. It is written before an assign is answered, and it is a hint: equal means unchanged, for
    anything else ask.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.states: dict[str, VariableState] = {}
        self._words: dict[str, int] = {}
        self._board = service.arena.allocate(WORDS * 8)
        self._board_words: Array = self._board.array().view(np.int64)
        self._board_words[:] = 0

    def handlers(self) -> dict[type, Handler]:
        return {
            m.Define: self._define,
            m.Await: self._await,
            m.Assign: self._assign,
            m.Add: self._add,
            m.Read: self._read,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        made = {name: count_of(s.version) for name, s in self.states.items() if s.stored}
        return "variables", made

    def lost(self, peer: Peer) -> None:
        """Versions belong to nobody."""

    def variable(self, name: str) -> VariableState:
        """The variable of that name.

        Raises:
            UnknownName: there is none; the message lists those there are.
        """
        found = self.states.get(name)
        if found is None:
            raise UnknownName(f"no variable '{name}'; there are {sorted(self.states)}")
        return found

    def _committed(self, name: str) -> None:
        self._board_words[self._words[name]] = self.states[name].version
        self._service.parking.changed(("variable", name))

    def _made(self, name: str) -> VariableState:
        if name not in self.states:
            if len(self.states) == WORDS:
                raise SchemaError(f"variable '{name}': a server holds {WORDS} variables at most")
            self._words[name] = len(self.states)
            self.states[checked_name(name)] = VariableState(name, self._service.epoch)
        return self.states[name]

    def _defined(self, peer: Peer, name: str, fresh: bool) -> Any:
        reply = m.Defined(self.states[name].version, self._words[name], fresh)
        if not peer.channel.shares_memory or peer.board_sent:
            return reply
        peer.board_sent = True
        return reply, [self._board]

    def _define(self, peer: Peer, request: m.Define, frame: Frame) -> None:
        state = self._made(request.name)
        first = stored(request.head, buffer(frame, 0))

        def attempt() -> Any:
            fresh = state.define(first, overwrite=request.overwrite)
            if fresh is NOT_YET:
                return NOT_YET
            if fresh:
                self._committed(request.name)
            return self._defined(peer, request.name, fresh)

        self._service.ask(peer, frame, ("variable", request.name), attempt, None, never)

    def _await(self, peer: Peer, request: m.Await, frame: Frame) -> None:
        name = checked_name(request.name)

        def attempt() -> Any:
            if name not in self.states or self.states[name].defined() is NOT_YET:
                return NOT_YET
            return self._defined(peer, name, False)

        def what() -> str:
            return (
                f"no variable '{name}' is initialised; there are {sorted(self.states)}; whoever"
                f" calls variable('{name}', value) ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, ("variable", name), attempt, request.timeout, what)

    def _assign(self, peer: Peer, request: m.Assign, frame: Frame) -> None:
        state = self.variable(request.name)
        new = stored(request.head, buffer(frame, 0))

        def attempt() -> Any:
            version = state.assign(new)
            if version is NOT_YET:
                return NOT_YET
            self._committed(request.name)
            return m.Version(version)

        self._service.ask(peer, frame, ("variable", request.name), attempt, None, never)

    def _add(self, peer: Peer, request: m.Add, frame: Frame) -> None:
        state = self.variable(request.name)
        delta = stored(request.head, buffer(frame, 0))
        number = frame.request

        def begun(result: Any) -> None:
            if isinstance(result, Exception):
                self._service.answer(peer, number, result)
                return
            self._add_beside(peer, number, state, result, delta)

        def attempt() -> Any:
            return state.begin_add(delta)

        current = attempt()
        if current is not NOT_YET:
            begun(current)
            return
        parked = Parked(peer, number, never, attempt, begun)
        self._service.parking.park(("variable", request.name), parked, None)

    def _add_beside(
        self, peer: Peer, number: int, state: VariableState, current: Stored, delta: Stored
    ) -> None:
        """Compute the sum in new memory, so that readers of the current version go on."""
        total = Stored(current.layout, [], None)

        def work() -> None:
            nbytes = decoded(current.layout).nbytes
            block = self._service.arena.allocate(nbytes)
            add(current.layout, bytes_of(current), delta.layout, bytes_of(delta), block.array())
            total.memory = block
            total.values = add_values(current.layout, current.values, delta.layout, delta.values)

        def done(error: Exception | None) -> None:
            version = state.end_add(None if error else total)
            self._committed(state.name)
            self._service.answer(peer, number, error or m.Version(version))

        long = delta.memory is not None and delta.memory.nbytes > LONG_WORK
        (self._service.run_long if long else at_once)(work, done)

    def _read(self, peer: Peer, request: m.Read, frame: Frame) -> None:
        state = self.variable(request.name)

        def attempt() -> Any:
            found = state.read(request.newer_than)
            if found is NOT_YET:
                return NOT_YET
            version, stored = found
            if version == request.have:
                return m.Value(version, b"", [])
            reply = m.Value(version, stored.layout, stored.values)
            return reply if stored.memory is None else (reply, (stored.memory,))

        def what() -> str:
            return (
                f"read '{request.name}' newer than version {count_of(request.newer_than)}: it is"
                f" {count_of(state.version)}; the next assign ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, ("variable", request.name), attempt, request.timeout, what)
