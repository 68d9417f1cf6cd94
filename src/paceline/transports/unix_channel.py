"""One end of a Unix socket: headers go over it, large buffers stay in shared memory."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.core import codec
from paceline.core.codec import PREFIX, PROTOCOL, Envelope
from paceline.core.errors import Disconnected, ProtocolError
from paceline.transports.base import Channel, Frame, Inline, Memory
from paceline.transports.shared import Pinned, Segment, SharedBlock, descriptors

CHUNK = 1 << 16
MOST = 1 << 20
FDS = 64
TICK = 1.0
SEND_LIMIT = 60.0
OUTBOX_LIMIT = 1 << 28
# As a plain int: the flag's own operators cost more than the call.
_TRUNCATED = int(socket.MSG_CTRUNC)
_FD_SPACE = socket.CMSG_SPACE(FDS * 4)
_ENDED = getattr(select, "POLLRDHUP", 0)
_GONE = _ENDED | select.POLLHUP | select.POLLERR


class UnixChannel(Channel):
    """One end of an authenticated connection.

    A client's end waits in the system call; a server's (`waits=False`) never does: what the socket
    does not take stays in an outbox, which `send_more` empties.
    """

    shares_memory = True

    def __init__(self, sock: socket.socket, *, waits: bool) -> None:
        self._sock = sock
        self._waits = waits
        self._send_lock = threading.Lock()
        self._pins = 0
        self._sent: dict[int, Memory] = {}
        self._known: dict[int, weakref.ref[Segment]] = {}
        self._segments: dict[int, Segment] = {}
        self._released: deque[int] = deque()
        self._forgotten: deque[int] = deque()
        self._outbox: deque[tuple[memoryview, list[Segment]]] = deque()
        self._outbox_bytes = 0
        self._partial = bytearray()
        self._wanted = 0
        self._frames: deque[Frame] = deque()
        self.on_backlog: Callable[[UnixChannel], None] = lambda channel: None
        self._fds: deque[int] = deque()
        self._poll = select.poll()
        self._poll.register(sock.fileno(), _ENDED)
        if waits:
            sock.setblocking(True)
            tick = struct.pack("ll", int(TICK), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
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
    def more(self) -> bool:
        """Whether a frame has been read from the socket and not been received yet."""
        return bool(self._frames)

    @property
    def releases(self) -> int:
        """How many of the other end's buffers it could have back."""
        return len(self._released)

    # Sending

    def send(self, frame: Frame) -> None:
        with self._send_lock:
            if self.closed:
                raise Disconnected("this connection is closed")
            if not frame.buffers and not self._released and not self._forgotten:
                data = PREFIX.pack(
                    PROTOCOL, frame.kind, 0, len(frame.header), 0, 0,
                    frame.session, frame.request, frame.epoch,
                ) + frame.header  # fmt: skip
                # Almost always the socket takes a short frame at once.
                sent = 0 if self._outbox else self._push(data, [])
                if sent != len(data):
                    self._write(data, [], sent)
                return
            self._write(*self._encode(frame))

    def flush(self) -> None:
        if self._released and not self.closed:
            self.send(Frame(codec.ONE_WAY, 0, b""))

    def send_more(self) -> None:
        """Send what waits in the outbox, as far as the socket takes it."""
        with self._send_lock:
            while self._outbox:
                data, new = self._outbox[0]
                sent = self._push(data, new)
                if sent == 0:
                    return
                self._outbox_bytes -= sent
                if sent == len(data):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = (data[sent:], [])

    def _encode(self, frame: Frame) -> tuple[bytes, list[Segment]]:
        buffers: list[tuple[int, int, int, int]] = []
        inline: list[Any] = []
        new: list[Segment] = []
        nbytes = 0
        for memory in frame.buffers:
            if memory is None or memory.nbytes == 0:
                buffers.append((0, 0, 0, 0))
            elif isinstance(memory, (SharedBlock, Pinned)):
                segment = memory.segment
                if segment.uid not in self._known:
                    self._introduce(segment)
                    new.append(segment)
                self._pins += 1
                self._sent[self._pins] = memory
                buffers.append((segment.uid, memory.offset, memory.nbytes, self._pins))
            else:
                buffers.append((0, 0, memory.nbytes, 0))
                inline.append(memory.array())
                nbytes += memory.nbytes
        envelope = codec.encode_envelope(
            Envelope(
                buffers,
                [(segment.uid, segment.nbytes) for segment in new],
                [self._released.popleft() for _ in range(len(self._released))],
                [self._forgotten.popleft() for _ in range(len(self._forgotten))],
            )
        )
        prefix = PREFIX.pack(
            PROTOCOL, frame.kind, 0, len(frame.header), len(envelope), nbytes,
            frame.session, frame.request, frame.epoch,
        )  # fmt: skip
        return b"".join((prefix, frame.header, envelope, *inline)), new

    def _introduce(self, segment: Segment) -> None:
        uid, forgotten, known = segment.uid, self._forgotten, self._known

        def gone(_: weakref.ref[Segment]) -> None:
            known.pop(uid, None)
            forgotten.append(uid)

        self._known[uid] = weakref.ref(segment, gone)

    def _write(self, data: bytes, new: list[Segment], sent: int = 0) -> None:
        rest = memoryview(data)[sent:]
        # More descriptors than one message carries go ahead with a byte each.
        while len(new) > FDS:
            self._write_piece(rest[:1], new[:FDS])
            rest, new = rest[1:], new[FDS:]
        self._write_piece(rest, new)

    def _write_piece(self, rest: memoryview, new: list[Segment]) -> None:
        if not self._outbox:
            sent = self._push(rest, new)
            if sent == len(rest):
                return
            rest, new = rest[sent:], [] if sent else new
        if self._waits:
            self._finish(rest, new)
            return
        self._outbox.append((rest, new))
        self._outbox_bytes += len(rest)
        self.on_backlog(self)
        if self._outbox_bytes > OUTBOX_LIMIT:
            self._fail()
            raise Disconnected(f"the peer left {self._outbox_bytes} bytes unread")

    def _finish(self, rest: memoryview, new: list[Segment]) -> None:
        deadline = time.monotonic() + SEND_LIMIT
        try:
            while rest:
                sent = self._push(rest, new)
                new = [] if sent else new
                rest = rest[sent:]
                if rest and time.monotonic() > deadline:
                    raise Disconnected(f"the server read nothing for {SEND_LIMIT:.0f} s")
        except BaseException:
            # Half a frame is out: nothing after it would make sense.
            self.close()
            raise

    def _push(self, data: memoryview | bytes, new: list[Segment]) -> int:
        try:
            if not new:
                return self._sock.send(data)
            rights = array.array("i", [segment.fd for segment in new])
            return self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except BlockingIOError:
            return 0
        except OSError as e:
            self._fail()
            raise Disconnected(f"the other end is gone ({e.strerror})") from e

    def _fail(self) -> None:
        """Cut the connection. A server's loop then sees its end, and closes it."""
        if self._waits:
            self.close()
            return
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
            if self._waits and left is not None and left < TICK:
                if left > 0:
                    self._events(select.POLLIN, left)
                flags = socket.MSG_DONTWAIT
            ready = self._receive_ready(flags)
            if deadline is not None:
                left = deadline - time.monotonic()
            if not ready and (not self._waits or (left is not None and left <= 0)):
                return None

    def _receive_ready(self, flags: int = 0) -> bool:
        """Read once from the socket; whether there was something."""
        size = CHUNK
        if self._partial:
            size = min(MOST, max(CHUNK, self._wanted - len(self._partial)))
        try:
            data, extra, got, _ = self._sock.recvmsg(size, _FD_SPACE, flags)
        except BlockingIOError:
            return False
        except OSError as e:
            self._fail()
            raise Disconnected(f"the other end is gone ({e.strerror})") from e
        if extra or got & _TRUNCATED:
            self._take_descriptors(extra, got)
        if not data:
            self._fail()
            raise Disconnected("the other end is gone (its process ended, or closed)")
        try:
            self._parse(data)
        except ProtocolError:
            self._fail()
            raise
        return True

    def alive(self) -> bool:
        if self.closed:
            return False
        try:
            found = self._poll.poll(0)
        except RuntimeError:
            # Another thread asks at this moment, and one object serves one thread at a time.
            found = self._events(_ENDED, 0)
        return not any(events & _GONE for _, events in found)

    def _events(self, wanted: int, timeout: float) -> list[tuple[int, int]]:
        poll = select.poll()
        with suppress(ValueError, OSError):
            poll.register(self._sock.fileno(), wanted)
        return poll.poll(timeout * 1000)

    def _take_descriptors(self, extra: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, rights in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(rights[: len(rights) - len(rights) % 4])
                self._fds.extend(fds)
        if flags & _TRUNCATED:
            self._fail()
            raise Disconnected(
                f"shared memory came that this process has no descriptor for: {descriptors()};"
                " raise the limit (ulimit -n)"
            )

    def _parse(self, data: bytes) -> None:
        if not self._partial and len(data) >= PREFIX.size:
            # Almost always one read is one short frame.
            protocol, kind, reserved, header, envelope, inline, session, request, epoch = (
                PREFIX.unpack_from(data)
            )
            if (
                protocol == PROTOCOL
                and kind <= codec.ONE_WAY
                and not (reserved or envelope or inline)
                and 0 < header == len(data) - PREFIX.size
            ):
                self._frames.append(Frame(kind, request, data[PREFIX.size :], (), session, epoch))
                return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._partial.clear()
        offset = 0
        end = len(data)
        while end - offset >= PREFIX.size:
            prefix = codec.parse_prefix(data, offset)
            header = offset + PREFIX.size
            envelope = header + prefix.header
            inline = envelope + prefix.envelope
            stop = inline + prefix.inline
            if stop > end:
                self._wanted = stop - offset
                break
            frame = Frame(
                prefix.kind, prefix.request, data[header:envelope], (),
                prefix.session, prefix.epoch,
            )  # fmt: skip
            if prefix.envelope:
                frame.buffers = self._open(data, envelope, inline, stop)
            offset = stop
            if prefix.header:
                self._frames.append(frame)
        else:
            self._wanted = PREFIX.size
        if offset < end:
            self._partial += data[offset:]

    def _open(self, data: bytes, start: int, inline: int, stop: int) -> list[Memory | None]:
        envelope = codec.parse_envelope(data[start:inline])
        for uid, nbytes in envelope.segments:
            if not self._fds:
                raise ProtocolError("a segment was announced without its descriptor")
            self._segments[uid] = Segment.received(self._fds.popleft(), nbytes)
        for pin in envelope.released:
            self._sent.pop(pin, None)
        buffers: list[Memory | None] = []
        view = memoryview(data)
        for uid, offset, nbytes, pin in envelope.buffers:
            if nbytes == 0:
                buffers.append(None)
            elif uid == 0:
                if inline + nbytes > stop:
                    raise ProtocolError("a frame's inline part is shorter than its buffers")
                buffers.append(Inline(view[inline : inline + nbytes]))
                inline += nbytes
            else:
                segment = self._segments.get(uid)
                if segment is None or offset < 0 or nbytes < 0 or offset + nbytes > segment.nbytes:
                    raise ProtocolError(f"a buffer outside of any segment: {uid} {offset} {nbytes}")
                buffers.append(Pinned(segment, offset, nbytes, pin, self._released))
        for uid in envelope.forgotten:
            self._segments.pop(uid, None)
        return buffers

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        # Another thread may be waiting in the system call.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._sent.clear()
        self._known.clear()
        self._segments.clear()
        while self._fds:
            os.close(self._fds.popleft())
        self._outbox.clear()
