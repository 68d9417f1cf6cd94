"""Users' trees into heads and blocks, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.adapters.base import convert
from paceline.core import messages as m
from paceline.core import tree as trees
from paceline.core.errors import SchemaError
from paceline.core.stacking import stack
from paceline.core.tree import Array, Tree
from paceline.transports.base import Arena, Block, Memory


def pack(
    arena: Arena,
    tree: Tree,
    what: str,
    version: int = m.NO_VERSION,
    metrics: dict[str, list[float]] | None = None,
) -> tuple[m.Head, Block | None]:
    """Take a tree apart and copy its arrays, once, into memory that can be sent.

    Raises:
        SchemaError: a leaf may not travel; the message starts with `what` and has its path.
        OutOfMemory: there is no memory for it.
    """
    try:
        flat = trees.flatten(tree, convert)
    except SchemaError as e:
        raise SchemaError(f"{what}: {e}") from e
    head = m.Head(flat.layout, list(flat.values), version, metrics)
    if flat.nbytes == 0:
        return head, None
    block = arena.allocate(flat.nbytes)
    flat.write(block.view())
    return head, block


def view(layout: bytes, values: Sequence[Any], memory: Memory | None) -> Tree:
    """A tree over memory as it is: its arrays are read-only and keep the memory alive."""
    return trees.unflatten(layout, values, _read_only(memory))


def copy(layout: bytes, values: Sequence[Any], memory: Memory | None) -> Tree:
    """A tree that owns its memory, which may be written."""
    block = None if memory is None else memory.array().copy()
    return trees.unflatten(layout, values, block)


def stacked(heads: Sequence[m.Head], memories: Sequence[Memory | None]) -> Tree:
    """One tree with a leading axis, or a list of trees where shapes differ; it owns its memory."""
    parts = [
        (head.layout, head.values, None if memory is None else memory.array())
        for head, memory in zip(heads, memories, strict=True)
    ]
    joined = stack(parts)
    if joined is not None:
        return joined
    return [
        copy(head.layout, head.values, memory) for head, memory in zip(heads, memories, strict=True)
    ]


def _read_only(memory: Memory | None) -> Array | None:
    if memory is None:
        return None
    array: Array = memory.array()
    if array.flags.writeable:
        array = array.view(np.ndarray)
        array.flags.writeable = False
    return array
