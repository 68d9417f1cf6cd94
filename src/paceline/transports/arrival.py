"""Where a frame's inline bytes arrive: each large buffer straight in the memory that keeps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.errors import OutOfMemory
from paceline.transports.base import SMALL, Arena, Block, Frame, Inline, Memory

STEP = 64 << 20
"""Bytes that memory is taken for before they arrive; of a larger buffer it is taken in steps."""

GROUP = 1 << 16
SCRAP = 1 << 20


class Arrival:
    """The buffers of one frame, filled in the order in which they come.

    A peer that announces much and sends little gets little: memory is taken for one buffer after
    the other. Where there is none, the rest is read and thrown away, and the frame arrives with the
    error instead of its buffers.
    """

    def __init__(self, frame: Frame, sizes: Sequence[int], arena: Arena) -> None:
        self.frame = frame
        self.missing = sum(sizes)
        self._sizes = deque(sizes)
        self._arena = arena
        self._buffers: list[Memory | None] = []
        self._block: Block | None = None
        self._view = memoryview(b"")
        self._filled = 0
        if not self.missing:
            self._end()

    def room(self) -> memoryview:
        """Where the next bytes go; not empty while some are missing."""
        if self.frame.error is not None:
            return self._view[: self.missing]
        try:
            if self._filled == len(self._view):
                self._next()
            end = min(len(self._view), self._filled + STEP)
            if self._block is not None:
                self._block.reserve(end)
        except OutOfMemory as e:
            self.frame.error = e
            self._buffers.clear()
            self._block = None
            self._view = memoryview(bytearray(SCRAP))
            return self.room()
        return self._view[self._filled : end]

    def took(self, nbytes: int) -> None:
        """The first `nbytes` of the room are filled."""
        self.missing -= nbytes
        if self.frame.error is not None:
            return
        self._filled += nbytes
        if not self.missing:
            self._end()

    def take(self, data: memoryview) -> None:
        """Copy bytes that were read together with what came before them."""
        while data:
            room = self.room()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.took(size)
            data = data[size:]

    def _next(self) -> None:
        """Make room for the next large buffer, or for the small ones up to it."""
        self._view = memoryview(b"")
        self._block = None
        self._filled = 0
        while self._sizes[0] == 0:
            self._sizes.popleft()
            self._buffers.append(None)
        if self._sizes[0] > SMALL:
            self._block = self._arena.announced(self._sizes[0])
            self._view = self._block.view()
            self._buffers.append(self._block)
            self._sizes.popleft()
            return
        small = []
        total = 0
        while self._sizes and self._sizes[0] <= SMALL and total < GROUP:
            small.append(self._sizes.popleft())
            total += small[-1]
        self._view = memoryview(bytearray(total))
        place = 0
        for size in small:
            part = self._view[place : place + size].toreadonly()
            self._buffers.append(Inline(part) if size else None)
            place += size

    def _end(self) -> None:
        self.frame.buffers = [*self._buffers, *[None] * len(self._sizes)]
        self._view = memoryview(b"")
