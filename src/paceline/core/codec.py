"""Frames as bytes: a fixed prefix, a header (one message), an envelope, and bytes carried inline.

The prefix has the protocol version, the kind, the lengths, the numbers that make a request unique
(session and request), and how many frames of the other end's have arrived, where a session outlives
its connections (`core/window.py`); a frame without a header says only that. The envelope is the
transport's own: it says where the buffers are and which of the other end's buffers are no longer
needed. Both ends speak it alike.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec

from paceline.core.errors import ProtocolError

PROTOCOL = 2
MAX_HEADER = 1 << 26
MAX_ENVELOPE = 1 << 24
MAX_INLINE = 1 << 34

REQUEST, REPLY, ERROR, ONE_WAY = range(4)

PREFIX = struct.Struct("<BBHIIQQQQ")


class Prefix(NamedTuple):
    """The fixed part in front of every frame."""

    protocol: int
    kind: int
    reserved: int
    header: int
    envelope: int
    inline: int
    session: int
    request: int
    received: int


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Where a frame's buffers are, and what the sender gives back.

    `buffers` are (segment, offset, nbytes, pin); segment 0 is the inline part, in order. `segments`
    are (segment, nbytes) whose descriptors come with this frame. `released` are pins of buffers
    that the other end sent and may use again; `forgotten` are segments that it may unmap.
    """

    buffers: list[tuple[int, int, int, int]] = []
    segments: list[tuple[int, int]] = []
    released: list[int] = []
    forgotten: list[int] = []


def parse_prefix(data: bytes | bytearray | memoryview, offset: int = 0) -> Prefix:
    """Read a prefix and check its bounds.

    Raises:
        ProtocolError: it is none, or larger than a frame may be.
    """
    prefix = Prefix._make(PREFIX.unpack_from(data, offset))
    if prefix.protocol != PROTOCOL or prefix.kind > ONE_WAY or prefix.reserved:
        start = bytes(data[offset : offset + 8]).hex()
        raise ProtocolError(f"not a frame of protocol {PROTOCOL}: {start}")
    # A batch may hold more plain values than one request; what a server sends is trusted more.
    most = MAX_HEADER if prefix.kind in (REQUEST, ONE_WAY) else MAX_INLINE
    if prefix.header > most or prefix.envelope > MAX_ENVELOPE or prefix.inline > MAX_INLINE:
        raise ProtocolError(
            f"a frame of {prefix.header} + {prefix.envelope} + {prefix.inline} bytes;"
            f" at most {most} + {MAX_ENVELOPE} + {MAX_INLINE} are allowed"
        )
    return prefix


def parse_envelope(data: bytes | memoryview) -> Envelope:
    """Decode an envelope.

    Raises:
        ProtocolError: the bytes are not an envelope.
    """
    try:
        return _envelope(data)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"{len(data)} bytes are not an envelope: {e}") from e


encode_envelope: Any = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(Envelope).decode
