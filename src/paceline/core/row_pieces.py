"""Rows of trees that lie on several servers: what a request has for each part, and what it does.

A request names *pieces*: an array of a part's share, by its path there, and how many rows of it.
The rows' places in these arrays come one after the other, in one array; rows are a list, one for
each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core import spreading
from paceline.core.errors import ProtocolError
from paceline.core.messages.parts import Pieces
from paceline.core.messages.replies import Spreading
from paceline.core.rows import Table, add_rows, table, take_rows
from paceline.core.tree import (
    Array,
    Flat,
    Leaf,
    Tree,
    child,
    decoded,
    encoded,
    unflatten,
    views,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """Those rows of a request that lie in one array of one part.

    Attributes:
        path: the array's in its share.
        number: which of the table's leaves it is of.
        chosen: which of the request's rows they are; `None` for all.
        indices: their places in that array.
    """

    path: str
    number: int
    chosen: Array | None
    indices: Array

    @property
    def piece(self) -> tuple[str, int]:
        """What a request names."""
        return self.path, len(self.indices)

    def of(self, rows: Array) -> Array:
        """Those of the request's rows."""
        return rows if self.chosen is None else rows[self.chosen]


def cuts(plan: Spreading, rows: Table, indices: Array) -> list[list[Cut]]:
    """Where the rows at `indices`, flat and checked, lie: for each part, in the request's order."""
    numbers = {leaf: place for place, leaf in enumerate(rows.numbers)}
    found: list[list[Cut]] = []
    for _, pieces in plan.parts:
        part: list[Cut] = []
        for n, first, last in pieces:
            if n not in numbers:
                continue
            number = numbers[n]
            path = child("$", spreading.name(rows.paths[number], first, last))
            if last == spreading.WHOLE:
                chosen, places = None, indices
            else:
                chosen = np.flatnonzero((indices >= first) & (indices < last))
                places = indices[chosen] - first
            if places.size:
                part.append(Cut(path, number, chosen, places))
        found.append(part)
    return found


def joined(
    rows: Table,
    shape: Sequence[int],
    parts: Sequence[Sequence[Cut]],
    found: Sequence[Sequence[Array]],
) -> Tree:
    """The tree of rows, for indices of that shape, of what each part has sent; in new memory."""
    layout = rows.rows_layout(shape)
    block = np.empty(decoded(layout).nbytes, np.uint8)
    flat = views(decoded(rows.rows_layout((math.prod(shape),))), block)
    for part, arrays in zip(parts, found, strict=True):
        for cut, array in zip(part, arrays, strict=True):
            flat[cut.number][slice(None) if cut.chosen is None else cut.chosen] = array
    return unflatten(layout, [], block)


def rows_of(
    rows: Table, parts: Sequence[Sequence[Cut]], count: int, given: Flat
) -> list[list[Array]]:
    """What is added at each part, of rows that were checked: a list, one for each piece."""
    flat = [
        some.reshape(count, *(leaf.shape or ())[1:])
        for some, leaf in zip(rows.given(given.layout, given.arrays), rows.leaves, strict=True)
    ]
    return [[cut.of(flat[cut.number]) for cut in part] for part in parts]


class Chosen:
    """Rows of a part's share, as a request names them.

    Raises:
        ProtocolError, SchemaError: they are not there; who asked has cut them otherwise.
    """

    def __init__(self, layout: bytes, pieces: Pieces, indices: Array) -> None:
        if sum(count for _, count in pieces) != indices.size:
            raise ProtocolError(f"{indices.size} indices came for {list(pieces)}")
        self.count = indices.size
        """How many rows they are."""
        self._found: list[tuple[Table, Array]] = []
        leaves: list[Leaf] = []
        begin = 0
        for path, count in pieces:
            rows, some = table(layout, path, "rows"), indices[begin : begin + count]
            rows.check_indices(some, (count,), "rows")
            self._found.append((rows, some))
            leaves += decoded(rows.rows_layout((count,))).leaves
            begin += count
        structure = ("l", [None] * len(leaves))
        self.layout = encoded(structure, [(leaf.kind, leaf.shape) for leaf in leaves])
        """That of a list of the rows of each piece."""

    def check_rows(self, layout: bytes) -> None:
        """Check that a list has rows for each piece.

        Raises:
            ProtocolError: it has not.
        """
        if layout != self.layout:
            raise ProtocolError("the rows that came are not like those of their pieces")

    def gather(self, block: Array | None, out: Array | None) -> None:
        """Copy the rows out of a share's block into one of `layout`."""
        for (rows, indices), copy in zip(
            self._found, views(decoded(self.layout), out), strict=True
        ):
            take_rows(rows.arrays(block)[0], indices, copy)

    def scatter_add(self, block: Array | None, added: Array | None) -> None:
        """Add the rows of a block of `layout` to those in a share's block."""
        for (rows, indices), some in zip(
            self._found, views(decoded(self.layout), added), strict=True
        ):
            add_rows(rows.arrays(block)[0], indices, some)
