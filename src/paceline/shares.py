"""What the parts of a spread variable are sent, and asked for: shares of trees, and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from paceline.transports.base import Arena, Buffers, Lease, Memory

Copies: TypeAlias = Callable[
    [Connection, Sequence[tuple[Connection, m.ReadAt | m.ReadPart]]],
    list[tuple[m.Value, Memory | None] | None],
]
"""What servers would answer of a home's variable, from close by; `None` where it cannot say."""


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
    copies: Copies | None,
) -> tuple[Any, int, list[str]]:
    """The whole tree, its bytes, and who has lost its part; the parts are fetched side by side.

    With `copies` from there, as far as it has them.
    """
    tasks = [task for task, _ in plan.parts]
    wanted: dict[str, m.ReadAt | m.ReadPart] = {
        task: m.ReadPart(name, value.stage) for task in tasks[1:]
    }
    if not value.layout:
        wanted[tasks[0]] = m.ReadAt(name, value.version)
    had: dict[str, tuple[m.Value, Memory | None]] = {}
    near = [task for task in wanted if copies is not None and not used[task].shares_memory]
    if near and copies is not None:
        copied = copies(used[tasks[0]], [(used[task], wanted[task]) for task in near])
        had |= {task: one for task, one in zip(near, copied, strict=True) if one is not None}
    direct = {task: request for task, request in wanted.items() if task not in had}
    found = had | _asked(used, direct)
    if value.layout:
        found[tasks[0]] = value, memory(buffers)
    lost = [task for task in tasks if found[task][0].version == m.NO_VERSION]
    if lost:
        return None, 0, lost
    nbytes = sum(block.nbytes for _, block in found.values() if block is not None)
    shares = []
    for task in tasks:
        reply, block = found[task]
        if block is not None and nbytes >= LARGE and task not in had:
            # Told at once that nobody looks any more, not with the next message.
            block = Lease(block, used[task].give_back)
        shares.append(view(reply.layout, reply.values, block))
    return spreading.joined(plan, shares), nbytes, []


def _asked(
    used: Mapping[str, Connection], requests: Mapping[str, m.ReadAt | m.ReadPart]
) -> dict[str, tuple[m.Value, Memory | None]]:
    """What servers answer, asked side by side."""
    pending: dict[str, Pending] = {}
    found = {}
    try:
        for task, request in requests.items():
            pending[task] = used[task].post(request)
        for task, one in pending.items():
            reply, buffers = one.result()
            found[task] = reply, memory(buffers)
    except BaseException:
        for one in pending.values():
            one.forget()
        raise
    return found


def _places(part: Sequence[Cut]) -> Array:
    if not part:
        return np.empty(0, np.int64)
    return np.concatenate([cut.indices for cut in part])
