"""Shared memory without names: sealed segments that the kernel frees with their last process."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import socket
import sys
import tempfile
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

from paceline.core.errors import OutOfMemory, ProtocolError
from paceline.core.tree import Array
from paceline.transports.base import SMALL, Arena, Block, HeapBlock, Memory

LARGE = 1 << 20
SLAB = 4 << 20
SPARE_SEGMENTS = 4
RESERVED_AT_ONCE = 64 << 20
"""Bytes for which memory is taken when they are announced; more is taken as they come."""

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
# Python's mapping keeps a second descriptor open, where it cannot be told not to.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_numbers = itertools.count(1)


class Segment:
    """Memory that several processes map; `uid` names it within this process."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        self.uid = next(_numbers)
        self.fd = fd
        self.nbytes = nbytes
        self.writable = writable
        self.reserved = nbytes
        """How many of its first bytes are really there."""
        self._bytes: Array | None = None
        self._address = 0

    @classmethod
    def create(cls, nbytes: int, reserved: int | None = None) -> Segment:
        """Make a segment whose memory, or the first `reserved` bytes of it, is really there.

        Raises:
            OutOfMemory: it is not to be had; the message has the numbers.
        """
        available = memory_available()
        if nbytes > available:
            raise OutOfMemory(
                f"shared memory of {nbytes} bytes was asked for; {available} are available to this"
                " process (the machine's free memory, or its control group's limit)"
            )
        try:
            fd = _nameless(nbytes, nbytes if reserved is None else reserved)
        except OSError as e:
            raise OutOfMemory(
                f"no shared memory of {nbytes} bytes: {e.strerror}; {available} bytes of memory are"
                f" available, {descriptors()}"
            ) from e
        made = cls(fd, nbytes, writable=True)
        made.reserved = nbytes if reserved is None else reserved
        return made

    def reserve(self, nbytes: int) -> None:
        """Take memory up to the first `nbytes`.

        Raises:
            OutOfMemory: it is not to be had.
        """
        if nbytes <= self.reserved:
            return
        if nbytes - self.reserved > memory_available():
            raise OutOfMemory(f"no shared memory for {nbytes} of {self.nbytes} bytes that come")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, self.reserved, nbytes - self.reserved)
        except OSError as e:
            raise OutOfMemory(
                f"no shared memory for {nbytes} of {self.nbytes} bytes that come: {e.strerror}"
            ) from e
        self.reserved = nbytes

    @classmethod
    def received(cls, fd: int, nbytes: int) -> Segment:
        """Take over a descriptor from a peer, which can neither shrink nor lie about it.

        Raises:
            ProtocolError: it is smaller than said, its memory is not all there, or it could be
            truncated under its readers.
        """
        found = os.fstat(fd)
        size = found.st_size
        if not 0 < nbytes <= size:
            os.close(fd)
            raise ProtocolError(f"a segment of {size} bytes was sent as one of {nbytes}")
        if hasattr(fcntl, "F_GET_SEALS"):
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & _SEALS != _SEALS:
                os.close(fd)
                raise ProtocolError("a segment was sent that is not sealed against shrinking")
            # Or whoever reads it would have to find the memory.
            if found.st_blocks * 512 < nbytes:
                os.close(fd)
                raise ProtocolError(
                    f"a segment of {nbytes} bytes was sent with {found.st_blocks * 512} in memory"
                )
        return cls(fd, nbytes, writable=False)

    def bytes(self) -> Array:
        """All of it as uint8, mapped when first asked for; read-only unless made here."""
        if self._bytes is None:
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            flags = mmap.MAP_SHARED | (_POPULATE if self.reserved == self.nbytes else 0)
            try:
                mapped = mmap.mmap(self.fd, self.nbytes, flags=flags, prot=prot, **_UNTRACKED)
            except OSError as e:
                raise OutOfMemory(
                    f"cannot map {self.nbytes} bytes: {e.strerror}; {descriptors()}"
                ) from e
            self._bytes = np.frombuffer(mapped, np.uint8)
            self._address = self._bytes.ctypes.data
        return self._bytes

    def address(self) -> int:
        """Where it is mapped in this process."""
        if self._bytes is None:
            self.bytes()
        return self._address

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


class Released(deque[int]):
    """Pins that are no longer held, of one connection.

    What is still held of it has this object too: the last to go hangs up a `line` that was left
    open for that long.
    """

    line: socket.socket | None = None

    def __del__(self) -> None:
        if self.line is not None:
            self.line.close()


class Pinned(Memory):
    """A part of a peer's segment. The peer does not reuse it while this object or a view lives."""

    __slots__ = ("_address", "nbytes", "offset", "pin", "released", "segment")

    def __init__(
        self, segment: Segment, offset: int, nbytes: int, pin: int, released: Released
    ) -> None:
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.pin = pin
        self.released = released

    def array(self) -> Array:
        # The root of every view is this object itself, so the pin lasts as long as any view,
        # whatever framework holds it.
        self._address = self.segment.address() + self.offset
        return np.asarray(self)

    def lasting(self) -> Array:
        return self.segment.bytes()[self.offset : self.offset + self.nbytes]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self._address, True),
        }

    def __del__(self) -> None:
        self.released.append(self.pin)


