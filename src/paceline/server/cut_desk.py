"""What a server does for a cut through all: takes note of what there is, and brings it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core import messages as m
from paceline.core.errors import PacelineError, ProtocolError, SchemaError, TimedOut
from paceline.core.facts import Facts, Noted, Piece, decoded, encoded
from paceline.core.names import checked, containers, parts
from paceline.core.queue_items import Run
from paceline.core.waiting import NOT_YET
from paceline.server.brought import Brought
from paceline.server.lines import Peer
from paceline.server.parking import Parked
from paceline.server.queue_desk import received
from paceline.server.service import Desk, Handler, Service
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame, Memory

LIMIT = 2.0
"""Seconds after which a frozen server carries out all requests again."""

FETCHED_BYTES = 1 << 26
FETCHED_PIECES = 4096
"""What one reply has at most, or one piece."""


@dataclass
class Notes:
    """What a session took note of, and the pieces of what it is fetching."""

    things: dict[int, tuple[str, str, Noted]]
    fetching: int = -1
    pieces: Sequence[Piece] = ()


@dataclass
class Draft:
    """Something on its way back, of which more pieces may come."""

    facts: Facts
    runs: list[Run] = field(default_factory=list)
    about: list[Any] = field(default_factory=list)


class CutDesk(Desk):
    """What sessions took note of, and what they are bringing back; it goes with the session."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._desks = list(service.desks)
        self._makers = {
            kind: maker for desk in self._desks for kind, maker in desk.makers().items()
        }
        self._noted: dict[Peer, Notes] = {}
        self._brought: dict[Peer, dict[tuple[str, str], Draft]] = {}
        # Containers, and the generations in which what is there is, or was, in a checkpoint. Of
        # all of them that is said by their resets until then.
        self._marks: dict[str, int] = {}
        self._all: tuple[int, dict[str, int]] | None = None

    def handlers(self) -> dict[type, Handler]:
        return {
            m.Freeze: self._freeze,
            m.Note: self._note,
            m.Noticed: self._noticed,
            m.Thaw: self._thaw,
            m.Fetch: self._fetch,
            m.Bring: self._bring,
            m.Revive: self._revive,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        return "cuts", {}

    def lost(self, peer: Peer) -> None:
        self._noted.pop(peer, None)
        self._brought.pop(peer, None)

    def reset(self, gone: Callable[[str], bool]) -> None:
        for drafts in self._brought.values():
            for each in [each for each in drafts if gone(each[1])]:
                del drafts[each]

    def _freeze(self, peer: Peer, request: m.Freeze, frame: Frame) -> None:
        freezing, parking = self._service.freezing, self._service.parking
        number = freezing.freeze(peer)

        def frozen() -> bool:
            return freezing.by is peer and freezing.number == number

        def ended(result: Any) -> None:
            if isinstance(result, TimedOut) and frozen():
                freezing.thaw()

        # It is nobody's wait: the end of the session thaws by itself.
        waiting = Parked(
            self, 0, lambda: "frozen for a cut", lambda: NOT_YET if frozen() else True, ended
        )
        parking.park(("frozen",), waiting, LIMIT)
        self._service.answer(peer, frame.request, m.Done())

    def _thaw(self, peer: Peer, request: m.Thaw, frame: Frame) -> None:
        frozen = self._service.freezing.by is peer
        if frozen:
            self._service.freezing.thaw()
            self._service.parking.changed(("frozen",))
        if request.forget:
            self._noted.pop(peer, None)
        self._service.answer(peer, frame.request, m.Text(frozen))

    def _note(self, peer: Peer, request: m.Note, frame: Frame) -> None:
        only = containers(request.containers)

        def wanted(key: str) -> bool:
            return only is None or parts(key).container in only

        found = [each for desk in self._desks for each in desk.noted(wanted)]
        self._noted[peer] = Notes(dict(enumerate(found)))
        self._mark(only)
        resets = self._service.containers.state.resets
        told = [[(k, key, n.nbytes) for k, key, n in found], *resets]
        self._service.answer(peer, frame.request, m.Text(told))

    def _noticed(self, peer: Peer, request: m.Noticed, frame: Frame) -> None:
        found = [each for each in containers(request.containers) or () if self._marked(each)]
        restoring = self._service.cluster.restoring
        epoch = self._service.desk(VariableDesk).epoch
        self._service.answer(peer, frame.request, m.Text([found, epoch, restoring]))

    def _mark(self, only: list[str] | None) -> None:
        state = self._service.containers.state
        if only is None:
            self._all, self._marks = state.resets, {}
        else:
            self._marks |= {each: state.generation(each) for each in only}

    def _marked(self, container: str) -> bool:
        known = [self._marks.get(container)]
        if self._all is not None:
            known.append(max(self._all[0], self._all[1].get(container, 0)))
        return self._service.containers.state.generation(container) in known

    def _fetch(self, peer: Peer, request: m.Fetch, frame: Frame) -> None:
        notes = self._noted.get(peer)
        found = None if notes is None else notes.things.get(request.entry)
        if notes is None or found is None:
            raise SchemaError(f"fetch {request.entry}: this session took no note of it here")
        noted = found[2]
        if notes.fetching != request.entry:
            notes.fetching, notes.pieces = request.entry, noted.pieces()
        first, nbytes, some = request.first, 0, list[Piece]()
        for piece in notes.pieces[first : first + FETCHED_PIECES]:
            size = 0 if piece.memory is None else piece.memory.nbytes
            if some and nbytes + size > FETCHED_BYTES:
                break
            some.append(piece)
            nbytes += size
        more = first + len(some) < len(notes.pieces)
        if not more:
            notes.fetching, notes.pieces = -1, ()
            del notes.things[request.entry]
        facts = b"" if first else encoded(noted.facts)
        about = [piece.about for piece in some]
        reply = m.Fetched(facts, [piece.head for piece in some], about, more)
        memories: list[Memory | None] = [piece.memory for piece in some]
        kept = [(reply, memories)]
        del some

        def answer(error: Exception | None) -> None:
            self._service.answer(peer, frame.request, kept.pop())

        if noted.settling:
            # After what is being added to it.
            self._service.run_long(_nothing, answer)
        else:
            answer(None)

    def _bring(self, peer: Peer, request: m.Bring, frame: Frame) -> None:
        if request.kind not in self._makers:
            raise SchemaError(f"a {request.kind!r:.40} cannot be brought back")
        if len(request.heads) != len(request.about):
            raise ProtocolError(f"{len(request.about)} words about {len(request.heads)} pieces")
        drafts = self._brought.setdefault(peer, {})
        draft = drafts.get((request.kind, checked(request.name)))
        if draft is None:
            facts = decoded(self._makers[request.kind][0], request.facts)
            draft = drafts[request.kind, request.name] = Draft(facts)
        draft.runs += received(peer, request.heads, frame)
        draft.about += request.about
        self._service.answer(peer, frame.request, m.Done())

    def _revive(self, peer: Peer, request: m.Revive, frame: Frame) -> None:
        only = containers(request.containers)
        drafts = self._brought.pop(peer, {})
        told = []
        with self._service.parking.one_step():
            for (kind, key), draft in drafts.items():
                brought = Brought(peer, key, draft.facts, draft.runs, draft.about)
                try:
                    self._makers[kind][1](brought)
                    why = ""
                except (PacelineError, ValueError, TypeError) as e:
                    why = str(e)
                told.append((kind, key, why))
        self._mark(only)
        self._service.answer(peer, frame.request, m.Text(told))


def _nothing() -> None:
    pass
