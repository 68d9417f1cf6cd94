"""Trees joined along a new leading axis, and taken apart along it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from paceline.core.errors import SchemaError
from paceline.core.tree import (
    Array,
    Flat,
    Layout,
    Leaf,
    Tree,
    build,
    decoded,
    encoded,
    paths,
    unflatten,
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """`count` taken-apart trees of one layout: columns of plain values, and rows of arrays."""

    layout: bytes
    count: int
    columns: Sequence[Sequence[Any]]
    block: Array | None

    def trees(self) -> Iterator[Tree]:
        """One tree after the other; arrays are views of the block, sharing its flags."""
        row = 0 if self.block is None else self.block.nbytes // self.count
        for place in range(self.count):
            values = [column[place] for column in self.columns]
            start = place * row
            part = None if self.block is None else self.block[start : start + row]
            yield unflatten(self.layout, values, part)


def stack(stretches: Sequence[Stretch]) -> Tree | None:
    """Join `n` taken-apart trees into one whose leaves gain a leading axis of length `n`.

    Leaves `[*shape]` become `[n, *shape]`, same dtype; numbers and bools become arrays `[n]`; other
    plain values become lists of length `n`. The result owns new memory. `None` when layouts differ.
    """
    layout = stretches[0].layout
    if any(stretch.layout != layout for stretch in stretches):
        return None
    plan = decoded(layout)
    n = sum(stretch.count for stretch in stretches)
    rows = [
        None if stretch.block is None else stretch.block.reshape(stretch.count, -1)
        for stretch in stretches
    ]
    made = []
    for dtype, shape, offset, size in plan.places:
        joined: Array = np.empty((n, *shape), dtype)
        if size:
            raw = joined.reshape(-1).view(np.uint8).reshape(n, size)
            start = 0
            for part in rows:
                assert part is not None
                raw[start : start + len(part)] = part[:, offset : offset + size]
                start += len(part)
        made.append(joined)
    columns = columns_of(plan, stretches)
    return build(plan, columns, made)


def rows(flat: Flat, n: int) -> list[Flat]:
    """Split a taken-apart tree along the leading axis, `n` long, of all its arrays.

    Plain values are in each. The arrays are views.

    Raises:
        SchemaError: a leaf has no such axis; the message has its path.
    """
    plan = decoded(flat.layout)
    leaves = []
    for path, (kind, shape) in zip(paths(flat.layout), plan.leaves, strict=True):
        if shape is not None and shape[:1] != (n,):
            raise SchemaError(
                f"leaf {path} is {Leaf(kind, shape)}, wanted is a leading axis of {n}, a row for"
                " each call"
            )
        leaves.append((kind, None if shape is None else shape[1:]))
    layout = encoded(plan.structure, leaves)
    nbytes = decoded(layout).nbytes
    return [
        Flat(layout, flat.values, [array[place, ...] for array in flat.arrays], nbytes)
        for place in range(n)
    ]


def columns_of(plan: Layout, stretches: Sequence[Stretch]) -> list[Any]:
    """What becomes of the plain leaves: arrays `[n]` of numbers and bools, else lists of `n`."""
    kinds = [leaf.kind for leaf in plan.leaves if leaf.shape is None]
    parts = zip(*(stretch.columns for stretch in stretches), strict=True)
    return [_column(kind, list(chain(*part))) for kind, part in zip(kinds, parts, strict=True)]


def row(layout: bytes, joined: Tree, place: int) -> Tree:
    """One of the trees that `stack` joined; its arrays are views of the joined ones."""
    plan = decoded(layout)
    return _row(plan.structure, iter(plan.leaves), joined, place)


def _row(structure: Any, leaves: Any, joined: Any, place: int) -> Tree:
    if structure is None:
        if next(leaves).shape is not None:
            return joined[place, ...]
        return joined[place] if isinstance(joined, list) else joined[place].item()
    if structure[0] == "d":
        parts = zip(structure[1], structure[2], strict=True)
        return {key: _row(part, leaves, joined[key], place) for key, part in parts}
    made = [_row(part, leaves, joined[i], place) for i, part in enumerate(structure[1])]
    return made if structure[0] == "l" else tuple(made)


def _column(kind: str, values: list[Any]) -> Any:
    return np.array(values) if kind in ("bool", "int", "float") else values
