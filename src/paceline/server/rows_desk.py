"""What a server does with rows of variables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from paceline.core import messages as m
from paceline.core.errors import ProtocolError
from paceline.core.rows import Table, table
from paceline.core.tree import Array, decoded
from paceline.core.variable_state import VariableState
from paceline.core.waiting import Stored
from paceline.server.adding import LONG_WORK
from paceline.server.frames import buffer, bytes_of, stored
from paceline.server.lines import Peer
from paceline.server.row_work import indices_of
from paceline.server.service import Desk, Finish, Handler, Service, Work, at_once
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame


class RowsDesk(Desk):
    """Rows of a server's variables, taken from the current version and added to it.

    What is done to the rows of one variable is done in the order in which it was asked for, also
    where the long work of it is done beside the loop.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._variables: VariableDesk = service.desk(VariableDesk)
        self._beside: Counter[VariableState] = Counter()
        # What was done to rows: taken, added, and how often in place or by way of a copy.
        self._done: WeakKeyDictionary[VariableState, Counter[str]] = WeakKeyDictionary()

    def handlers(self) -> dict[type, Handler]:
        return {m.Gather: self._gather, m.ScatterAdd: self._scatter_add}

    def listing(self) -> tuple[str, dict[str, Any]]:
        there = self._variables.states.items()
        return "rows", {name: self._done[state] for name, state in there if state in self._done}

    def lost(self, peer: Peer) -> None:
        """Rows belong to nobody."""

    def reset(self, gone: Callable[[str], bool]) -> None:
        """Rows go with their variables."""

    def _gather(self, peer: Peer, request: m.Gather, frame: Frame) -> None:
        what = f"gather '{request.name}'"
        state = self._variables.variable(request.name).in_one_place()
        version, tree = self._variables.current(peer, state)
        rows, indices = _found(tree, request, frame, what)
        layout = rows.rows_layout(request.shape)
        nbytes = decoded(layout).nbytes
        block = self._service.arena.allocate(nbytes) if nbytes else None

        def work() -> None:
            rows.gather(bytes_of(tree), indices, None if block is None else block.array())

        def done(error: Exception | None) -> None:
            self._count(state, gathered=indices.size)
            reply = m.Value(version, layout, []), [block]
            self._service.answer(peer, frame.request, error or reply)

        self._run(state, nbytes, work, done)

    def _scatter_add(self, peer: Peer, request: m.ScatterAdd, frame: Frame) -> None:
        what = f"scatter_add '{request.name}'"
        state = self._variables.variable(request.name).in_one_place()
        added = stored(request.head, buffer(frame, 1))
        assert state.stored is not None
        rows, indices = _found(state.stored, request, frame, what)
        rows.check_rows(added.layout, request.shape, what)
        if not indices.size:
            self._service.answer(peer, frame.request, m.Version(state.version))
            return

        def attempt() -> Any:
            return state.begin_rows(peer)

        def begun(current: Stored) -> None:
            self._add(peer, frame.request, state, request.leaf, current, indices, added)

        self._variables.in_turn(
            peer, frame, state, "scatter_add", state.stored.nbytes, request.timeout, attempt, begun
        )

    def _add(
        self,
        peer: Peer,
        number: int,
        state: VariableState,
        leaf: str | None,
        current: Stored,
        indices: Array,
        added: Stored,
    ) -> None:
        """Add in place, or to a copy that becomes the next version; the write turn ends with it."""
        rows = table(current.layout, leaf, f"scatter_add '{state.name}'")
        total = None if state.changing else Stored(current.layout, current.values, None, own=True)

        def work() -> None:
            block = bytes_of(current)
            if total is not None and block is not None:
                total.memory = self._service.arena.allocate(block.nbytes)
                np.copyto(total.memory.array(), block)
                block = total.memory.array()
            rows.scatter_add(block, indices, added.layout, bytes_of(added))

        def done(error: Exception | None) -> None:
            copied = int(total is not None)
            self._count(state, added=indices.size, copies=copied, in_place=1 - copied)
            self._variables.added(peer, number, state, total, error)

        self._run(state, added.nbytes if total is None else current.nbytes, work, done)

    def _count(self, state: VariableState, **done: int) -> None:
        self._done.setdefault(state, Counter(gathered=0, added=0, in_place=0, copies=0)).update(
            done
        )

    def _run(self, state: VariableState, nbytes: int, work: Work, done: Finish) -> None:
        """Work on so many bytes of a variable, after what is being done to its rows already."""
        if nbytes <= LONG_WORK and not self._beside[state]:
            at_once(work, done)
            return
        self._beside[state] += 1

        def ended(error: Exception | None) -> None:
            self._beside[state] -= 1
            if not self._beside[state]:
                del self._beside[state]
            done(error)

        self._service.run_long(work, ended)


def _found(
    tree: Stored, request: m.Gather | m.ScatterAdd, frame: Frame, what: str
) -> tuple[Table, Array]:
    """The table that a request means, and its indices.

    Raises:
        SchemaError: there is no such table, or no row at one of the indices.
        ProtocolError: there are more or fewer indices than their shape says.
    """
    rows = table(tree.layout, request.leaf, what)
    indices = indices_of(buffer(frame, 0))
    if indices.size != math.prod(request.shape):
        raise ProtocolError(f"{indices.size} indices came as {list(request.shape)}")
    rows.check_indices(indices, request.shape, what)
    return rows, indices
