"""What a server does with spread variables: as their home, and as one that has a part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.core import messages as m
from paceline.core import spreading
from paceline.core.errors import SchemaError
from paceline.core.facts import Noted, PartFacts, Piece, tree_piece
from paceline.core.names import checked, label
from paceline.core.part_state import Grant, Grants, PartState
from paceline.core.row_pieces import Chosen
from paceline.core.tree import check
from paceline.core.variable_state import VariableState
from paceline.core.versions import EPOCHS
from paceline.core.waiting import NOT_YET, Stored
from paceline.server.adding import add_beside
from paceline.server.frames import buffer, stored
from paceline.server.lines import Peer
from paceline.server.row_work import add_rows_beside, chosen_of, gather_beside
from paceline.server.service import Desk, Handler, Service
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame, Memory


class HomeDesk(Desk):
    """Writes of the spread variables whose home this is: begun here, staged, committed here."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._variables: VariableDesk = service.desk(VariableDesk)
        self._grants = Grants(service.epoch)

    def handlers(self) -> dict[type, Handler]:
        return {
            m.Begin: self._begin,
            m.Abandon: self._abandon,
            m.CommitFirst: self._commit_first,
            m.Commit: self._commit,
            m.LetGo: self._let_go,
            m.GatherHome: self._gather,
            m.Outlived: self._outlived,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        states = self._variables.states.items()
        return "spread", {
            name: [task for task, _ in state.spread.parts]
            for name, state in states
            if state.spread is not None
        }

    def lost(self, peer: Peer) -> None:
        for grant in self._grants.lost(peer):
            self._ended(grant)
        for reading in [each for each in self._variables.reading if each[0] is peer]:
            for _ in range(self._variables.reading.pop(reading)):
                self._variables.let_go(self._variables.variable(reading[1]), reading[2], peer)

    def reset(self, gone: Callable[[str], bool]) -> None:
        self._grants.reset(gone)
        for reading in [each for each in self._variables.reading if gone(each[1])]:
            del self._variables.reading[reading]

    def _outlived(self, peer: Peer, request: m.Outlived, frame: Frame) -> None:
        epoch = request.epoch + 1
        if not 0 < epoch < EPOCHS:
            raise SchemaError(f"there is no epoch {request.epoch}")
        self._variables.begin(epoch)
        self._grants.begin(epoch)
        self._service.answer(peer, frame.request, m.Done())

    def _ended(self, grant: Grant) -> None:
        """A write will never be committed."""
        if grant.turn:
            self._variables.variable(grant.name).end_add(None)
            self._variables.freed(grant.name)

    def _begin(self, peer: Peer, request: m.Begin, frame: Frame) -> None:
        name = checked(request.name)
        if request.kind == "first":
            there = name in self._variables.states
            reply = m.Staging(0) if there else self._granted(peer, name, turn=False)
            self._service.answer(peer, frame.request, reply)
            return
        state = self._spread(name)
        if request.kind == "assign":
            self._service.answer(peer, frame.request, self._granted(peer, name, turn=False))
            return

        def attempt() -> Any:
            if state.take_turn(peer) is NOT_YET:
                return NOT_YET
            return self._granted(peer, name, turn=True)

        asked = "scatter_add" if request.kind == "rows" else "assign_add"
        self._variables.in_turn(peer, frame, state, asked, 0, request.timeout, attempt)

    def _granted(self, peer: Peer, name: str, *, turn: bool) -> m.Staging:
        stage = self._grants.grant(name, peer, turn=turn)
        needed, base, version = self._grants.of(name), 0, m.NO_VERSION
        state = self._variables.states.get(name)
        if state is not None and state.stored is not None:
            needed |= state.kept.stages()
            base, version = state.stored.stage, state.version
        return m.Staging(stage, base, version, sorted(needed), self._grants.below)

    def _abandon(self, peer: Peer, request: m.Abandon, frame: Frame) -> None:
        grant = self._grants.abandon(request.name, request.stage, peer)
        if grant is not None:
            self._ended(grant)
        self._service.answer(peer, frame.request, m.Done())

    def _commit_first(self, peer: Peer, request: m.CommitFirst, frame: Frame) -> None:
        name, asked = request.name, f"variable '{request.name}'"
        spreading.check(request.spread)
        first = self._staged(request.head, request.stage, frame)
        self._grants.check(name, request.stage, peer, turn=False)
        state = self._variables.made(peer, name, first, spread=request.spread)
        self._grants.end(request.stage)
        if state.stored is not None:
            # Somebody was quicker.
            check(request.spread.layout, state.layout, asked)
            reply = self._variables.defined(peer, name, False)
        else:
            reply = self._variables.define(peer, state, first, False)
        self._service.answer(peer, frame.request, reply)

    def _commit(self, peer: Peer, request: m.Commit, frame: Frame) -> None:
        name, stage = request.name, request.stage
        state = self._spread(name)
        new = self._staged(request.head, stage, frame)
        self._grants.check(name, stage, peer, turn=request.adding)
        if request.adding:
            chosen = None
            if request.pieces is None:
                state.check_write("assign_add", new, peer)
            else:
                assert state.stored is not None
                chosen = chosen_of(state.stored, request.pieces, frame, 1)
                chosen.check_rows(new.layout)
            self._add(peer, frame.request, state, new, chosen)
            return

        def attempt() -> Any:
            reply = self._variables.assign(peer, state, new)
            if reply is not NOT_YET:
                self._grants.end(stage)
            return reply

        self._variables.write(peer, request, frame, "assign", new, attempt)

    def _add(
        self, peer: Peer, number: int, state: VariableState, delta: Stored, chosen: Chosen | None
    ) -> None:
        assert state.stored is not None
        self._grants.keep(delta.stage)

        def done(total: Stored, error: Exception | None) -> None:
            self._grants.end(delta.stage)
            if error is None:
                total.stage = delta.stage
            self._variables.added(peer, number, state, total, error)

        _add_beside(self._service, state.stored, delta, chosen, done)

    def _gather(self, peer: Peer, request: m.GatherHome, frame: Frame) -> None:
        state = self._spread(request.name)
        version, tree = self._variables.current(peer, state)
        chosen = chosen_of(tree, request.pieces, frame, 0)
        if request.hold:
            self._variables.hold(peer, state, version)

        def done(block: Memory | None, error: Exception | None) -> None:
            reply = m.Value(version, chosen.layout, [], tree.stage), [block]
            self._service.answer(peer, frame.request, error or reply)

        gather_beside(self._service, tree, chosen, done)

    def _let_go(self, peer: Peer, request: m.LetGo, frame: Frame) -> None:
        reading = (peer, request.name, request.version)
        held = self._variables.reading
        if held[reading] > 0:
            held.subtract([reading])
            self._variables.let_go(self._variables.variable(request.name), request.version, peer)
        if not held[reading]:
            del held[reading]
        self._service.answer(peer, frame.request, m.Done())

    def _staged(self, head: m.Head, stage: int, frame: Frame) -> Stored:
        found = stored(head, buffer(frame, 0))
        found.stage = stage
        return found

    def _spread(self, name: str) -> VariableState:
        state = self._variables.variable(name)
        if state.spread is None:
            raise SchemaError(f"variable '{name}' is on one server: find it again")
        return state


class PartDesk(Desk):
    """Parts of variables whose homes are other servers. It knows nothing of versions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.states: dict[str, PartState] = {}

    def handlers(self) -> dict[type, Handler]:
        return {m.Stage: self._stage, m.ReadPart: self._read, m.GatherPart: self._gather}

    def listing(self) -> tuple[str, dict[str, Any]]:
        own = self._service.cluster.own
        return "parts", {
            f"{label(name)} on {own}": {"stages": len(state.trees), "bytes": state.nbytes}
            for name, state in self.states.items()
        }

    def lost(self, peer: Peer) -> None:
        """What was staged belongs to the home, which says what goes."""

    def reset(self, gone: Callable[[str], bool]) -> None:
        self.states = {name: state for name, state in self.states.items() if not gone(name)}

    def noted(self, wanted: Callable[[str], bool]) -> Iterable[tuple[str, str, Noted]]:
        for name, state in self.states.items():
            if not wanted(name):
                continue

            def pieces(trees: tuple[Stored, ...] = tuple(state.trees.values())) -> list[Piece]:
                return [tree_piece(tree) for tree in trees]

            yield "part", name, Noted(PartFacts(list(state.trees)), pieces, state.nbytes)

    def _stage(self, peer: Peer, request: m.Stage, frame: Frame) -> None:
        share = stored(request.head, buffer(frame, 0))
        state = self.states.setdefault(checked(request.name), PartState())
        state.drop(request.keep, request.below)
        number, stage = frame.request, request.stage
        if request.base is None:
            state.trees[stage] = share
            self._service.answer(peer, number, m.Text(True))
            return
        base = state.trees.get(request.base)
        if base is None:
            self._service.answer(peer, number, m.Text(False))
            return
        chosen = None
        if request.pieces is None:
            check(share.layout, base.layout, f"assign_add '{request.name}'")
        else:
            chosen = chosen_of(base, request.pieces, frame, 1)
            chosen.check_rows(share.layout)

        def done(total: Stored, error: Exception | None) -> None:
            if error is None:
                state.trees[stage] = total
            self._service.answer(peer, number, error or m.Text(True))

        _add_beside(self._service, base, share, chosen, done)

    def _gather(self, peer: Peer, request: m.GatherPart, frame: Frame) -> None:
        found = self._at(request.name, request.stage)
        if found is None:
            self._service.answer(peer, frame.request, m.Value(m.NO_VERSION, b"", []))
            return
        chosen = chosen_of(found, request.pieces, frame, 0)

        def done(block: Memory | None, error: Exception | None) -> None:
            reply = m.Value(request.stage, chosen.layout, [], request.stage), [block]
            self._service.answer(peer, frame.request, error or reply)

        gather_beside(self._service, found, chosen, done)

    def _at(self, name: str, stage: int) -> Stored | None:
        state = self.states.get(name)
        return None if state is None else state.trees.get(stage)

    def _read(self, peer: Peer, request: m.ReadPart, frame: Frame) -> None:
        found = self._at(request.name, request.stage)
        if found is None:
            self._service.answer(peer, frame.request, m.Value(m.NO_VERSION, b"", []))
            return
        reply = m.Value(request.stage, found.layout, found.values, request.stage)
        memory = () if found.memory is None else (found.memory,)
        self._service.answer(peer, frame.request, (reply, memory))


def _add_beside(
    service: Service,
    current: Stored,
    delta: Stored,
    chosen: Chosen | None,
    done: Callable[[Stored, Exception | None], None],
) -> None:
    """Add to all of a share, or to chosen rows."""
    if chosen is None:
        add_beside(service, current, delta, done)
    else:
        add_rows_beside(service, current, chosen, delta, done)
