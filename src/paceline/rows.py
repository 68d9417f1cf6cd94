"""Rows of variables, taken and added to without moving the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import versions
from paceline.core.names import quoted
from paceline.core.rows import checked_indices
from paceline.core.tree import Array
from paceline.packing import copied, memory, pack
from paceline.transports.base import Block

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """Rows of one version, copied: the arrays own their memory and may be written."""

    version: int
    tree: T

    @property
    def count(self) -> int:
        """How many writes its epoch has had up to this version; messages show this number."""
        return versions.count_of(self.version)

    def __repr__(self) -> str:
        return f"<Rows of version {self.count}>"


def gather(connection: Connection, key: str, indices: Any, leaf: str | None) -> Rows[Any]:
    """The rows at `indices`; see `Variable.gather`."""
    places = checked_indices(indices, f"gather {quoted(key)}")
    with connection.interrupts:
        request = m.Gather(key, leaf, places.shape)
        found, buffers = connection.exchange(request, [_block(connection, places)])
        tree = copied(found.layout, found.values, memory(buffers))
        del buffers
        connection.give_back()
    return Rows(found.version, tree)


def scatter_add(
    connection: Connection,
    key: str,
    indices: Any,
    rows: Any,
    leaf: str | None,
    limit: float | None,
    *,
    bounded: bool,
) -> int:
    """Add `rows` to those at `indices`; see `Variable.scatter_add`."""
    what = f"scatter_add {quoted(key)}"
    places = checked_indices(indices, what)
    with connection.interrupts:
        head, block = pack(connection.arena, rows, what)
        # Without a bound it waits for nothing but additions in hand.
        request = m.ScatterAdd(key, leaf, places.shape, head, limit if bounded else None)
        buffers = [_block(connection, places), block]
        return connection.call(request, buffers, limit if bounded else 0.0).version


def _block(connection: Connection, places: Array) -> Block | None:
    if not places.size:
        return None
    block = connection.arena.allocate(places.nbytes)
    np.copyto(np.frombuffer(block.view(), np.int64), places.reshape(-1))
    return block
