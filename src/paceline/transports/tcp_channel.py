"""One end of a TCP connection: a frame's buffers follow it, and nothing is copied on the way."""

from __future__ import annotations

import itertools
import socket
from collections import deque

from paceline.core import codec
from paceline.core.codec import PREFIX, PROTOCOL, Envelope
from paceline.core.errors import ProtocolError
from paceline.transports.arrival import Arrival
from paceline.transports.base import MOST, SMALL, UNREAD_LIMIT, Arena, Buffers, Frame
from paceline.transports.pieces import Piece
from paceline.transports.stream import StreamChannel

AT_ONCE = 64
"""Pieces that one system call sends."""

IDLE, BETWEEN, PROBES = 10, 5, 4
"""A host that is silent for `IDLE` s is probed; `PROBES` without an answer, `BETWEEN` s apart, end
the connection, 30 s after the host died or the network was cut. Bytes on their way may be without
an answer for `UNREAD_LIMIT` s. A process that is busy is not silent: its kernel answers probes."""

_OPTIONS = (
    ("TCP_NODELAY", 1),
    ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", IDLE),
    ("TCP_KEEPINTVL", BETWEEN),
    ("TCP_KEEPCNT", PROBES),
    ("TCP_USER_TIMEOUT", int(UNREAD_LIMIT * 1000)),
)


class TcpChannel(StreamChannel):
    """One end of an authenticated connection between any two hosts.

    Large buffers that arrive lie in blocks of `arena`: a server's own, so that it can hand them on
    without a copy.
    """

    shares_memory = False

    def __init__(self, sock: socket.socket, arena: Arena, *, waits: bool) -> None:
        super().__init__(sock, waits=waits)
        self._arena = arena
        self._arrival: Arrival | None = None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _encode(self, frame: Frame) -> deque[Piece]:
        sizes = [0 if memory is None else memory.nbytes for memory in frame.buffers]
        envelope = codec.encode_envelope(Envelope([(0, 0, size, 0) for size in sizes]))
        prefix = PREFIX.pack(
            PROTOCOL, frame.kind, 0, len(frame.header), len(envelope), sum(sizes),
            frame.session, frame.request, frame.received,
        )  # fmt: skip
        pieces: deque[Piece] = deque()
        joined = bytearray(prefix + frame.header + envelope)
        for memory, size in zip(frame.buffers, sizes, strict=True):
            if memory is None or size == 0:
                continue
            if size <= SMALL:
                joined += memory.array().data
                continue
            if joined:
                pieces.append(Piece(memoryview(joined)))
                joined = bytearray()
            pieces.append(Piece(memory.array().data, (), memory))
        if joined:
            pieces.append(Piece(memoryview(joined)))
        return pieces

    def _push(self, pieces: deque[Piece]) -> int:
        try:
            return self._sock.sendmsg([piece.data for piece in itertools.islice(pieces, AT_ONCE)])
        except BlockingIOError:
            return 0
        except OSError as e:
            self._gone(e)

    def _receive_ready(self, flags: int = 0) -> bool:
        if self._arrival is not None:
            return self._fill(self._arrival, flags)
        size = self._reading_size()
        try:
            data = self._sock.recv(size, flags)
        except BlockingIOError:
            return False
        except OSError as e:
            self._gone(e)
        self._take(data)
        return True

    def _fill(self, arrival: Arrival, flags: int) -> bool:
        room = arrival.room()
        if not self._waits:
            # The others have their turn too.
            room = room[:MOST]
        try:
            size = self._sock.recv_into(room, 0, flags)
        except BlockingIOError:
            return False
        except OSError as e:
            self._gone(e)
        if size == 0:
            self._ended()
        arrival.took(size)
        if arrival.missing:
            return self._waits
        self._arrival = None
        self._frame(arrival.frame)
        return True

    def _open(self, frame: Frame, data: bytes, start: int, inline: int, stop: int) -> Buffers:
        arrival = Arrival(frame, _sizes(data, start, inline, stop), self._arena)
        arrival.take(memoryview(data)[inline:stop])
        return frame.buffers

    def _take_rest(self, frame: Frame, data: bytes, start: int, inline: int, stop: int) -> bool:
        self._arrival = Arrival(frame, _sizes(data, start, inline, stop), self._arena)
        self._arrival.take(memoryview(data)[inline:])
        return True

    def _fail(self) -> None:
        # Another thread may be using the descriptor, and another connection could get its number.
        self.cut()
        if self._waits and not self.closed:
            self._end()

    def close(self) -> None:
        super().close()
        # Where it failed before, the descriptor has been kept until now.
        self._sock.close()

    def _let_go(self) -> None:
        self._arrival = None


def _sizes(data: bytes, start: int, inline: int, stop: int) -> list[int]:
    """How long a frame's buffers are.

    Raises:
        ProtocolError: they are not its inline part, or it shares memory.
    """
    envelope = codec.parse_envelope(data[start:inline])
    if envelope.segments or envelope.released or envelope.forgotten:
        raise ProtocolError("shared memory was announced over tcp")
    sizes = [nbytes for _, _, nbytes, _ in envelope.buffers]
    if any(uid or size < 0 for (uid, *_), size in zip(envelope.buffers, sizes, strict=True)):
        raise ProtocolError(f"a buffer outside of its frame: {envelope.buffers[:4]}")
    if sum(sizes) != stop - inline:
        raise ProtocolError(f"buffers of {sum(sizes)} bytes in a frame with {stop - inline}")
    return sizes
