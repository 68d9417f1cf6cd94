"""What a transport is: channels that carry frames, each a header and a list of buffers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from paceline.core.errors import (
    Disconnected,
    OutOfMemory,
    PacelineError,
    UnknownName,
    Unsupported,
)
from paceline.core.tree import Array
from paceline.transports.interrupts import Interrupts

# Smaller buffers travel beside the header: cheaper than to say where they are.
SMALL = 8 << 10

UNREAD_LIMIT = 120.0
"""Seconds without a byte taken after which a server ends a connection: its process may be busy."""

TRANSPORTS = {
    "memory": "paceline.transports.memory",
    "tcp": "paceline.transports.tcp",
    "unix": "paceline.transports.unix",
}


MOST = 1 << 20
"""Bytes that one call takes from a socket, or after which it begins no more."""

NEAR = "near"
"""Addresses of servers on any hosts, whose own host reaches them in a nearer way."""


class Memory(ABC):
    """Bytes that can be looked at, kept and sent on, for as long as this object lives."""

    __slots__ = ("__weakref__",)
    nbytes: int

    @abstractmethod
    def array(self) -> Array:
        """The bytes as uint8; read-only unless they were allocated here. Views keep them alive."""

    def lasting(self) -> Array:
        """The same where the owner never uses them for anything else: views hold nothing up."""
        return self.array()

    def part(self, offset: int, nbytes: int) -> Memory:
        """A part of it, which keeps all of it alive."""
        return Part(self, offset, nbytes)


class Part(Memory):
    """Some of the bytes of another memory."""

    __slots__ = ("nbytes", "offset", "root")

    def __init__(self, root: Memory, offset: int, nbytes: int) -> None:
        self.root = root
        self.offset = offset
        self.nbytes = nbytes

    def array(self) -> Array:
        return self.root.array()[self.offset : self.offset + self.nbytes]

    def part(self, offset: int, nbytes: int) -> Memory:
        return Part(self.root, self.offset + offset, nbytes)


class Block(Memory):
    """Memory to write once and then send; it must not be written after that."""

    __slots__ = ()

    @abstractmethod
    def view(self) -> memoryview:
        """The bytes to write, `nbytes` long."""

    def reserve(self, nbytes: int) -> None:
        """Make sure that the memory of the first `nbytes` is there, if it was only announced.

        Raises:
            OutOfMemory: it is not to be had.
        """


class HeapBlock(Block):
    """A block in this process's own memory."""

    __slots__ = ("_bytes", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        spare: Array = np.empty(nbytes + 64, np.uint8)
        start = -spare.ctypes.data % 64 if nbytes > SMALL else 0
        self._bytes = spare[start : start + nbytes]

    def view(self) -> memoryview:
        return memoryview(self._bytes.data)

    def array(self) -> Array:
        return self._bytes


class Inline(Memory):
    """Bytes that came beside a header."""

    __slots__ = ("_bytes", "nbytes")

    def __init__(self, content: bytes | memoryview) -> None:
        self._bytes = content
        self.nbytes = len(content)

    def array(self) -> Array:
        return np.frombuffer(self._bytes, np.uint8)


class Lease(Memory):
    """Memory lent to one holder: `ended` is called once neither it nor a view of it is left.

    It is called by whoever lets go last, wherever that is: it must neither wait nor raise.
    """

    __slots__ = ("_address", "_ended", "memory", "nbytes")

    def __init__(self, memory: Memory, ended: Callable[[], object]) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self._ended = ended

    def array(self) -> Array:
        # The root of every view is this object, as for any memory that others wait for.
        self._address = self.memory.array().ctypes.data
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self._address, True),
        }

    def __del__(self) -> None:
        del self.memory
        self._ended()


Buffers: TypeAlias = Sequence[Memory | None]


@dataclass(slots=True)
class Frame:
    """One message: its kind and numbers, its header, and its buffers (`None`: an empty one).

    `received` counts the other end's frames that have arrived, where a session outlives its
    connections.
    With an `error` it has none, because there was no memory for them where it arrived.
    """

    kind: int
    request: int
    header: bytes
    buffers: Buffers = ()
    session: int = 0
    received: int = 0
    error: PacelineError | None = None


class Arena(ABC):
    """Where blocks come from."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Block:
        """Memory to write and send; it is used again once nobody holds it.

        Raises:
            OutOfMemory: there is not enough; the message has the numbers.
        """

    def announced(self, nbytes: int) -> Block:
        """Memory for bytes that are still to come; before they are written they are reserved.

        Raises:
            OutOfMemory: there will not be enough.
        """
        return self.allocate(nbytes)

    @abstractmethod
    def close(self) -> None:
        """Let go of memory kept for later use; blocks in use stay valid."""


class HeapArena(Arena):
    """Blocks in this process's own memory."""

    def allocate(self, nbytes: int) -> Block:
        try:
            return HeapBlock(nbytes)
        except MemoryError as e:
            raise OutOfMemory(f"no memory of {nbytes} bytes for this process") from e

    def close(self) -> None:
        """There is nothing to let go of."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a session needs to go on over another connection: who it is, and on which server."""

    session: int
    token: bytes
    epoch: int


