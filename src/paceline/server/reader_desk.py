"""What a server does with readers."""

from __future__ import annotations

from typing import Any

from paceline.core import messages as m
from paceline.core.errors import ProtocolError, SchemaError, TimedOut
from paceline.core.facts import ReaderFacts
from paceline.core.queue_items import Run
from paceline.core.reader_state import PIECES, Content, ReaderState, Terms
from paceline.core.waiting import NOT_YET
from paceline.server.brought import Brought
from paceline.server.kept_desk import KeptDesk
from paceline.server.lines import Peer
from paceline.server.parking import Parked
from paceline.server.queue_desk import received
from paceline.server.service import Handler
from paceline.transports.base import Frame


class ReaderDesk(KeptDesk[ReaderState]):
    """The readers of a server."""

    kind = "reader"
    made_by = "reader('{}', pieces)"
    facts = ReaderFacts

    def handlers(self) -> dict[type, Handler]:
        return {
            m.DefineReader: self._define,
            m.NextPiece: self._next,
            m.EndPiece: self._end,
            m.FeedReader: self._feed,
        }

    @property
    def leasing(self) -> bool:
        """Whether a piece may ever come back by itself."""
        return any(state.terms.lease for state in self.states.values())

    def lost(self, peer: Peer) -> None:
        for state in self.states.values():
            for delivery in state.lost(peer):
                self._ended(state, delivery)

    def again(self, brought: Brought) -> ReaderState:
        return ReaderState.again(brought.key, brought.facts, _of_runs(brought.runs))

    def fill(self, state: ReaderState, brought: Brought) -> None:
        state.revive(brought.facts, _of_runs(brought.runs))
        self._service.parking.changed(("pieces", state.name))

    def _define(self, peer: Peer, request: m.DefineReader, frame: Frame) -> None:
        if request.pieces is None:
            self.find(peer, frame, request.name, request.timeout)
            return
        terms = Terms(request.epochs, request.shuffle, request.seed, request.lease, request.stream)
        pieces = _contents(peer, request.pieces, frame)
        self.define(peer, frame, ReaderState(request.name, pieces, terms))

    def _next(self, peer: Peer, request: m.NextPiece, frame: Frame) -> None:
        state = self.state(request.name)

        def attempt() -> Any:
            handed = state.next(peer)
            if handed is NOT_YET:
                return NOT_YET
            if handed is None:
                return m.PieceHead(0)
            self._lease(state, handed.delivery)
            layout, values = state.content(handed.number)
            return m.PieceHead(
                handed.delivery, handed.epoch, handed.number, handed.attempt, layout, values
            )

        if request.done and state.end(request.done, peer):
            self._ended(state, request.done)
        self._service.ask(
            peer, frame, ("pieces", state.name), attempt, request.timeout,
            lambda: self._why_not(state),
        )  # fmt: skip

    def _end(self, peer: Peer, request: m.EndPiece, frame: Frame) -> None:
        state = self.state(request.name)
        held = state.end(request.delivery, peer, returned=request.returned)
        self._service.answer(peer, frame.request, m.Text(held))
        if held:
            self._ended(state, request.delivery)

    def _feed(self, peer: Peer, request: m.FeedReader, frame: Frame) -> None:
        state = self.state(request.name)
        if request.pieces:
            state.add(_contents(peer, request.pieces, frame))
        if request.close:
            state.close()
        self._service.answer(peer, frame.request, m.Text(state.stats()))
        self._service.parking.changed(("pieces", state.name))

    def _lease(self, state: ReaderState, delivery: int) -> None:
        """Take a piece back when its time is up."""
        if state.terms.lease is None:
            return

        def ended(result: Any) -> None:
            if isinstance(result, TimedOut):
                state.expire(delivery)
                self._service.parking.changed(("pieces", state.name))

        # It is nobody's wait, so nobody's end ends it.
        waiting = Parked(
            self, 0, lambda: f"reader '{state.name}': a lease",
            lambda: NOT_YET if state.holds(delivery) else True, ended, state.name,
        )  # fmt: skip
        self._service.parking.park(("lease", state.name, delivery), waiting, state.terms.lease)

    def _ended(self, state: ReaderState, delivery: int) -> None:
        parking = self._service.parking
        parking.changed(("lease", state.name, delivery))
        parking.changed(("pieces", state.name))

    def _why_not(self, state: ReaderState) -> str:
        """Why there is no piece now, as part of a message."""
        holders: Any = state.holders()
        names = sorted(f"{count} by {peer.name}" for peer, count in holders.items())
        held = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
        ends = ["they"] if held else []
        if not state.closed:
            ends.append("whoever adds pieces or closes it")
        return (
            f"next piece of reader '{state.name}': all are done or held ({held or 'by nobody'});"
            f" {', or '.join(ends)} end{'' if held else 's'} the wait; {self._service.who()}"
        )


def _contents(peer: Peer, heads: list[m.RunHead], frame: Frame) -> list[Content]:
    """The pieces of a request, checked.

    Raises:
        ProtocolError: they are not what their layouts say.
        SchemaError: there are too many.
    """
    count = sum(head.count for head in heads)
    if count > PIECES:
        raise SchemaError(f"{count} pieces in one step, {PIECES} are allowed: hand out ranges")
    return _of_runs(received(peer, heads, frame))


def _of_runs(runs: list[Run]) -> list[Content]:
    found: list[Content] = []
    for run in runs:
        if run.memory is not None:
            raise ProtocolError("pieces of a reader have no arrays")
        head = run.head
        rows = zip(*head.columns, strict=True) if head.columns else [()] * head.count
        found += [(head.layout, list(row)) for row in rows]
    return found
