"""What a server does with variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from paceline.core import messages as m
from paceline.core.errors import SchemaError, UnknownName, WouldBlock
from paceline.core.names import beside, checked, parts
from paceline.core.tree import Array, check
from paceline.core.variable_state import LEAN, VariableState
from paceline.core.versions import count_of
from paceline.core.waiting import NOT_YET, NotYet, Stored
from paceline.server.adding import add_beside
from paceline.server.frames import buffer, stored
from paceline.server.lines import Peer, holder_name
from paceline.server.parking import TOGETHER
from paceline.server.rounds import Rounds
from paceline.server.service import Desk, Handler, Service
from paceline.transports.base import Frame, Lease

WORDS = 4096


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
        self.epoch = service.epoch
        self._bounded: list[str] = []
        # Who has to know of each new version, by the variable's name.
        self.watchers: dict[str, list[Callable[[int], None]]] = {}
        self.rounds = Rounds(self.states, self.freed)
        # Who has which versions kept while they read the parts on other servers.
        self.reading: Counter[tuple[Peer, str, int]] = Counter()
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

    def lost(self, peer: Peer) -> None:
        # Versions belong to nobody; what the peer held comes back by itself.
        for name in self.states:
            self._service.parking.changed(("write", name), in_order=True)

    def reset(self, gone: Callable[[str], bool]) -> None:
        ended = [name for name in self.states if gone(name)]
        for name in ended:
            self.rounds.reset(name)
            del self.states[name]
            self.watchers.pop(name, None)
            word = self._words.pop(name)
            self._board_words[word] = 0
            self._free_words.append(word)
        self._bounded = [name for name in self._bounded if not gone(name)]
        self.epoch += bool(ended)

    def begin(self, epoch: int) -> None:
        """What is made from now on has versions of that epoch, or of a later one."""
        self.epoch = max(self.epoch, epoch)

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
        return any(waiting(("write", name)) or waiting(TOGETHER) for name in self._bounded)

    def lend(
        self,
        peer: Peer,
        state: VariableState,
        version: int,
        tree: Stored,
        *,
        hold: bool,
        lean: bool = False,
    ) -> Any:
        """The reply with a kept version, which stays kept for as long as the peer looks at it.

        If it is spread, which needs `hold`, or a reply is `lean`, also until the peer lets go.

        Raises:
            SchemaError: it is spread, and the peer asked for a whole tree.
        """
        lean = lean and tree.nbytes > LEAN
        if not hold:
            state.in_one_place()
        if state.spread is not None or lean:
            self.hold(peer, state, version)
        if lean:
            return m.Value(version, b"", [], tree.stage)
        return self.lease(peer, state, version, tree)

    def lease(self, peer: Peer, state: VariableState, version: int, tree: Stored) -> Any:
        """The reply with what is here of a kept version."""
        reply = m.Value(version, tree.layout, tree.values, tree.stage)
        if tree.memory is None:
            return reply
        state.kept.hold(version, peer)
        back = partial(self.let_go, state, version, peer)
        return reply, (Lease(tree.memory, partial(self._service.ended.append, back)),)

    def hold(self, peer: Peer, state: VariableState, version: int) -> None:
        """Keep a version until the peer says that it has read it all."""
        state.kept.hold(version, peer)
        self.reading[peer, state.name, version] += 1

    def freed(self, name: str) -> None:
        """Memory of a variable has become free: those who wait to write are asked again."""
        self._service.parking.changed(("write", name), in_order=True)

    def let_go(self, state: VariableState, version: int, peer: Peer) -> None:
        """Undo one hold of a peer on a version."""
        if state.kept.let_go(version, peer):
            self.freed(state.name)

    def committed(self, name: str) -> None:
        """A variable has a new version: who waits for it, or watches it, hears of it."""
        self._board_words[self._words[name]] = self.states[name].version
        for watcher in self.watchers.get(name, ()):
            watcher(self.states[name].version)
        self._service.parking.changed(("variable", name))
        self.freed(name)

    def made(
        self,
        peer: Peer,
        name: str,
        first: Stored,
        bound: int | None = None,
        spread: m.Spreading | None = None,
    ) -> VariableState:
        """The variable of that name, which is made unless there is one.

        Raises:
            SchemaError: it exists with another bound, or there cannot be such a one.
        """
        state = self.states.get(name)
        if state is not None:
            if bound is not None and bound != state.kept.bound:
                raise SchemaError(
                    f"variable '{name}' exists with memory={state.kept.bound}; asked for: {bound}"
                )
            return state
        if not self._free_words:
            raise SchemaError(f"variable '{name}': a server holds {WORDS} variables at most")
        state = VariableState(
            checked(name), self.epoch, memory=bound, spread=spread, called=holder_name
        )
        state.kept.check_bound(first.nbytes)
        if bound is not None:
            self._bounded.append(name)
        self._words[name], self.states[name] = self._free_words.pop(), state
        self._service.containers.made("variable", name, peer)
        return state

    def defined(self, peer: Peer, name: str, fresh: bool) -> Any:
        """The reply to who asked for a variable, which is there."""
        state = self.states[name]
        bounded = state.kept.bound is not None
        version = self.rounds.version(peer, name) or state.version
        reply = m.Defined(version, self._words[name], fresh, bounded, state.spread)
        if not peer.channel.shares_memory or peer.board_sent:
            return reply
        peer.board_sent = True
        return reply, [self._board]

    def _define(self, peer: Peer, request: m.Define, frame: Frame) -> None:
        first = stored(request.head, buffer(frame, 0))
        state = self.made(peer, request.name, first, request.memory)

        def attempt() -> Any:
            return self.define(peer, state, first, request.overwrite)

        if state.spread is not None:
            # Its writes take other requests, also where it is to be overwritten.
            check(first.layout, state.layout, f"variable '{state.name}'")
            self._service.answer(peer, frame.request, self.defined(peer, state.name, False))
        elif request.overwrite:
            self.write(peer, request, frame, "variable", first, attempt)
        else:
            self._service.answer(peer, frame.request, attempt())

    def define(self, peer: Peer, state: VariableState, first: Stored, overwrite: bool) -> Any:
        """Give a variable its first value, or find it with one, and say so; or not yet."""
        fresh = state.define(first, overwrite=overwrite, writer=peer)
        if fresh is NOT_YET:
            return NOT_YET
        if fresh:
            self.rounds.defined(state)
            self.committed(state.name)
        return self.defined(peer, state.name, fresh)

    def _await(self, peer: Peer, request: m.Await, frame: Frame) -> None:
        name = checked(request.name)

        def attempt() -> Any:
            if name not in self.states or self.states[name].defined() is NOT_YET:
                return NOT_YET
            return self.defined(peer, name, False)

        def what() -> str:
            return (
                f"no variable '{name}' is initialised; there are {beside(name, self.states)};"
                f" whoever calls variable('{parts(name).name}', value) ends the wait;"
                f" {self._service.who()}"
            )

        self._service.ask(peer, frame, ("variable", name), attempt, request.timeout, what)

    def _assign(self, peer: Peer, request: m.Assign, frame: Frame) -> None:
        state = self.variable(request.name).in_one_place()
        new = stored(request.head, buffer(frame, 0))

        def attempt() -> Any:
            return self.assign(peer, state, new)

        self.write(peer, request, frame, "assign", new, attempt)

    def assign(self, peer: Peer, state: VariableState, new: Stored) -> Any:
        """Make a tree the current one, and say which version it is; or not yet."""
        version = state.assign(new, peer)
        if version is NOT_YET:
            return NOT_YET
        self.committed(state.name)
        return m.Version(version)

    def _add(self, peer: Peer, request: m.Add, frame: Frame) -> None:
        state = self.variable(request.name).in_one_place()
        delta = stored(request.head, buffer(frame, 0))

        def begun(current: Any) -> None:
            def done(total: Stored, error: Exception | None) -> None:
                self.added(peer, frame.request, state, total, error)

            add_beside(self._service, current, delta, done)

        def attempt() -> Any:
            return state.begin_add(delta, peer)

        self.write(peer, request, frame, "assign_add", delta, attempt, begun)

    def write(
        self,
        peer: Peer,
        request: m.Define | m.Assign | m.Add | m.Commit,
        frame: Frame,
        asked: str,
        new: Stored,
        attempt: Callable[[], Any],
        then: Callable[[Any], None] | None = None,
    ) -> None:
        """As `in_turn`, once it is known that it can be written."""
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
            found = self.readable(peer, state, request)
            if found is NOT_YET:
                return NOT_YET
            version, tree = found
            if version == request.have:
                return m.Value(version, b"", [])
            return self.lend(peer, state, version, tree, hold=request.hold, lean=request.lean)

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
        version = self.rounds.version(peer, state.name)
        tree = state.stored if version is None else state.at(version)
        assert tree is not None
        return state.version if version is None else version, tree

    def readable(
        self, peer: Peer, state: VariableState, request: m.Read
    ) -> tuple[int, Stored] | NotYet:
        """What a peer reads, once it is new enough: the current version, or that of its round.

        Raises:
            WouldBlock: its round has to end before it can read a newer one, and waits for it.
        """
        if self.rounds.version(peer, state.name) is None:
            return state.read(request.newer_than)
        version, tree = self.current(peer, state)
        if version > request.newer_than:
            return version, tree
        if request.timeout == 0:
            return NOT_YET
        raise WouldBlock(
            f"read '{state.name}' newer than version {count_of(request.newer_than)}: in"
            f" {self.rounds.of(peer)} it is {count_of(version)}, and the next round begins only"
            " after this worker's items: yield them first"
        )


def _nothing() -> None:
    pass
