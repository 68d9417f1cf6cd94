"""One end of a Unix socket: headers go over it, large buffers stay in shared memory."""

from __future__ import annotations

import array
import os
import socket
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

from paceline.core import codec
from paceline.core.codec import PREFIX, PROTOCOL, Envelope
from paceline.core.errors import Disconnected, ProtocolError
from paceline.transports.base import Buffers, Frame, Inline, Lease, Memory, Part
from paceline.transports.pieces import Piece
from paceline.transports.shared import Pinned, Released, Segment, SharedBlock, descriptors
from paceline.transports.stream import CHUNK, StreamChannel

FDS = 64
# As a plain int: the flag's own operators cost more than the call.
_TRUNCATED = int(socket.MSG_CTRUNC)
_FD_SPACE = socket.CMSG_SPACE(FDS * 4)


class UnixChannel(StreamChannel):
    """One end of an authenticated connection within one host."""

    shares_memory = True

    def __init__(self, sock: socket.socket, *, waits: bool) -> None:
        super().__init__(sock, waits=waits)
        self._pins = 0
        self._sent: dict[int, Memory] = {}
        self._known: dict[int, weakref.ref[Segment]] = {}
        self._segments: dict[int, Segment] = {}
        self._fds: deque[int] = deque()
        self._released: Released = Released()

    def _encode(self, frame: Frame) -> deque[Piece]:
        buffers: list[tuple[int, int, int, int]] = []
        inline: list[Any] = []
        new: list[Segment] = []
        nbytes = 0
        for lent in frame.buffers:
            memory = lent.memory if isinstance(lent, Lease) else lent
            if lent is None or memory is None or memory.nbytes == 0:
                buffers.append((0, 0, 0, 0))
                continue
            root, offset = (memory.root, memory.offset) if type(memory) is Part else (memory, 0)
            if isinstance(root, (SharedBlock, Pinned)):
                segment = root.segment
                if segment.uid not in self._known:
                    self._introduce(segment)
                    new.append(segment)
                self._pins += 1
                self._sent[self._pins] = lent if type(lent) is Lease else root
                buffers.append((segment.uid, root.offset + offset, memory.nbytes, self._pins))
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
            frame.session, frame.request, frame.received,
        )  # fmt: skip
        data = memoryview(b"".join((prefix, frame.header, envelope, *inline)))
        pieces: deque[Piece] = deque()
        # More descriptors than one message carries go ahead with a byte each.
        while len(new) > FDS:
            pieces.append(Piece(data[:1], new[:FDS]))
            data, new = data[1:], new[FDS:]
        pieces.append(Piece(data, new))
        return pieces

    def _introduce(self, segment: Segment) -> None:
        uid, forgotten, known = segment.uid, self._forgotten, self._known

        def gone(_: weakref.ref[Segment]) -> None:
            known.pop(uid, None)
            forgotten.append(uid)

        self._known[uid] = weakref.ref(segment, gone)

    def _push(self, pieces: deque[Piece]) -> int:
        data, new, _ = pieces[0]
        try:
            if not new:
                return self._sock.send(data)
            rights = array.array("i", [segment.fd for segment in new])
            return self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except BlockingIOError:
            return 0
        except OSError as e:
            self._gone(e)

    def _receive_ready(self, flags: int = 0) -> bool:
        size = self._reading_size() if self._partial else CHUNK
        try:
            data, extra, got, _ = self._sock.recvmsg(size, _FD_SPACE, flags)
        except BlockingIOError:
            return False
        except OSError as e:
            self._gone(e)
        if extra or got & _TRUNCATED:
            self._take_descriptors(extra, got)
        self._take(data)
        if self._fds and not self._partial:
            self._fail()
            raise ProtocolError(f"{len(self._fds)} descriptors came without a segment")
        return True

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

    def _open(self, frame: Frame, data: bytes, start: int, inline: int, stop: int) -> Buffers:
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
                if nbytes < 0 or inline + nbytes > stop:
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

    def retire(self) -> None:
        if self.closed:
            return
        # The other end sees no end yet, but whoever waits in the system call here does.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        self._released.line = self._sock
        self._released = Released()
        self._end()

    def _let_go(self) -> None:
        self._sent.clear()
        self._known.clear()
        self._segments.clear()
        while self._fds:
            os.close(self._fds.popleft())
