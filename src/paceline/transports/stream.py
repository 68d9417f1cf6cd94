"""What transports over stream sockets have in common: frames, an outbox, time limits, ends."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from paceline.core import codec
from paceline.core.codec import PREFIX, PROTOCOL
from paceline.core.errors import Disconnected, ProtocolError
from paceline.transports.base import MOST, Buffers, Channel, Frame, Stuck
from paceline.transports.pieces import SEND_PAUSE, Piece, drop, locked

CHUNK = 1 << 16
TICK = 1.0
TURN = 4 << 20
"""Bytes after which a server that sends to one peer looks after the others."""

SEND_TICK = 0.25
SEND_LIMIT = 60.0
"""Seconds without a byte taken after which a client counts its server as gone."""

OUTBOX_LIMIT = 1 << 28
"""Bytes copied for a peer that may wait behind the frame that is on its way to it."""

OUTBOX_PIECES = 1 << 16
ENDED = getattr(select, "POLLRDHUP", 0)
_GONE = ENDED | select.POLLHUP | select.POLLERR


class StreamChannel(Channel):
    """One end of an authenticated connection over a stream socket.

    A client's end waits in the system call; a server's (`waits=False`) never does: what the socket
    does not take stays in an outbox, which `send_more` empties. In a client's is what is left of a
    frame that was to be sent by a certain time.
    """

    def __init__(self, sock: socket.socket, *, waits: bool) -> None:
        self._sock = sock
        self._waits = waits
        self._send_lock = threading.Lock()
        self._hurry = False
        # What the next envelope gives back, where memory is shared.
        self._released: deque[int] = deque()
        self._forgotten: deque[int] = deque()
        self._outbox: deque[Piece] = deque()
        self._outbox_bytes = 0
        self._moved = 0.0
        self.heard = time.monotonic()
        self._partial = bytearray()
        self._wanted = 0
        self._frames: deque[Frame] = deque()
        self.acknowledged = 0
        """How many of this end's frames the other has had, as a frame without a header said."""
        self.on_backlog: Callable[[StreamChannel], None] = lambda channel: None
        self._poll = select.poll()
        self._poll.register(sock.fileno(), ENDED)
        self._readable = select.poll()
        self._readable.register(sock.fileno(), select.POLLIN)
        if waits:
            sock.setblocking(True)
            for option, tick in ((socket.SO_RCVTIMEO, TICK), (socket.SO_SNDTIMEO, SEND_TICK)):
                pair = struct.pack("ll", int(tick), int(tick % 1 * 1e6))
                sock.setsockopt(socket.SOL_SOCKET, option, pair)
        else:
            sock.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits in the outbox."""
        return bool(self._outbox)

    @property
    def stalled(self) -> float:
        """Seconds since the other end took something of what waits for it."""
        return time.monotonic() - self._moved if self._outbox else 0.0

    @property
    def more(self) -> bool:
        """Whether a frame has been read from the socket and not been received yet."""
        return bool(self._frames)

    @property
    def releases(self) -> int:
        """How many of the other end's buffers it could have back."""
        return len(self._released)

    # Sending

    def send(self, frame: Frame, due: float | None = None) -> None:
        if self._outbox and self._waits and frame.kind != codec.ONE_WAY:
            self.clear(due)
        locked(self._send_lock, None if frame.kind == codec.ONE_WAY else due)
        try:
            self._send(frame, due)
        finally:
            self._send_lock.release()
        if self._hurry:
            self.flush()

    def clear(self, due: float | None) -> None:
        """Have a client send what is left of frames before the next one; raises as `send`."""
        locked(self._send_lock, due)
        try:
            self._finish(self._outbox, due)
            if self._outbox:
                raise Stuck("the server does not read what was sent before")
        finally:
            self._send_lock.release()

    def flush(self) -> None:
        # Finalisers call this too, perhaps of a thread that is sending: it never waits for the
        # lock. Whoever has it looks again afterwards.
        self._hurry = True
        while self._hurry and self._send_lock.acquire(blocking=False):
            try:
                self._hurry = False
                if self._released and not self.closed:
                    self._send(Frame(codec.ONE_WAY, 0, b""), 0.0)
            finally:
                self._send_lock.release()

    def _send(self, frame: Frame, due: float | None) -> None:
        if self.closed:
            raise Disconnected("this connection is closed")
        if not frame.buffers and not self._released and not self._forgotten:
            data = PREFIX.pack(
                PROTOCOL, frame.kind, 0, len(frame.header), 0, 0,
                frame.session, frame.request, frame.received,
            ) + frame.header  # fmt: skip
            # Almost always the socket takes a short frame at once.
            sent = 0 if self._outbox else self._put(data)
            if sent != len(data):
                self._write(deque([Piece(memoryview(data)[sent:])]), due)
            return
        self._write(self._encode(frame), due)

    def send_more(self) -> None:
        """Send what waits in the outbox, as far as the socket takes it, and not for long."""
        with self._send_lock:
            self._outbox_bytes -= self._push_some(self._outbox)

    @abstractmethod
    def _encode(self, frame: Frame) -> deque[Piece]:
        """A frame as it is sent."""

    @abstractmethod
    def _push(self, pieces: deque[Piece]) -> int:
        """Send from the front, in one system call; the bytes that the socket took."""

    def _write(self, pieces: deque[Piece], due: float | None) -> None:
        if self._waits:
            if not self._outbox:
                self._finish(pieces, due)
            self._outbox.extend(pieces)
            return
        if not self._outbox:
            self._push_some(pieces)
            if not pieces:
                return
        behind = bool(self._outbox)
        self._outbox.extend(pieces)
        self._outbox_bytes += sum(piece.copied for piece in pieces)
        self.on_backlog(self)
        if behind and (
            self._outbox_bytes > OUTBOX_LIMIT or len(self._outbox) - len(pieces) > OUTBOX_PIECES
        ):
            self._fail()
            raise Disconnected(f"the peer left {self._outbox_bytes} bytes unread")

    def _push_some(self, pieces: deque[Piece]) -> int:
        """Send what the socket takes; how many bytes of it had been copied for the outbox."""
        total = copied = 0
        while pieces and total < TURN:
            sent = self._push(pieces)
            if sent == 0:
                break
            total += sent
            copied += drop(pieces, sent)
        if total or pieces is not self._outbox:
            self._moved = time.monotonic()
        return copied

    def _finish(self, pieces: deque[Piece], due: float | None) -> None:
        """Send all of it; or until it is due, and then for as long as some of it is taken."""
        moved = now = time.monotonic()
        patience = now + TICK
        try:
            while pieces:
                sent = self._push(pieces)
                now = time.monotonic()
                if sent:
                    drop(pieces, sent)
                    moved = now
                elif due is not None and now >= max(due, moved + SEND_PAUSE):
                    return
                elif due is None and now > moved + SEND_LIMIT:
                    raise Disconnected(f"the server read nothing for {SEND_LIMIT:.0f} s")
                if pieces and now > patience:
                    self.interrupts.check()
        except Disconnected:
            self.cut()
            raise
        except BaseException:
            self._fail()  # Half a frame is out: nothing after it would make sense.
            raise

    def _put(self, data: bytes) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as e:
            self._gone(e)

    def _gone(self, error: OSError) -> NoReturn:
        # What it said before can still be received.
        self.cut()
        raise Disconnected(f"the other end is gone ({error.strerror})") from error

    def _fail(self) -> None:
        """End the connection. A server's loop then sees that, and closes it."""
        if self._waits:
            self.close()
        else:
            self.cut()

    def cut(self) -> None:
        """End the connection for all who use it; the descriptor stays until `close`."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    # Receiving

    def receive(self, timeout: float | None = None) -> Frame | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            if self._frames:
                return self._frames.popleft()
            if self.closed:
                raise Disconnected("this connection is closed")
            flags = 0
            if self._waits and self.interrupts.kept:
                # What a call returns is lost when a signal comes with it: a poll's is no loss.
                wait = TICK if left is None else max(0.0, min(TICK, left))
                self.interrupts.during(self._readable.poll, wait * 1000)
                flags = socket.MSG_DONTWAIT
            elif self._waits and left is not None and left < TICK:
                if left > 0:
                    self._events(select.POLLIN, left)
                flags = socket.MSG_DONTWAIT
            ready = self._receive_ready(flags)
            if ready:
                self.heard = time.monotonic()
            if deadline is not None:
                left = deadline - time.monotonic()
            if not ready and (not self._waits or (left is not None and left <= 0)):
                return None

    @abstractmethod
    def _receive_ready(self, flags: int = 0) -> bool:
        """Read once from the socket; whether there may be more to read at once."""

    @abstractmethod
    def _open(self, frame: Frame, data: bytes, start: int, inline: int, stop: int) -> Buffers:
        """The buffers of a frame that is all there: its envelope, and its inline part."""

    def _frame(self, frame: Frame) -> None:
        """A frame is whole. One without a header is only the channel's own business."""
        if frame.header:
            self._frames.append(frame)
        else:
            self.acknowledged = frame.received

    def _take_rest(self, frame: Frame, data: bytes, start: int, inline: int, stop: int) -> bool:
        """Receive a frame's inline part beside `data`, which ends in the midst of it."""
        return False

    def alive(self) -> bool:
        if self.closed:
            return False
        try:
            found = self._poll.poll(0)
        except RuntimeError:
            # Another thread asks at this moment, and one object serves one thread at a time.
            found = self._events(ENDED, 0)
        return not any(events & _GONE for _, events in found)

    def _events(self, wanted: int, timeout: float) -> list[tuple[int, int]]:
        poll = select.poll()
        with suppress(ValueError, OSError):
            poll.register(self._sock.fileno(), wanted)
        return poll.poll(timeout * 1000)

    def _take(self, data: bytes) -> None:
        """Take in what was read from the socket."""
        if not self._partial and len(data) >= PREFIX.size:
            # Almost always one read is one short frame.
            protocol, kind, reserved, header, envelope, inline, session, request, received = (
                PREFIX.unpack_from(data)
            )
            if (
                protocol == PROTOCOL
                and kind <= codec.ONE_WAY
                and not (reserved or envelope or inline)
                and 0 < header == len(data) - PREFIX.size
            ):
                self._frames.append(
                    Frame(kind, request, data[PREFIX.size :], (), session, received)
                )
                return
        if not data:
            self._ended()
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        try:
            rest = self._parse(data)
        except ProtocolError:
            self._fail()
            raise
        if rest < len(data):
            self._partial += data[rest:]

    def _ended(self) -> NoReturn:
        self._fail()
        raise Disconnected("the other end is gone (its process ended, or closed)")

    def _reading_size(self) -> int:
        """How much to read at once: a short frame, or what is missing of a longer one."""
        if not self._partial:
            return CHUNK
        return min(MOST, max(CHUNK, self._wanted - len(self._partial)))

    def _parse(self, data: bytes) -> int:
        """Take in the whole frames in `data`; where the one begins that is not whole."""
        offset = 0
        end = len(data)
        while end - offset >= PREFIX.size:
            prefix = codec.parse_prefix(data, offset)
            header = offset + PREFIX.size
            envelope = header + prefix.header
            inline = envelope + prefix.envelope
            stop = inline + prefix.inline
            if inline > end:
                self._wanted = inline - offset
                return offset
            frame = Frame(
                prefix.kind, prefix.request, data[header:envelope], (),
                prefix.session, prefix.received,
            )  # fmt: skip
            if stop > end:
                if self._take_rest(frame, data, envelope, inline, stop):
                    return end
                self._wanted = stop - offset
                return offset
            if prefix.envelope or prefix.inline:
                frame.buffers = self._open(frame, data, envelope, inline, stop)
            offset = stop
            self._frame(frame)
        self._wanted = PREFIX.size
        return offset

    def close(self) -> None:
        if self.closed:
            return
        # Another thread may be waiting in the system call.
        self.cut()
        self._sock.close()
        self._end()

    def _end(self) -> None:
        self.closed = True
        self.on_end()
        self._outbox.clear()
        self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Forget what was held for the other end."""
