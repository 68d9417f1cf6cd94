"""What a server does with the versions of variables that are kept: tags, and who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.core import messages as m
from paceline.core.errors import SchemaError
from paceline.core.facts import Noted, VariableFacts
from paceline.core.kept_versions import held_by
from paceline.core.names import checked
from paceline.core.queue_items import Run
from paceline.core.tree import check
from paceline.core.variable_state import VariableState
from paceline.core.versions import epoch_of
from paceline.core.waiting import Stored
from paceline.server.brought import Brought, Maker
from paceline.server.lines import Peer, holder_name
from paceline.server.service import Desk, Handler, Service
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame


class TagDesk(Desk):
    """The tags of a server's variables, and the memory that their versions take."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._variables: VariableDesk = service.desk(VariableDesk)

    def handlers(self) -> dict[type, Handler]:
        return {
            m.ReadTag: self._read,
            m.ReadAt: self._read_at,
            m.Tag: self._tag,
            m.Untag: self._untag,
            m.Tags: self._tags,
            m.Usage: self._usage,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        return "memory", {name: self._used(s) for name, s in self._variables.states.items()}

    def lost(self, peer: Peer) -> None:
        """Tags belong to nobody."""

    def reset(self, gone: Callable[[str], bool]) -> None:
        """Tags go with their variables."""

    def noted(self, wanted: Callable[[str], bool]) -> Iterable[tuple[str, str, Noted]]:
        for name, state in self._variables.states.items():
            if wanted(name) and state.stored is not None:
                yield "variable", name, state.noted()

    def makers(self) -> dict[str, Maker]:
        return {"variable": (VariableFacts, self._make_again)}

    def _make_again(self, brought: Brought) -> None:
        """Make a variable with its tags, or replace the first value of one."""
        facts: VariableFacts = brought.facts
        trees = {run.version: tree_of(run) for run in brought.runs}
        current = trees[facts.current]
        for tree in trees.values():
            check(tree.layout, current.layout, f"variable '{brought.key}'")
        state = self._variables.states.get(brought.key)
        if state is None:
            state = self._variables.made(brought.peer, brought.key, current, facts.bound)
        elif not state.pristine or state.version >= facts.current:
            raise SchemaError("it exists, and has been used")
        state.revive(facts.current, trees, facts.tags)
        self._variables.begin(epoch_of(facts.current) + 1)
        self._variables.rounds.defined(state)
        self._variables.committed(state.name)

    def _read(self, peer: Peer, request: m.ReadTag, frame: Frame) -> None:
        state = self._variables.variable(request.name)
        version = state.kept.tagged(request.tag)
        reply: Any = m.Value(version, b"", [])
        if version != request.have:
            tree = state.at(version)
            assert tree is not None
            reply = self._variables.lend(
                peer, state, version, tree, hold=request.hold, lean=request.lean
            )
        self._variables.tell(peer, frame.request, state, reply)

    def _read_at(self, peer: Peer, request: m.ReadAt, frame: Frame) -> None:
        state = self._variables.variable(request.name)
        tree = state.at(request.version)
        reply: Any = m.Value(m.NO_VERSION, b"", [])
        if tree is not None:
            reply = self._variables.lease(peer, state, request.version, tree)
        self._variables.tell(peer, frame.request, state, reply)

    def _tag(self, peer: Peer, request: m.Tag, frame: Frame) -> None:
        state = self._variables.variable(request.name)
        version = state.kept.tag(checked(request.tag), request.version)
        self._service.answer(peer, frame.request, m.Version(version))

    def _untag(self, peer: Peer, request: m.Untag, frame: Frame) -> None:
        freed = self._variables.variable(request.name).kept.untag(request.tag)
        self._service.answer(peer, frame.request, m.Done())
        if freed:
            self._variables.freed(request.name)

    def _tags(self, peer: Peer, request: m.Tags, frame: Frame) -> None:
        state = self._variables.variable(request.name)
        self._service.answer(peer, frame.request, m.Text(state.kept.tags))

    def _usage(self, peer: Peer, request: m.Usage, frame: Frame) -> None:
        state = self._variables.variable(request.name)
        self._service.answer(peer, frame.request, m.Text(self._used(state)))

    def _used(self, state: VariableState) -> dict[str, Any]:
        return {
            "bytes": state.kept.nbytes,
            "bound": state.kept.bound,
            "waiting": self._service.parking.waiting(("write", state.name)),
            "versions": [
                {
                    "version": kept.version,
                    "bytes": kept.nbytes,
                    "held_by": held_by(kept, holder_name),
                }
                for kept in state.kept.listing()
            ],
        }


def tree_of(run: Run) -> Stored:
    """The tree that is the one item of a run."""
    return Stored(run.head.layout, [column[0] for column in run.head.columns], run.memory)