class SharedBlock(Block):
    """A block in a segment of this process; its room is used again when nobody holds it."""

    __slots__ = ("_arena", "nbytes", "offset", "room", "segment")

    def __init__(
        self, arena: SharedArena, segment: Segment, offset: int, nbytes: int, room: int
    ) -> None:
        self._arena = arena
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.room = room

    def view(self) -> memoryview:
        return memoryview(self.segment.bytes().data)[self.offset : self.offset + self.nbytes]

    def array(self) -> Array:
        return self.segment.bytes()[self.offset : self.offset + self.nbytes]

    def reserve(self, nbytes: int) -> None:
        # With its last byte the rest of the room too, so that it can be used again.
        self.segment.reserve(self.offset + (self.room if nbytes == self.nbytes else nbytes))

    def __del__(self) -> None:
        self._arena.give_back(self.segment, self.offset, self.room)


class SharedArena(Arena):
    """Blocks of shared memory: size classes with free lists in slabs; a large one has its segment.

    A freed large segment is kept for the next of its size, at most `SPARE_SEGMENTS` of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Blocks come back from finalisers, which run anywhere, also inside this class.
        self._back: deque[tuple[Segment, int, int]] = deque()
        self._free: dict[int, list[tuple[Segment, int]]] = {}
        self._spare: list[Segment] = []
        self._slab: Segment | None = None
        self._used = 0
        self._closed = False

    def allocate(self, nbytes: int) -> Block:
        if nbytes <= SMALL:
            return HeapBlock(nbytes)
        room = size_class(nbytes)
        with self._lock:
            self._collect()
            if room > LARGE:
                return SharedBlock(
                    self, self._spare_of(room) or Segment.create(room), 0, nbytes, room
                )
            free = self._free.get(room)
            if free:
                segment, offset = free.pop()
            else:
                segment, offset = self._carve(room)
            return SharedBlock(self, segment, offset, nbytes, room)

    def announced(self, nbytes: int) -> Block:
        room = size_class(nbytes)
        if room <= RESERVED_AT_ONCE:
            return self.allocate(nbytes)
        with self._lock:
            self._collect()
            segment = self._spare_of(room) or Segment.create(room, reserved=0)
            return SharedBlock(self, segment, 0, nbytes, room)

    def give_back(self, segment: Segment, offset: int, room: int) -> None:
        """A block is no longer held by anybody."""
        if not self._closed:
            self._back.append((segment, offset, room))

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._back.clear()
            self._free.clear()
            self._spare.clear()
            self._slab = None

    def _collect(self) -> None:
        while self._back:
            segment, offset, room = self._back.popleft()
            if segment.reserved < segment.nbytes:
                # The peer that announced so much has left.
                continue
            if room > LARGE:
                self._spare.append(segment)
                del self._spare[:-SPARE_SEGMENTS]
            else:
                self._free.setdefault(room, []).append((segment, offset))

    def _spare_of(self, room: int) -> Segment | None:
        fitting = [s for s in self._spare if room <= s.nbytes <= 2 * room]
        if not fitting:
            return None
        best = min(fitting, key=lambda s: s.nbytes)
        self._spare.remove(best)
        return best

    def _carve(self, room: int) -> tuple[Segment, int]:
        if self._slab is None or self._used + room > self._slab.nbytes:
            self._slab = Segment.create(SLAB)
            self._used = 0
        offset = self._used
        self._used += room
        return self._slab, offset


def size_class(nbytes: int) -> int:
    """The room a block gets: `nbytes` rounded up to an eighth of its power of two, in pages."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return (nbytes + step - 1) // step * step


def memory_available() -> int:
    """Bytes this process may still use: the machine's, or what its control group leaves."""
    # Known even where no descriptor is left to look closer.
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration, ValueError), open("/proc/meminfo") as lines:
        line = next(line for line in lines if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            available = min(available, max(0, int(limit.read()) - int(used.read())))
    return available


def descriptors() -> str:
    """How many descriptors are open and allowed, as part of a message."""
    limit = os.sysconf("SC_OPEN_MAX")
    with suppress(OSError):
        return f"{len(os.listdir('/proc/self/fd'))} of {limit} file descriptors are open"
    return f"{limit} file descriptors are allowed"


def _nameless(nbytes: int, reserved: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        # Elsewhere than on Linux: a file without a name.
        fd, path = tempfile.mkstemp(prefix="paceline")
        os.unlink(path)
    try:
        os.ftruncate(fd, nbytes)
        if reserved and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, reserved)
        if hasattr(fcntl, "F_ADD_SEALS"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
