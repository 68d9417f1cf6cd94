"""Blocks in this process's own memory, of which that of large ones is used again.

Memory that the kernel has to find and to clear costs more than the bytes cost on their way through
a socket, and the more the larger it is.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from paceline.core.errors import OutOfMemory
from paceline.core.tree import Array
from paceline.transports.base import Block, HeapArena

LARGE = 4 << 20
"""Bytes from which on a block has memory of its own; the C library keeps what smaller ones have."""

SPARE = 2

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_FREE = getattr(mmap, "MADV_FREE", None)


class KeptBlock(Block):
    """A block in a mapping; the arena has that again when neither this nor a view is left."""

    __slots__ = ("_address", "_arena", "_mapped", "nbytes")

    def __init__(self, arena: KeptArena, mapped: mmap.mmap, nbytes: int) -> None:
        self._arena = arena
        self._mapped = mapped
        self.nbytes = nbytes
        self._address = np.frombuffer(mapped, np.uint8).ctypes.data

    def view(self) -> memoryview:
        return memoryview(self.array().data)

    def array(self) -> Array:
        # The root of every view is this object, as for any memory that is used again.
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self._address, False),
        }

    def __del__(self) -> None:
        self._arena.give_back(self._mapped)


class KeptArena(HeapArena):
    """Keeps the memory of a few large blocks that nobody looks at any more.

    The kernel may have it back at any time, as if it were free, so it is in nobody's way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Blocks come back from finalisers, which run anywhere, also inside this class.
        self._back: deque[mmap.mmap] = deque(maxlen=SPARE)
        self._spare: list[mmap.mmap] = []
        self._closed = False

    def allocate(self, nbytes: int) -> Block:
        if nbytes < LARGE:
            return super().allocate(nbytes)
        mapped = self._spare_of(nbytes)
        try:
            return KeptBlock(self, _memory(nbytes) if mapped is None else mapped, nbytes)
        except (OSError, MemoryError, OverflowError) as e:
            raise OutOfMemory(f"no memory of {nbytes} bytes for this process") from e

    def give_back(self, mapped: mmap.mmap) -> None:
        """A block is no longer held by anybody."""
        if self._closed:
            return
        if _FREE is not None:
            with suppress(OSError):
                mapped.madvise(_FREE)
        self._back.append(mapped)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._back.clear()
            self._spare.clear()

    def _spare_of(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            while self._back:
                self._spare.append(self._back.popleft())
            del self._spare[:-SPARE]
            fitting = [one for one in self._spare if nbytes <= len(one) <= 2 * nbytes]
            if not fitting:
                return None
            best = min(fitting, key=len)
            self._spare.remove(best)
            return best


def _memory(nbytes: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        with suppress(OSError):
            mapped.madvise(_HUGE)
    return mapped
