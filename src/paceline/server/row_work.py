"""Rows of the shares of spread variables, taken and added to beside the loop where that is long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.core.errors import ProtocolError
from paceline.core.messages.parts import Pieces
from paceline.core.row_pieces import Chosen
from paceline.core.tree import Array, decoded
from paceline.core.waiting import Stored
from paceline.server.adding import LONG_WORK
from paceline.server.frames import buffer, bytes_of
from paceline.server.service import Service, at_once
from paceline.transports.base import Frame, Memory


def indices_of(memory: Memory | None) -> Array:
    """Indices that came with a request.

    Raises:
        ProtocolError: they are no whole number of them.
    """
    if memory is None:
        return np.empty(0, np.int64)
    if memory.nbytes % 8:
        raise ProtocolError(f"indices of {memory.nbytes} bytes")
    # Small ones begin at any byte of their frame.
    return np.require(memory.array().view(np.int64), requirements="A")


def chosen_of(tree: Stored, pieces: Pieces, frame: Frame, place: int) -> Chosen:
    """Rows of a share that a request means; the indices are the buffer at that place."""
    return Chosen(tree.layout, pieces, indices_of(buffer(frame, place)))


def add_rows_beside(
    service: Service,
    current: Stored,
    chosen: Chosen,
    delta: Stored,
    done: Callable[[Stored, Exception | None], None],
) -> None:
    """As `add_beside`, of rows. Where there are none the sum is the tree, in the same memory."""
    total = Stored(current.layout, current.values, current.memory)

    def work() -> None:
        block = bytes_of(current)
        if block is None or not chosen.count:
            return
        total.memory = service.arena.allocate(block.nbytes)
        np.copyto(total.memory.array(), block)
        chosen.scatter_add(total.memory.array(), bytes_of(delta))

    long = chosen.count and current.nbytes > LONG_WORK
    (service.run_long if long else at_once)(work, lambda error: done(total, error))


def gather_beside(
    service: Service,
    tree: Stored,
    chosen: Chosen,
    done: Callable[[Memory | None, Exception | None], None],
) -> None:
    """Copy rows of a tree, which does not change meanwhile, into memory of their own."""
    nbytes = decoded(chosen.layout).nbytes
    block = service.arena.allocate(nbytes) if nbytes else None

    def work() -> None:
        chosen.gather(bytes_of(tree), None if block is None else block.array())

    long = nbytes > LONG_WORK
    (service.run_long if long else at_once)(work, lambda error: done(block, error))
