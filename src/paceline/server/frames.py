"""What desks take out of frames: trees, and their memory."""

from __future__ import annotations

from paceline.core import messages as m
from paceline.core.errors import ProtocolError
from paceline.core.tree import Array, are_plain, decoded
from paceline.core.waiting import Stored
from paceline.transports.base import Frame, Memory


def stored(head: m.Head, memory: Memory | None) -> Stored:
    """A tree that came with a request.

    Raises:
        ProtocolError: its memory or its plain values are not what its layout says.
    """
    plan = decoded(head.layout)
    found = 0 if memory is None else memory.nbytes
    if found != plan.nbytes:
        raise ProtocolError(f"a tree of {plan.nbytes} bytes came with {found}")
    if not are_plain(head.values, plan.plain):
        kinds = [type(value).__name__ for value in head.values[:8]]
        raise ProtocolError(f"a tree of {len(plan.plain)} plain values came with others: {kinds}")
    return Stored(head.layout, head.values, memory)


def buffer(frame: Frame, place: int) -> Memory | None:
    """The buffer at a place of a frame, which may have left out empty ones at its end."""
    return frame.buffers[place] if place < len(frame.buffers) else None


def bytes_of(tree: Stored) -> Array | None:
    """The bytes of a tree's arrays."""
    return None if tree.memory is None else tree.memory.array()
