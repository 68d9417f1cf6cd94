"""A socket through TLS: no peer has more of a turn than the bytes that were taken from it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from paceline.transports.base import MOST

AT_ONCE = 1 << 16
"""Bytes that are taken from the socket at once. OpenSSL looks for data until it finds some, through
as many records of other kinds as there are, such as new keys: so it has no socket to look in."""

AT_FIRST = 1 << 12
"""The same before the peer has proved itself."""

BURST = 1 << 16
"""Bytes that are encrypted at once."""

R = TypeVar("R")


class Encrypted:
    """One end of a connection through TLS, with the calls of a socket that a channel makes.

    It waits where the socket would, and never within OpenSSL, which serves one thread at a time:
    one may wait for bytes while another one sends. Without a `host`, which a client has called, it
    is the server's end.

    Attributes:
        exhausted: whether all bytes that were taken from the socket are decrypted and given out.
        taken: how many those are, so far.
        at_once: how many are taken at once; none at 0.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, host: str | None = None
    ) -> None:
        self.exhausted = True
        self.taken = 0
        self.at_once = AT_FIRST
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._lock = threading.Lock()
        self._waits = sock.gettimeout() != 0
        self._over = False
        # What is encrypted and on its way, and how many bytes of data are in it.
        self._sealed = memoryview(b"")
        self._owed = 0

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Whether calls wait."""
        self._waits = flag
        self._sock.setblocking(flag)

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        """As a socket does."""
        self._sock.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """End the connection; what has arrived is still decrypted."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()

    @property
    def certificate(self) -> bytes | None:
        """The other end's."""
        return self._tls.getpeercert(True)

    @property
    def unsent(self) -> bool:
        """Whether something encrypted waits for the socket."""
        return bool(self._sealed)

    def shake(self) -> bool:
        """Go on with the handshake; whether it is over. Raises as `ssl` and sockets do."""
        looked = False
        while True:
            over = self._shaken()
            if not self._flush():
                return False
            if over or looked:
                return over
            try:
                self._fill()
            except BlockingIOError:
                return False
            looked = True

    def _shaken(self) -> bool:
        try:
            with self._lock:
                self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            # The alert says to the other end what is wrong.
            with suppress(OSError):
                self._flush()
            raise
        return True

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Up to one record."""
        return self._found(lambda: self._tls.read(size), b"", flags)

    def recv_into(self, room: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Fill `room` with what is there, as far as it goes."""
        before = self.taken
        total = self._found(partial(self._into, room), 0, flags)
        while 0 < total < len(room):
            more = self._decrypted(partial(self._into, room[total:]), 0)
            if more is None and self._more(total, self.taken - before):
                continue
            if not more:
                break
            total += more
        return total

    def _more(self, found: int, taken: int) -> bool:
        """Take more, if of what was taken half is data: then decrypting it takes no longer."""
        if not self.at_once or 2 * found < taken:
            return False
        try:
            self._fill(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Send the beginning of `data`. One that had to wait is repeated with the same bytes."""
        if not self._owed:
            with self._lock:
                self._owed = self._tls.write(memoryview(data)[:BURST])
        if not self._flush(flags):
            raise _again()
        sent, self._owed = self._owed, 0
        return sent

    def sendall(self, data: bytes) -> None:
        """Send all of it, where calls wait."""
        while data:
            data = data[self.send(data) :]

    def sendmsg(self, parts: Iterable[memoryview]) -> int:
        """Send what the socket takes; no more is begun once it is `MOST`."""
        total = 0
        for part in parts:
            while part:
                try:
                    sent = self.send(part, socket.MSG_DONTWAIT if total else 0)
                except BlockingIOError:
                    if not total:
                        raise
                    return total
                total += sent
                part = part[sent:]
                if total >= MOST:
                    return total
        return total

    def _found(self, read: Callable[[], R], end: R, flags: int) -> R:
        """What `read` returns once there is something; where calls do not wait, after one look."""
        looked = False
        while (found := self._decrypted(read, end)) is None:
            if not self.at_once or (looked and not self._waits):
                raise _again()
            self._fill(flags)
            looked = True
        return found

    def _decrypted(self, read: Callable[[], R], end: R) -> R | None:
        if self._over:
            return end
        try:
            with self._lock:
                found = read()
        except ssl.SSLWantReadError:
            self.exhausted = True
            return None
        except ssl.SSLEOFError:
            found = end
        self._over = not found
        return found

    def _into(self, room: memoryview) -> int:
        return cast(int, self._tls.read(len(room), room))

    def _fill(self, flags: int = 0) -> None:
        data = self._sock.recv(self.at_once, flags)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
            own = self._outgoing.pending
        self.taken += len(data)
        self.exhausted = False
        if own > MOST:
            raise OSError(errno.EPROTO, f"it left {own} bytes of TLS unread")

    def _flush(self, flags: int = 0) -> bool:
        """Send what is encrypted; whether all of it has gone."""
        while True:
            if not self._sealed:
                with self._lock:
                    self._sealed = memoryview(self._outgoing.read())
                if not self._sealed:
                    return True
            try:
                sent = self._sock.send(self._sealed, flags)
            except BlockingIOError:
                return False
            self._sealed = self._sealed[sent:]


def _again() -> BlockingIOError:
    return BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
