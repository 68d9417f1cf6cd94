"""What the parts of a spread variable are sent, and asked for: shares of trees, and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import spreading
from paceline.core.errors import PacelineError
from paceline.core.row_pieces import Cut, cuts, rows_of
from paceline.core.rows import Table
from paceline.core.tree import Array, Flat
from paceline.packing import LARGE, memory, pack, pack_indices, view
from paceline.pending import Pending
from paceline.transports.base import Arena, Buffers, Lease


@dataclass(frozen=True, slots=True)
class Share:
    """What a write has for one part: the tree that it keeps or adds, or rows of `pieces`."""

    tree: Any
    pieces: m.Pieces | None = None
    indices: Array | None = None

    def packed(self, arena: Arena, what: str) -> tuple[m.Head, Buffers]:
        """Its tree and indices in memory that can be sent; raises as `packing.pack`."""
        head, block = pack(arena, self.tree, what)
        if self.indices is None:
            return head, [block]
        return head, [block, pack_indices(arena, self.indices)]


def row_shares(plan: m.Spreading, rows: Table, indices: Array, given: Flat) -> list[Share]:
    """What adding those rows has for each part; they and their indices, flat, were checked."""
    parts = cuts(plan, rows, indices)
    added = rows_of(rows, parts, indices.size, given)
    return [
        Share(some, [cut.piece for cut in part], _places(part))
        for part, some in zip(parts, added, strict=True)
    ]


def gathered(
    home: Connection,
    used: Mapping[str, Connection],
    name: str,
    plan: m.Spreading,
    parts: Sequence[Sequence[Cut]],
) -> tuple[int, list[list[Array]], list[str]]:
    """The newest version, the rows that each part has of it, and who has lost them.

    They are views of the servers' memory. The home keeps the version until the others have been
    asked, side by side, which have rows.
    """
    asked = [
        (n, task)
        for n, ((task, _), cut) in enumerate(zip(plan.parts, parts, strict=True))
        if n and cut
    ]
    found: list[list[Array]] = [[] for _ in parts]
    held, pending = m.NO_VERSION, list[tuple[int, str, Pending]]()
    try:
        with home.interrupts:
            first = m.GatherHome(name, [cut.piece for cut in parts[0]], bool(asked))
            value, buffers = home.exchange(
                first,
                [pack_indices(home.arena, _places(parts[0]))],
                undo=lambda reply: m.LetGo(name, reply.version),
            )
            if asked:
                held = value.version
        for n, task in asked:
            line = used[task]
            with line.interrupts:
                request = m.GatherPart(name, [cut.piece for cut in parts[n]], value.stage)
                indices = pack_indices(line.arena, _places(parts[n]))
                pending.append((n, task, line.post(request, [indices])))
        found[0] = view(value.layout, value.values, memory(buffers))
        lost = []
        for n, task, one in pending:
            reply, buffers = one.result()
            if reply.version == m.NO_VERSION:
                lost.append(task)
            else:
                found[n] = view(reply.layout, reply.values, memory(buffers))
        return value.version, found, lost
    except BaseException:
        for _, _, one in pending:
            one.forget()
        raise
    finally:
        if held != m.NO_VERSION:
            with suppress(PacelineError):
                home.tell(m.LetGo(name, held))


def fetched(
    used: Mapping[str, Connection],
    name: str,
    plan: m.Spreading,
    value: m.Value,
    buffers: Buffers,
) -> tuple[Any, int, list[str]]:
    """The whole tree, its bytes, and who has lost its part; the parts are fetched side by side."""
    tasks = [task for task, _ in plan.parts]
    pending: list[Pending] = []
    found = [(value, memory(buffers))]
    try:
        for task in tasks[1:]:
            pending.append(used[task].post(m.ReadPart(name, value.stage)))
        for one in pending:
            reply, its = one.result()
            found.append((reply, memory(its)))
    except BaseException:
        for one in pending:
            one.forget()
        raise
    lost = [
        task for task, (reply, _) in zip(tasks, found, strict=True) if reply.version == m.NO_VERSION
    ]
    if lost:
        return None, 0, lost
    nbytes = sum(block.nbytes for _, block in found if block is not None)
    shares = []
    for task, (reply, block) in zip(tasks, found, strict=True):
        if block is not None and nbytes >= LARGE:
            # Told at once that nobody looks any more, not with the next message.
            block = Lease(block, used[task].give_back)
        shares.append(view(reply.layout, reply.values, block))
    return spreading.joined(plan, shares), nbytes, []


def _places(part: Sequence[Cut]) -> Array:
    if not part:
        return np.empty(0, np.int64)
    return np.concatenate([cut.indices for cut in part])
