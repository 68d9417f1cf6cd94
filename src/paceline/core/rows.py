"""Rows of tables: which of its leaves a tree has rows in, taking some rows, adding to some.

Adding goes by single numbers, `STEP` at a time, which `np.add.at` does 2.4 times as fast as rows of
64 floats; where no row comes twice, `table[i] += rows` does wide ones twice as fast again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import SchemaError
from paceline.core.tree import Array, Leaf, decoded, dtype_named, encoded, paths, views

ROOT = "$"
LISTED = 16
STEP = 1 << 16
"""Numbers that are added at a time."""

WIDE = 32
"""Numbers in a row from which on it pays to look whether a row comes twice."""


class Table(NamedTuple):
    """The leaves of a tree that are taken by rows.

    Attributes:
        layout: the tree's.
        leaf: the path of the only one; `None` for all leaves.
        paths: theirs, in order.
        numbers: which leaves of the tree they are.
        places: which arrays of the tree they are.
        length: how many rows each has.
    """

    layout: bytes
    leaf: str | None
    paths: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    numbers: tuple[int, ...]
    places: tuple[int, ...]
    length: int

    def rows_layout(self, shape: Sequence[int]) -> bytes:
        """The layout of rows at indices of that shape: of the tree's structure, or one array."""
        structure = None if self.leaf is not None else decoded(self.layout).structure
        return encoded(structure, [(leaf.kind, _rows(leaf, shape).shape) for leaf in self.leaves])

    def check_indices(self, indices: Array, shape: Sequence[int], what: str) -> None:
        """Check that there is a row at each of the indices, which have been made flat.

        Raises:
            SchemaError: there is not; the message names the first odd one, and its place.
        """
        if not indices.size or (indices.min() >= 0 and indices.max() < self.length):
            return
        odd = int(np.flatnonzero((indices < 0) | (indices >= self.length))[0])
        place = ", ".join(str(int(n)) for n in np.unravel_index(odd, tuple(shape)))
        raise SchemaError(
            f"{what}: index {indices[odd]} at [{place}] is none of leaf {self.paths[0]}, which has"
            f" {self.length} rows, from 0 on"
        )

    def check_rows(self, found: bytes, shape: Sequence[int], what: str) -> None:
        """Check that a tree has a row for each index, of the table's dtypes.

        Raises:
            SchemaError: it has not, or no sums can be made; the message names the leaf.
        """
        got = dict(zip(paths(found), decoded(found).leaves, strict=True))
        if self.leaf is not None and got.keys() == {ROOT}:
            got = {self.leaf: got[ROOT]}
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            wanted = _rows(leaf, shape)
            if path not in got:
                raise SchemaError(f"{what}: rows of leaf {path} are missing: {wanted}")
            if got[path] != wanted:
                raise SchemaError(
                    f"{what}: the rows of leaf {path} are {got[path]}, not {wanted}, as its"
                    f" indices and {leaf} make them"
                )
            if dtype_named(leaf.kind).kind not in "iufc":
                raise SchemaError(f"{what}: leaf {path} is {leaf}, which cannot be added")
        for path, leaf in got.items():
            if path not in self.paths:
                raise SchemaError(f"{what}: the rows have a leaf {path}, {leaf}, too many")

    def gather(self, block: Array | None, indices: Array, out: Array | None) -> None:
        """Copy the rows at `indices` out of a tree's block into one of `rows_layout`."""
        copies = views(decoded(self.rows_layout(indices.shape)), out)
        for table, rows in zip(self.arrays(block), copies, strict=True):
            take_rows(table, indices, rows)

    def scatter_add(
        self, block: Array | None, indices: Array, layout: bytes, rows: Array | None
    ) -> None:
        """Add rows, one after the other, to those at `indices` in a tree's block.

        They are a tree of that layout. The indices are flat and have been checked, as the rows.
        """
        added = self.given(layout, views(decoded(layout), rows))
        for table, some in zip(self.arrays(block), added, strict=True):
            add_rows(table, indices, some)

    def given(self, layout: bytes, arrays: Sequence[Array]) -> list[Array]:
        """The rows for each leaf, of the arrays of a tree of rows that was checked."""
        by_path = dict(zip(paths(layout), arrays, strict=True))
        return [by_path[path if path in by_path else ROOT] for path in self.paths]

    def arrays(self, block: Array | None) -> list[Array]:
        """Its leaves in a tree's block."""
        arrays = views(decoded(self.layout), block)
        return [arrays[place] for place in self.places]


