"""Users' trees into heads and blocks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from paceline.adapters.base import convert
from paceline.core import messages as m
from paceline.core import tree as trees
from paceline.core.errors import said_of
from paceline.core.padding import stack_padded
from paceline.core.runs import FlatRun, runs
from paceline.core.stacking import Stretch, rows, stack
from paceline.core.tree import Array, Tree
from paceline.transports.base import Arena, Block, Buffers, Inline, Memory

LARGE = 1 << 20
"""Bytes from which on a version is not kept only to be found again."""

SMALL_ITEM = 4 << 10
"""Bytes of arrays up to which an item of a worker is copied once more, to share a run."""

RUN_BYTES = 256 << 10
"""Bytes of arrays up to which items share one block, which is free again when all are gone."""


def pack(arena: Arena, tree: Tree, what: str) -> tuple[m.Head, Block | None]:
    """Take a tree apart and copy its arrays, once, into memory that can be sent.

    Raises:
        SchemaError: a leaf may not travel; the message starts with `what` and has its path.
        OutOfMemory: there is no memory for it.
    """
    return pack_flat(arena, taken(tree, what))


def taken(tree: Tree, what: str) -> trees.Flat:
    """Take a tree apart; raises as `pack`, but needs no memory."""
    with said_of(what):
        return trees.flatten(tree, convert)


def pack_flat(arena: Arena, flat: trees.Flat) -> tuple[m.Head, Block | None]:
    """Copy the arrays of a tree that was taken apart; raises OutOfMemory as `pack`."""
    return m.Head(flat.layout, list(flat.values)), _written(arena, flat)


def pack_indices(arena: Arena, indices: Array) -> Block | None:
    """Copy whole numbers of 64 bits into memory that can be sent; raises OutOfMemory as `pack`."""
    if not indices.size:
        return None
    block = arena.allocate(indices.nbytes)
    np.copyto(np.frombuffer(block.view(), np.int64), indices.reshape(-1))
    return block


def pack_rows(arena: Arena, tree: Tree, n: int, what: str) -> list[tuple[m.Head, Block | None]]:
    """Take a tree apart and split it in `n` along its arrays' leading axis; raises as `pack`."""
    with said_of(what):
        parts = rows(trees.flatten(tree, convert), n)
    return [(m.Head(part.layout, list(part.values)), _written(arena, part)) for part in parts]


def pack_items(
    arena: Arena, items: Sequence[Tree], what: str, version: int
) -> list[tuple[m.RunHead, Block | None]]:
    """Take items with one stamp apart, in runs of those alike; raises as `pack`."""
    with said_of(what):
        found = runs(items, convert)
    return [
        (m.RunHead(run.layout, run.count, run.columns, version), _written(arena, run))
        for whole in found
        for run in whole.pieces(RUN_BYTES)
    ]


@dataclass(slots=True)
class Made:
    """One item, which no longer needs its maker's memory.

    The arrays of a small one are in `row`, to travel with others alike, else in `block`.
    """

    flat: trees.Flat
    version: int
    metrics: dict[str, list[float]] | None
    row: bytearray | None
    block: Block | None


def pack_item(
    arena: Arena, item: Tree, what: str, version: int, metrics: dict[str, list[float]] | None
) -> Made:
    """Take one item apart, with what was logged while it was made; raises as `pack`."""
    flat = taken(item, what)
    if flat.nbytes > SMALL_ITEM:
        return Made(flat, version, metrics, None, _written(arena, flat))
    row = bytearray(flat.nbytes)
    flat.write(memoryview(row))
    return Made(flat, version, metrics, row, None)


def pack_made(arena: Arena, made: Sequence[Made]) -> list[tuple[m.RunHead, Block | None]]:
    """The same items in runs of those that follow each other alike; raises OutOfMemory."""
    return [_joined(arena, list(alike)) for _, alike in groupby(made, _alike)]


def _alike(made: Made) -> tuple[bytes, int, int]:
    return made.flat.layout, made.version, 0 if made.block is None else id(made.block)


def _joined(arena: Arena, made: list[Made]) -> tuple[m.RunHead, Block | None]:
    first = made[0]
    columns = [list(column) for column in zip(*(each.flat.values for each in made), strict=True)]
    logged = [each.metrics or {} for each in made] if any(each.metrics for each in made) else []
    head = m.RunHead(first.flat.layout, len(made), columns, first.version, logged)
    if first.row:
        block = arena.allocate(len(first.row) * len(made))
        block.view()[:] = b"".join(each.row for each in made if each.row)
        return head, block
    return head, first.block


def memory(buffers: Buffers, place: int = 0) -> Memory | None:
    """The buffer at a place of a reply."""
    return buffers[place] if place < len(buffers) else None


def view(layout: bytes, values: Sequence[Any], memory: Memory | None) -> Tree:
    """A tree over memory as it is: its arrays are read-only and keep the memory alive."""
    return trees.unflatten(layout, values, _read_only(memory))


def copied(layout: bytes, values: Sequence[Any], memory: Memory | None) -> Tree:
    """A tree that owns its memory, which may be written."""
    block = None if memory is None else memory.array().copy()
    return trees.unflatten(layout, values, block)


def views(heads: Sequence[m.RunHead], memories: Sequence[Memory | None]) -> list[Tree]:
    """The items of runs, one by one, over their memory as it is; as `view`."""
    return [
        tree
        for head, memory in zip(heads, memories, strict=True)
        for tree in _stretch(head, _read_only(memory)).trees()
    ]


def stacked(heads: Sequence[m.RunHead], memories: Sequence[Memory | None]) -> Tree:
    """One tree with a leading axis, or a list of trees where shapes differ; it owns its memory."""
    found = _stretches(heads, memories)
    joined = stack(found)
    if joined is not None:
        return joined
    return [
        tree
        for stretch in found
        for tree in replace(
            stretch, block=None if stretch.block is None else stretch.block.copy()
        ).trees()
    ]


def stacked_with_pad(
    heads: Sequence[m.RunHead], memories: Sequence[Memory | None], pad: Any, what: str
) -> tuple[Tree, Tree]:
    """One tree with a leading axis, its arrays padded, and their true sizes; as `stack_padded`."""
    with said_of(what):
        return stack_padded(_stretches(heads, memories), pad)


def _stretches(heads: Sequence[m.RunHead], memories: Sequence[Memory | None]) -> list[Stretch]:
    return [
        _stretch(head, None if memory is None else memory.array())
        for head, memory in zip(heads, memories, strict=True)
    ]


def _stretch(head: m.RunHead, block: Array | None) -> Stretch:
    return Stretch(head.layout, head.count, head.columns, block)


def _written(arena: Arena, flat: trees.Flat | FlatRun) -> Block | None:
    if flat.nbytes == 0:
        return None
    block = arena.allocate(flat.nbytes)
    flat.write(block.view())
    return block


def _read_only(memory: Memory | None) -> Array | None:
    if memory is None:
        return None
    array: Array = memory.array()
    if isinstance(memory, Inline):
        # It begins at any byte of a frame, and NumPy is slow where numbers lie across words.
        array = array.copy()
        array.flags.writeable = False
    if array.flags.writeable:
        array = array.view(np.ndarray)
        array.flags.writeable = False
    return array
