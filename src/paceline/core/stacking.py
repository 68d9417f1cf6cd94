"""Trees joined along a new leading axis, and taken apart along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.tree import Array, Tree, build, decoded


def stack(trees: Sequence[tuple[bytes, Sequence[Any], Array | None]]) -> Tree | None:
    """Join `n` taken-apart trees into one whose leaves gain a leading axis of length `n`.

    Leaves `[*shape]` become `[n, *shape]`, same dtype; numbers and bools become arrays `[n]`; other
    plain values become lists of length `n`. The result owns new memory. `None` when layouts differ.
    """
    layout = trees[0][0]
    if any(other[0] != layout for other in trees):
        return None
    plan = decoded(layout)
    made = []
    for dtype, shape, offset, size in plan.places:
        joined: Array = np.empty((len(trees), *shape), dtype)
        if size:
            raw = joined.reshape(-1).view(np.uint8).reshape(len(trees), size)
            for row, (_, _, block) in zip(raw, trees, strict=True):
                assert block is not None
                row[:] = block[offset : offset + size]
        made.append(joined)
    columns = [_column(column) for column in zip(*(values for _, values, _ in trees), strict=True)]
    return build(plan.structure, iter(plan.leaves), iter(columns), iter(made))


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


def _column(column: tuple[Any, ...]) -> Any:
    if all(type(value) in (bool, int, float) for value in column):
        return np.array(column)
    return list(column)
