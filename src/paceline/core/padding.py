"""Trees whose arrays differ in size, joined along a new leading axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.bfloat16 import is_bfloat16
from paceline.core.errors import SchemaError
from paceline.core.stacking import Stretch, columns_of
from paceline.core.tree import Array, Tree, build, decoded, paths


def stack_padded(stretches: Sequence[Stretch], pad: Any) -> tuple[Tree, Tree]:
    """Join `n` trees that differ in their arrays' sizes alone; and the sizes.

    Leaves `[*shape]` become `[n, *largest]`, same dtype, padded with `pad` at the end of every
    axis; plain leaves become what `stack` makes of them. The second tree has int64 `[n, rank]` for
    each array, the item's own sizes, and `None` for each plain leaf. Both own new memory.

    Raises:
        SchemaError: the structure, a dtype or a rank differs, or `pad` is no value of a dtype; the
            message names the first odd leaf.
    """
    first = stretches[0].layout
    for layout in {stretch.layout: None for stretch in stretches}:
        _check_alike(layout, first)
    plan = decoded(first)
    named = zip(paths(first), plan.leaves, strict=True)
    names = [path for path, leaf in named if leaf.shape is not None]
    counts = [stretch.count for stretch in stretches]
    parts = zip(*map(_arrays, stretches), strict=True)
    made, sizes = [], []
    for path, arrays in zip(names, parts, strict=True):
        shapes = np.array([array.shape[1:] for array in arrays], np.int64)
        made.append(_joined(arrays, shapes.max(axis=0).tolist(), pad, path))
        sizes.append(np.repeat(shapes, counts, axis=0))
    columns = columns_of(plan, stretches)
    nothing = [None] * len(columns)
    return (
        build(plan, columns, made),
        build(plan, nothing, sizes),
    )


def _arrays(stretch: Stretch) -> list[Array]:
    """For each array leaf the arrays of all trees, `[count, *shape]`, as views of the block."""
    count = stretch.count
    rows = None if stretch.block is None else stretch.block.reshape(count, -1)
    made: list[Array] = []
    for dtype, shape, offset, size in decoded(stretch.layout).places:
        if size and rows is not None:
            made.append(rows[:, offset : offset + size].view(dtype).reshape(count, *shape))
        else:
            made.append(np.empty((count, *shape), dtype))
    return made


def _joined(arrays: Sequence[Array], largest: list[int], pad: Any, path: str) -> Array:
    dtype = arrays[0].dtype
    joined: Array = np.empty((sum(map(len, arrays)), *largest), dtype)
    if any(array.shape[1:] != joined.shape[1:] for array in arrays):
        _fill(joined, pad, path)
    start = 0
    for array in arrays:
        stop = start + len(array)
        joined[(slice(start, stop), *map(slice, array.shape[1:]))] = array
        start = stop
    return joined


def _fill(joined: Array, pad: Any, path: str) -> None:
    dtype = joined.dtype
    if dtype.names and is_bfloat16(dtype):
        # Its value's upper half; without `ml_dtypes` it is bits.
        bits = np.float32(pad).view(np.uint32) + np.uint32(0x8000)
        joined["bfloat16"] = 0 if pad == 0 else bits >> np.uint32(16)
        return
    if dtype.kind not in "biufc" and not is_bfloat16(dtype):
        raise SchemaError(f"leaf {path} is {dtype.name}")
    if dtype.kind == "b" and pad not in (0, 1):
        raise SchemaError(f"leaf {path} is bool")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if not math.isfinite(pad) or pad != int(pad) or not bounds.min <= pad <= bounds.max:
            raise SchemaError(f"leaf {path} is {dtype.name}")
        pad = int(pad)
    joined[...] = pad


def _check_alike(layout: bytes, first: bytes) -> None:
    """Check that two layouts differ in sizes alone."""
    found = dict(zip(paths(layout), decoded(layout).leaves, strict=True))
    wanted = dict(zip(paths(first), decoded(first).leaves, strict=True))
    for path in [*wanted, *found]:
        one, other = found.get(path), wanted.get(path)
        if one is None or other is None or one.kind != other.kind or _rank(one) != _rank(other):
            raise SchemaError(
                f"leaf {path} is {one or 'missing'}, in the first item {other or 'missing'}:"
                " padding makes up for sizes alone"
            )
    if decoded(layout).structure != decoded(first).structure:
        raise SchemaError("the items have their parts in another order, or in other containers")


def _rank(leaf: Any) -> int:
    return -1 if leaf.shape is None else len(leaf.shape)


def unpadded(item: Tree, shapes: Tree, place: int) -> Tree:
    """An item of a padded batch in its own sizes; its arrays are views."""
    if isinstance(item, dict):
        return {key: unpadded(part, shapes[key], place) for key, part in item.items()}
    if isinstance(item, (list, tuple)):
        parts = zip(item, shapes, strict=True)
        return type(item)([unpadded(part, sizes, place) for part, sizes in parts])
    return item if shapes is None else item[tuple(map(slice, shapes[place]))]
