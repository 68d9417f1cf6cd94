"""One end of an encrypted TCP connection: the same frames, through TLS."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar, cast

from paceline.transports.base import Arena
from paceline.transports.stream import MOST, SEND_TICK, TICK
from paceline.transports.tcp_channel import TcpChannel

RECORD = 1 << 14
"""Bytes that TLS encrypts at once. A write that had to wait is repeated with the same bytes, so
none is longer."""

R = TypeVar("R")


class Encrypted:
    """An `SSLSocket` with the calls of a socket that a channel makes.

    It waits where a socket would, a tick at most, but never within OpenSSL, which serves one thread
    at a time: one may wait for bytes while another one sends.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._waits = False
        self.most = MOST
        """Bytes after which no more than what is decrypted already is taken at once."""

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        """Whether calls wait."""
        self._waits = flag
        self._sock.setblocking(False)

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        """As a socket does."""
        self._sock.setsockopt(level, name, value)

    def shutdown(self, how: int) -> None:
        """End the connection; what has arrived is still decrypted."""
        # SSLSocket's own method would also stop decrypting.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Give the descriptor back."""
        self._sock.close()

    def pending(self) -> int:
        """Bytes that are decrypted already: no poll tells of them."""
        with self._lock:
            try:
                return self._sock.pending()
            except (ValueError, AttributeError):
                # Closed by another thread.
                return 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Up to one record."""
        return self._attempt(lambda: self._sock.read(size), flags)

    def recv_into(self, room: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """Fill `room` as far as bytes are there."""
        total = 0
        while total < len(room):
            if total >= self.most and not self.pending():
                break
            rest = room[total:]
            try:
                size = self._into(rest, socket.MSG_DONTWAIT if total else flags)
            except BlockingIOError:
                if not total:
                    raise
                break
            if size == 0:
                break
            total += size
        return total

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Send the first record of `data`."""
        record = memoryview(data)[:RECORD]
        return self._attempt(lambda: self._sock.write(record), flags)

    def sendmsg(self, parts: Iterable[memoryview]) -> int:
        """Send as many records as the socket takes."""
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

    def _into(self, room: memoryview, flags: int) -> int:
        return self._attempt(lambda: cast(int, self._sock.read(len(room), room)), flags)

    def _attempt(self, call: Callable[[], R], flags: int) -> R:
        again = self._waits and not flags
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                events, tick = select.POLLIN, TICK
            except ssl.SSLWantWriteError:
                events, tick = select.POLLOUT, SEND_TICK
            except (ValueError, AttributeError) as e:
                # Closed by another thread.
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from e
            if not again:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            again = False
            poll = select.poll()
            poll.register(self._sock.fileno(), events)
            poll.poll(tick * 1000)


class TlsChannel(TcpChannel):
    """One end of an authenticated, encrypted connection between any two hosts."""

    def __init__(self, sock: ssl.SSLSocket, arena: Arena, *, waits: bool) -> None:
        self._tls = Encrypted(sock)
        super().__init__(cast(socket.socket, self._tls), arena, waits=waits)

    def _receive_ready(self, flags: int = 0) -> bool:
        ready = super()._receive_ready(flags)
        # What is decrypted is taken in now: whoever waits next waits for the socket.
        self._tls.most = 0
        try:
            while self._tls.pending():
                super()._receive_ready(socket.MSG_DONTWAIT)
        finally:
            self._tls.most = MOST
        return ready