class Stuck(Disconnected):
    """The other end has taken no more bytes in time; the connection is there."""


class Channel(ABC):
    """One end of a connection. Sending is safe from several threads; one at a time receives."""

    shares_memory: bool
    """Whether both ends see the same memory, so that a buffer sent is a buffer shared."""

    closed: bool = False

    heard: float | None = None
    """When bytes last came, by the monotonic clock; `None` where both ends are one process."""

    interrupts = Interrupts()
    """Where a wait can be ended by Ctrl-C, if whoever waits keeps it from the rest."""

    on_end: Callable[[], None] = staticmethod(lambda: None)
    """Called when the connection ends, before the buffers sent are let go of: who has them can no
    longer say when they may be written again."""

    @abstractmethod
    def send(self, frame: Frame, due: float | None = None) -> None:
        """Send a frame. Its buffers are held until the other end let go of them.

        `due`, by the monotonic clock, is when the other end has to have taken it, or be about it.
        What is left then goes before the next frame; one that has no reply never waits for that.

        Raises:
            Stuck: nothing of it was sent, and it will not be: there still is such a rest.
            Disconnected: the connection has ended.
        """

    @abstractmethod
    def receive(self, timeout: float | None = None) -> Frame | None:
        """The next frame, in the order sent; `None` when `timeout` seconds brought none.

        Raises:
            Disconnected: the connection has ended.
            ProtocolError: the other end sent what is no frame.
        """

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self.alive()

    @abstractmethod
    def alive(self) -> bool:
        """Whether the other end is still there, without receiving anything."""

    def outlive(self, line: Line) -> None:
        """The server keeps this session when the connection ends: make another one then.

        Raises:
            Unsupported: this kind ends with its connection.
        """
        raise Unsupported(f"session {line.session} cannot outlive a {type(self).__name__}")

    @abstractmethod
    def flush(self) -> None:
        """Tell the other end now which of its buffers are no longer used here."""

    @abstractmethod
    def close(self) -> None:
        """End the connection. Idempotent.

        Received buffers can be read while they are held, but whoever lent them may write them.
        """

    def retire(self) -> None:
        """End the connection after a goodbye: what was received stays as it is while it is held."""
        self.close()


@dataclass(slots=True)
class Address:
    """Where a server is: `unix:/path`, `unix:@name` (no file), `tcp:host:port`, `memory:name`.

    At `near:host:port` it is both at that port and, for its own host, at a name; see `ways`.
    """

    transport: str
    place: str

    def __str__(self) -> str:
        return f"{self.transport}:{self.place}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises:
            UnknownName: there is no such transport; the message lists those there are.
        """
        transport, colon, place = text.partition(":")
        if not colon or transport not in (*TRANSPORTS, NEAR):
            raise UnknownName(
                f"no transport for the address {text!r}; there are {list(TRANSPORTS)}"
            )
        return cls(transport, place.removeprefix("//") if transport == "tcp" else place)


def ways(address: Address) -> tuple[Address, ...]:
    """How to reach a server, the best way first.

    Only processes of its network namespace, and so of its host, find the name that `near` servers
    have. It follows from the address that they have in that namespace, so it says nothing new.
    """
    if address.transport != NEAR:
        return (address,)
    return Address("unix", f"@paceline-{address.place}"), Address("tcp", address.place)


@dataclass(slots=True)
class Transport:
    """One way to move frames: how to reach a server.

    `encrypts`: whether what goes over it can leave the host, so that it takes `tls=`, and arrives
    in an `arena`.
    """

    connect: Callable[..., Channel]
    arena: Callable[[], Arena]
    listen: Callable[..., Any] = field(repr=False)
    encrypts: bool = False

    def options(self, tls: object, arena: Arena | None = None) -> dict[str, Any]:
        """What to connect and listen with, where a cluster is encrypted with that.

        With an `arena`, to connect: what arrives lies there.
        """
        if not self.encrypts:
            return {}
        return {"tls": tls} if arena is None else {"tls": tls, "arena": arena}


def transport(name: str) -> Transport:
    """The transport of that name, imported on use.

    Raises:
        UnknownName: there is none; the message lists those there are.
    """
    if name not in TRANSPORTS:
        raise UnknownName(f"no transport {name!r}; there are {list(TRANSPORTS)}")
    found: Transport = importlib.import_module(TRANSPORTS[name]).TRANSPORT
    return found
