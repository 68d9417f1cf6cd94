"""What is said to a server that wants TLS: inside it, of it, or instead of it.

All but the keys is drawn from a `random.Random`: what a connection said can be told, not repeated.
"""

from __future__ import annotations

import socket
import ssl
import struct
from contextlib import suppress
from random import Random

from fuzz.frames import harmed

HEAD = 5
KINDS = [0, 20, 21, 22, 23, 24, 128, 255]
VERSIONS = [0, 0x0002, 0x0301, 0x0303, 0x0304, 0xFFFF]
CLOSED = 0
"""The number of the alert with which an end says that it says no more."""


class Sealed:
    """A socket through TLS, whose records can be held back, broken and made up."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    @property
    def certificate(self) -> bytes | None:
        return self._tls.getpeercert(True)

    def flight(self) -> bytes | None:
        """What the handshake says next, not sent yet; `None` when it is over and all was said."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if not self._outgoing.pending:
                self._hear()
                return self.flight()
            return self._outgoing.read()
        return self._outgoing.read() or None

    def shake(self) -> None:
        while (said := self.flight()) is not None:
            self._sock.sendall(said)

    def records(self, data: bytes) -> list[bytes]:
        """This as it would be sent."""
        self._tls.write(data)
        whole, found = self._outgoing.read(), []
        while whole:
            size = HEAD + struct.unpack_from(">H", whole, 3)[0]
            found.append(whole[:size])
            whole = whole[size:]
        return found

    def farewell(self) -> bytes:
        """The alert that says that this end says no more."""
        with suppress(ssl.SSLError):
            self._tls.unwrap()
        return self._outgoing.read()

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(b"".join(self.records(data)))

    def recv(self, size: int) -> bytes:
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._hear()
            except ssl.SSLEOFError:
                return b""

    def _hear(self) -> None:
        data = self._sock.recv(1 << 16)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


def made_up(random: Random) -> bytes:
    """A record that nobody encrypted: of any kind, an alert perhaps, and as long as it may say."""
    body = random.randbytes(random.choice([0, 1, 2, 16, 40, 1000, 17_000]))
    if random.random() < 0.4:
        body = bytes([random.choice([1, 2, 3]), random.choice([CLOSED, 10, 20, 42, 90, 100, 112])])
    size = random.choice([len(body)] * 4 + [0, 1, len(body) + 1, 16_641, 65_535])
    return struct.pack(">BHH", random.choice(KINDS), random.choice(VERSIONS), size) + body


def broken(records: list[bytes], random: Random) -> bytes:
    """Records that are wrong in one way or another."""
    place = random.randrange(len(records))
    one = records[place]
    way = random.randrange(7)
    if way == 0:
        records[place] = harmed(one, random)
    elif way == 1:
        at = random.randrange(len(one))
        records[place] = one[:at] + bytes([one[at] ^ 1 << random.randrange(8)]) + one[at + 1 :]
    elif way == 2:
        records.insert(place, one)
    elif way == 3:
        records[place] = made_up(random)
    elif way == 4:
        records.insert(place, made_up(random) * random.choice([1, 1, 40, 400]))
    elif way == 5:
        random.shuffle(records)
    else:
        # Cut off, and on with something else.
        records[place] = one[: random.randrange(len(one))] + made_up(random)
    return b"".join(records)