@functools.lru_cache(maxsize=256)
def table(layout: bytes, leaf: str | None, what: str) -> Table:
    """The table that a leaf of a tree is, or all its leaves together; `what` begins messages.

    Raises:
        SchemaError: there is no such leaf, or it has no rows, or their numbers differ.
    """
    plan = decoded(layout)
    known = paths(layout)
    arrays = [number for number, one in enumerate(plan.leaves) if one.shape is not None]
    if leaf is not None and leaf not in known:
        more = f" and {len(known) - LISTED} more" if known[LISTED:] else ""
        raise SchemaError(f"{what}: there is no leaf {leaf}; there are {known[:LISTED]}{more}")
    chosen = range(len(known)) if leaf is None else [known.index(leaf)]
    if not chosen:
        raise SchemaError(f"{what}: a tree without leaves has no rows")
    lengths = []
    for number in chosen:
        shape = plan.leaves[number].shape
        if not shape:
            others = leaf is None and any(plan.leaves[other].shape for other in arrays)
            hint = "; name the leaf that is meant" if others else ""
            raise SchemaError(
                f"{what}: leaf {known[number]} is {plan.leaves[number]}, which has no rows{hint}"
            )
        lengths.append(shape[0])
    for number, length in zip(chosen, lengths, strict=True):
        if length != lengths[0]:
            raise SchemaError(
                f"{what}: leaf {known[number]} has {length} rows, leaf {known[chosen[0]]}"
                f" {lengths[0]}; name the leaf that is meant"
            )
    return Table(
        layout,
        leaf,
        tuple(known[number] for number in chosen),
        tuple(plan.leaves[number] for number in chosen),
        tuple(chosen),
        tuple(arrays.index(number) for number in chosen),
        lengths[0],
    )


def checked_indices(indices: Any, what: str) -> Array:
    """The places of rows as an array of int64, of the shape that they were given in.

    Raises:
        SchemaError: they are no whole numbers.
    """
    try:
        found = np.asarray(indices)
    except (TypeError, ValueError) as e:
        raise SchemaError(f"{what}: the indices are no array: {e}") from e
    if not found.size:
        return np.empty(found.shape, np.int64)
    if found.dtype.kind not in "iu":
        raise SchemaError(f"{what}: indices are whole numbers, not {found.dtype.name}")
    if found.dtype.kind == "u" and found.max() > np.iinfo(np.int64).max:
        raise SchemaError(f"{what}: the index {found.max()} has more than 63 bits")
    return np.ascontiguousarray(found, np.int64).reshape(found.shape)


def take_rows(table: Array, indices: Array, rows: Array) -> None:
    """Copy the rows of `table` at `indices`, which have been checked, into `rows`."""
    if rows.size:
        # NumPy would go by a copy to check them once more.
        np.take(table, indices, axis=0, out=rows, mode="clip")


def add_rows(table: Array, indices: Array, rows: Array) -> None:
    """Add `rows` [k, ...] to those of `table` [m, ...] at `indices` [k]: one after the other."""
    if not rows.size:
        return
    width = rows.size // len(indices)
    table, rows = table.reshape(-1, width), rows.reshape(-1, width)
    step = max(1, STEP // width)
    numbers = table.reshape(-1)
    columns = np.arange(width)
    with np.errstate(all="ignore"):
        for start in range(0, len(indices), step):
            some, added = indices[start : start + step], rows[start : start + step]
            if width >= WIDE and len(np.unique(some)) == len(some):
                table[some] += added
            else:
                places = (some[:, None] * width + columns).reshape(-1)
                np.add.at(numbers, places, added.reshape(-1))


def _rows(leaf: Leaf, shape: Sequence[int]) -> Leaf:
    assert leaf.shape is not None
    return Leaf(leaf.kind, (*shape, *leaf.shape[1:]))
