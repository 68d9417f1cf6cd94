"""Runs: consecutive items of one layout, taken apart together.

A run's arrays lie in one block, a row for each item; its plain values are columns, one for each
plain leaf. So what is said of the items is said once, and a single item is a run of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from paceline.core.errors import SchemaError
from paceline.core.tree import (
    MAX_DEPTH,
    PLAIN,
    Array,
    Convert,
    Flat,
    Tree,
    aligned,
    encoded,
    flatten,
    kind_of,
)

SMALL_LEAF = 4096
"""Bytes up to which arrays are joined before they are spread over the rows, in two quick steps."""


@dataclass(frozen=True, slots=True)
class FlatRun:
    """`count` trees of one layout, taken apart; `arrays` still alias the caller's memory.

    Attributes:
        columns: for each plain leaf the values of all trees.
        arrays: for each array leaf the arrays of all trees.
        row: bytes of one tree's arrays, each at its 64-byte aligned place.
    """

    layout: bytes
    count: int
    columns: list[list[Any]]
    arrays: list[Sequence[Array] | Array]
    row: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.count * self.row

    def write(self, block: memoryview) -> None:
        """Copy the arrays into `block`, `nbytes` long, a row for each tree."""
        rows = np.frombuffer(block, np.uint8).reshape(self.count, self.row)
        offset = 0
        for column in self.arrays:
            first = column[0]
            size = first.nbytes
            if not size:
                continue
            places = rows[:, offset : offset + size].view(first.dtype)
            places = places.reshape(self.count, *first.shape)
            if size <= SMALL_LEAF and self.count > 1:
                places[...] = np.asarray(column, first.dtype)
            else:
                for place, array in enumerate(column):
                    places[place, ...] = array
            offset += aligned(size)

    def pieces(self, nbytes: int) -> list[FlatRun]:
        """The run in pieces whose arrays have up to `nbytes`, or one item each."""
        most = max(1, nbytes // self.row) if self.row else self.count
        if most >= self.count:
            return [self]
        return [
            FlatRun(
                self.layout,
                min(most, self.count - start),
                [column[start : start + most] for column in self.columns],
                [column[start : start + most] for column in self.arrays],
                self.row,
            )
            for start in range(0, self.count, most)
        ]


class _Uneven(Exception):
    """The trees are not all alike, or hold what needs a closer look."""


def runs(trees: Sequence[Tree], convert: Convert | None = None) -> list[FlatRun]:
    """Take `trees` apart, as `flatten` does each, into runs of those that follow each other alike.

    Raises:
        SchemaError: a leaf may not travel; the message has its path and what is allowed.
    """
    if len(trees) > 1:
        try:
            return [_at_once(trees)]
        except (_Uneven, SchemaError):
            # One by one, they are told apart, and an error has its path.
            pass
    flats = (flatten(tree, convert) for tree in trees)
    return [joined(list(alike)) for _, alike in groupby(flats, attrgetter("layout"))]


def joined(flats: Sequence[Flat]) -> FlatRun:
    """The run of trees that were taken apart one by one, of one layout."""
    columns = [list(column) for column in zip(*(flat.values for flat in flats), strict=True)]
    arrays = list(zip(*(flat.arrays for flat in flats), strict=True))
    return FlatRun(flats[0].layout, len(flats), columns, [*arrays], flats[0].nbytes)


def _at_once(trees: Sequence[Tree]) -> FlatRun:
    """Take trees apart leaf by leaf instead of tree by tree: many times as fast for small ones."""
    leaves: list[Any] = []
    columns: list[list[Any]] = []
    arrays: list[Sequence[Array] | Array] = []
    structure = _take(list(trees), 0, leaves, columns, arrays)
    row = sum(aligned(column[0].nbytes) for column in arrays)
    return FlatRun(encoded(structure, leaves), len(trees), columns, arrays, row)


def _take(
    nodes: list[Any],
    depth: int,
    leaves: list[Any],
    columns: list[list[Any]],
    arrays: list[Sequence[Array] | Array],
) -> Any:
    kind = _same(map(type, nodes))
    if kind is np.ndarray:
        shape = _same(map(attrgetter("shape"), nodes))
        _same(map(attrgetter("dtype"), nodes))
        leaves.append((kind_of(nodes[0]), shape))
        arrays.append(nodes)
        return None
    if kind in PLAIN:
        leaves.append((_plain(kind, nodes), None))
        columns.append(nodes)
        return None
    # Of dates and texts, one kind has many dtypes.
    if issubclass(kind, np.generic) and np.dtype(kind).kind in "biufc":
        column: Array = np.array(nodes)
        leaves.append((kind_of(column), ()))
        arrays.append(column)
        return None
    if depth > MAX_DEPTH:
        raise _Uneven
    if kind is dict:
        keys = _same(map(tuple, nodes))
        if any(type(key) is not str for key in keys):
            raise _Uneven
        parts = [
            _take(list(map(itemgetter(key), nodes)), depth + 1, leaves, columns, arrays)
            for key in keys
        ]
        return ("d", keys, parts)
    if kind is list or kind is tuple:
        _same(map(len, nodes))
        parts = [
            _take(list(part), depth + 1, leaves, columns, arrays)
            for part in zip(*nodes, strict=True)
        ]
        return ("l" if kind is list else "t", parts)
    raise _Uneven


def _plain(kind: type, nodes: list[Any]) -> str:
    """The name of a plain kind, if all of these may travel."""
    if kind is int and (min(nodes) < -(1 << 63) or max(nodes) >= 1 << 63):
        raise _Uneven
    if kind is str and not all(map(str.isascii, nodes)):
        try:
            "".join(nodes).encode()
        except UnicodeEncodeError:
            raise _Uneven from None
    return PLAIN[kind]


def _same(found: Any) -> Any:
    """The one thing that all of them are."""
    different = set(found)
    if len(different) != 1:
        raise _Uneven
    return different.pop()
