"""What a server does with variables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from paceline.core import messages as m
from paceline.core.arithmetic import add, add_values
from paceline.core.errors import SchemaError, UnknownName, WouldBlock
from paceline.core.names import beside, checked, parts
from paceline.core.round import Round
from paceline.core.tree import Array, decoded
from paceline.core.variable_state import VariableState
from paceline.core.versions import count_of
from paceline.core.waiting import NOT_YET, NotYet, Stored
from paceline.server.lines import Peer
from paceline.server.service import (
    Desk,
    Handler,
    Service,
    at_once,
    buffer,
    bytes_of,
    stored,
)
from paceline.transports.base import Frame, Lease

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
        self._free_words = list(range(WORDS))[::-1]
        # Of what is made now. After a reset it is a later one, so that no version comes again.
        self._epoch = service.epoch
        self._bounded: list[str] = []
        # Who has to know of each new version, by the variable's name.
        self.watchers: dict[str, list[Callable[[int], None]]] = {}
        self._rounds: list[Round] = []
        # Readers that make items in lockstep read the versions of their round.
        self._pinned: dict[Peer, Round] = {}
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
        return "variables", {name: count_of(state.version) for name, state in self.states.items()}

    def round(self, what: str) -> Round:
        """A round whose workers are to be pinned to it, until it is forgotten."""
        made = Round(what, self.states, self.freed)
        self._rounds.append(made)
        return made

    def forget(self, ended: Round | None) -> None:
        """Let go of what a round holds, and of the round."""
        if ended in self._rounds:
            self._rounds.remove(ended)
            ended.end()
            self._pinned = {peer: one for peer, one in self._pinned.items() if one is not ended}

    def pin(self, peer: Peer, going: Round | None) -> None:
        """From now on a peer reads the versions of that round, or again what is current."""
        self._pinned.pop(peer, None)
        if going in self._rounds:
            self._pinned[peer] = going

    def lost(self, peer: Peer) -> None:
        # Versions belong to nobody; what the peer held comes back by itself.
        for name in self.states:
            self._service.parking.changed(("write", name), in_order=True)

    def reset(self, gone: Callable[[str], bool]) -> None:
        ended = [name for name in self.states if gone(name)]
        for name in ended:
            for going in self._rounds:
                going.forget(name)
            del self.states[name]
            self.watchers.pop(name, None)
            word = self._words.pop(name)
            self._board_words[word] = 0
            self._free_words.append(word)
        self._bounded = [name for name in self._bounded if not gone(name)]
        self._epoch += bool(ended)

    def variable(self, name: str) -> VariableState:
        """The variable of that name.

        Raises:
            UnknownName: there is none; the message lists those there are.
        """
        found = self.states.get(name)
        if found is None:
            self._service.containers.check(name)
            raise UnknownName(f"no variable '{name}'; there are {beside(name, self.states)}")
        return found

    @property
    def crowded(self) -> bool:
        """Whether a write waits until somebody lets go of a version."""
        waiting = self._service.parking.waiting
        return any(waiting(("write", name)) for name in self._bounded)

    def lend(self, peer: Peer, state: VariableState, version: int, tree: Stored) -> Any:
        """The reply with a kept version, which stays kept for as long as the peer looks at it."""
        reply = m.Value(version, tree.layout, tree.values)
        if tree.memory is None:
            return reply
        state.kept.hold(version, peer)
        back = partial(self._let_go, state, version, peer)
        return reply, (Lease(tree.memory, partial(self._service.ended.append, back)),)

    def freed(self, name: str) -> None:
        """Memory of a variable has become free: those who wait to write are asked again."""
        self._service.parking.changed(("write", name), in_order=True)

    def _let_go(self, state: VariableState, version: int, peer: Peer) -> None:
        if state.kept.let_go(version, peer):
            self.freed(state.name)

    def committed(self, name: str) -> None:
        """A variable has a new version: who waits for it, or watches it, hears of it."""
        self._board_words[self._words[name]] = self.states[name].version
        for watcher in self.watchers.get(name, ()):
            watcher(self.states[name].version)
        self._service.parking.changed(("variable", name))
        self.freed(name)

    def _made(self, peer: Peer, request: m.Define, first: Stored) -> VariableState:
        name, bound = request.name, request.memory
        state = self.states.get(name)
        if state is not None:
            if bound is not None and bound != state.kept.bound:
                raise SchemaError(
                    f"variable '{name}' exists with memory={state.kept.bound}; asked for: {bound}"
                )
            return state
        if not self._free_words:
            raise SchemaError(f"variable '{name}': a server holds {WORDS} variables at most")
        state = VariableState(checked(name), self._epoch, memory=bound, called=holder_name)
        state.kept.check_bound(first.nbytes)
        if bound is not None:
            self._bounded.append(name)
        self._words[name] = self._free_words.pop()
        self.states[name] = state
        self._service.containers.made("variable", name, peer)
        return state

    def _defined(self, peer: Peer, name: str, fresh: bool) -> Any:
        state = self.states[name]
        bounded = state.kept.bound is not None
        version = self._round_version(peer, name) or state.version
        reply = m.Defined(version, self._words[name], fresh, bounded)
        if not peer.channel.shares_memory or peer.board_sent:
            return reply
        peer.board_sent = True
        return reply, [self._board]

    def _define(self, peer: Peer, request: m.Define, frame: Frame) -> None:
        first = stored(request.head, buffer(frame, 0))
        state = self._made(peer, request, first)

        def attempt() -> Any:
            fresh = state.define(first, overwrite=request.overwrite, writer=peer)
            if fresh is NOT_YET:
                return NOT_YET
            if fresh:
                for going in self._rounds:
                    going.defined(state)
                self.committed(request.name)
            return self._defined(peer, request.name, fresh)

        if request.overwrite:
            self._write(peer, request, frame, "variable", first, attempt)
        else:
            self._service.answer(peer, frame.request, attempt())

    def _await(self, peer: Peer, request: m.Await, frame: Frame) -> None:
        name = checked(request.name)

        def attempt() -> Any:
            if name not in self.states or self.states[name].defined() is NOT_YET:
                return NOT_YET
            return self._defined(peer, name, False)

        def what() -> str:
            return (
                f"no variable '{name}' is initialised; there are {beside(name, self.states)};"
                f" whoever calls variable('{parts(name).name}', value) ends the wait;"
                f" {self._service.who()}"
            )

        self._service.ask(peer, frame, ("variable", name), attempt, request.timeout, what)

    def _assign(self, peer: Peer, request: m.Assign, frame: Frame) -> None:
        state = self.variable(request.name)
        new = stored(request.head, buffer(frame, 0))

        def attempt() -> Any:
            version = state.assign(new, peer)
            if version is NOT_YET:
                return NOT_YET
            self.committed(request.name)
            return m.Version(version)

        self._write(peer, request, frame, "assign", new, attempt)

    def _add(self, peer: Peer, request: m.Add, frame: Frame) -> None:
        state = self.variable(request.name)
        delta = stored(request.head, buffer(frame, 0))

        def begun(current: Any) -> None:
            self._add_beside(peer, frame.request, state, current, delta)

        def attempt() -> Any:
            return state.begin_add(delta, peer)

        self._write(peer, request, frame, "assign_add", delta, attempt, begun)

    def _write(
        self,
        peer: Peer,
        request: m.Define | m.Assign | m.Add,
        frame: Frame,
        asked: str,
        new: Stored,
        attempt: Callable[[], Any],
        then: Callable[[Any], None] | None = None,
    ) -> None:
        state = self.states[request.name]
        # What can never be written hears so now, also behind those who wait.
        state.check_write(asked, new, peer)
        self.in_turn(peer, frame, state, asked, new.nbytes, request.timeout, attempt, then)

    def in_turn(
        self,
        peer: Peer,
        frame: Frame,
        state: VariableState,
        asked: str,
        nbytes: int,
        timeout: float | None,
        attempt: Callable[[], Any],
        then: Callable[[Any], None] | None = None,
    ) -> None:
        """Write in the order of arrival: now, or when those before and a lack of room are past."""

        def what() -> str:
            return f"{asked} '{state.name}': {state.why_not(nbytes)}; {self._service.who()}"

        self._service.ask(
            peer, frame, ("write", state.name), attempt, timeout, what,
            behind=True, in_vain=lambda: self.freed(state.name), then=then,
        )  # fmt: skip

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
            self.added(peer, number, state, total, error)

        long = delta.memory is not None and delta.memory.nbytes > LONG_WORK
        (self._service.run_long if long else at_once)(work, done)

    def added(
        self,
        peer: Peer,
        number: int,
        state: VariableState,
        total: Stored | None,
        error: Exception | None,
    ) -> None:
        """End an addition, in a new tree unless it is `None`, and answer."""
        if self.states.get(state.name) is not state:
            # What was not committed never existed.
            error = self._service.containers.state.was_reset(state.name)
            self._service.answer(peer, number, error)
            return
        version = state.end_add(None if error else total)
        self.committed(state.name)
        self._service.answer(peer, number, error or m.Version(version))

    def _read(self, peer: Peer, request: m.Read, frame: Frame) -> None:
        state = self.variable(request.name)

        def attempt() -> Any:
            found = self._readable(peer, state, request)
            if found is NOT_YET:
                return NOT_YET
            version, tree = found
            if version == request.have:
                return m.Value(version, b"", [])
            return self.lend(peer, state, version, tree)

        def what() -> str:
            return (
                f"read '{request.name}' newer than version {count_of(request.newer_than)}: it is"
                f" {count_of(state.version)}; the next assign ends the wait; {self._service.who()}"
            )

        self._service.ask(
            peer, frame, ("variable", request.name), attempt, request.timeout, what,
            then=lambda reply: self.tell(peer, frame.request, state, reply),
        )  # fmt: skip

    def tell(self, peer: Peer, number: int, state: VariableState, reply: Any) -> None:
        """Answer with a tree, once what is being added to it is in it."""
        if not state.changing:
            self._service.answer(peer, number, reply)
            return
        kept = [reply]
        self._service.run_long(_nothing, lambda _: self._service.answer(peer, number, kept.pop()))

    def current(self, peer: Peer, state: VariableState) -> tuple[int, Stored]:
        """The version that a peer reads now, and its tree, to which something may be being added.

        `service.run_long` comes after that.
        """
        version = self._round_version(peer, state.name)
        tree = state.stored if version is None else state.at(version)
        assert tree is not None
        return state.version if version is None else version, tree

    def _readable(
        self, peer: Peer, state: VariableState, request: m.Read
    ) -> tuple[int, Stored] | NotYet:
        """What a peer reads, once it is new enough: the current version, or that of its round.

        Raises:
            WouldBlock: its round has to end before it can read a newer one, and waits for it.
        """
        if self._round_version(peer, state.name) is None:
            return state.read(request.newer_than)
        version, tree = self.current(peer, state)
        if version > request.newer_than:
            return version, tree
        if request.timeout == 0:
            return NOT_YET
        raise WouldBlock(
            f"read '{state.name}' newer than version {count_of(request.newer_than)}: in"
            f" {self._pinned[peer]} it is {count_of(version)}, and the next round begins only after"
            " this worker's items: yield them first"
        )

    def _round_version(self, peer: Peer, name: str) -> int | None:
        going = self._pinned.get(peer)
        return None if going is None else going.version(name)


def _nothing() -> None:
    pass


def holder_name(holder: object) -> str:
    """Who holds a version, as messages say it."""
    return holder.name if isinstance(holder, Peer) else str(holder)
