"""A connection that has not proved itself yet: it costs little, and not for long."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from paceline.core.errors import Disconnected, PacelineError, ProtocolError, Refused
from paceline.core.handshake import (
    ANSWER,
    CHALLENGE,
    NONCE,
    TLS_WANTED,
    VERDICT,
    ClientSide,
    ServerSide,
)
from paceline.transports import tls
from paceline.transports.base import Channel
from paceline.transports.encrypted import Encrypted

LIMIT = 10.0
"""Seconds that a peer has to prove that it knows the secret."""

SILENCE = 2.0
"""Seconds after which a peer that should speak TLS, and has said nothing, is told so."""

MOST = 1 << 17
"""Bytes that a peer may need for a handshake of TLS: its certificates have up to 100 KB."""

AFTERWARDS = 1 << 12
"""Bytes after that in which it has to have proved itself."""

S = TypeVar("S", bound=socket.socket | Encrypted)


class Greeting:
    """The server's side of a handshake, step by step as bytes arrive.

    With `certified` the peer first speaks TLS. `origin` is where it comes from: a host, or a
    process of this one. `wants_write` says whether it waits until it can write.
    """

    wants_write = False

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        opened: Callable[[Any], Channel],
        origin: str,
        certified: tls.Certified | None = None,
    ) -> None:
        self.origin = origin
        self._opened = opened
        self._answer = b""
        self._heard = False
        self._socket = sock
        self._most = MOST
        self._shakes: Encrypted | None = None
        nonce = secrets.token_bytes(NONCE)
        sock.setblocking(False)
        if certified is None:
            self._server = ServerSide(secret, nonce)
            self._sock: socket.socket | Encrypted = sock
            sock.send(self._server.challenge())
        else:
            self._server = ServerSide(secret, nonce, certified.binding)
            self._sock = self._shakes = Encrypted(sock, certified.context)
        self.patience = LIMIT if certified is None else SILENCE
        """Seconds until it is asked whether it has time left."""

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    def advance(self) -> Channel | None:
        """Go on with what has arrived; the channel once the peer has proved itself.

        Raises:
            ProtocolError: it is no peer of ours, or does not know the secret; it has been told.
            OSError: it is gone.
        """
        self._heard = True
        if self._shakes is not None and not self._shaken(self._shakes):
            return None
        try:
            data = self._sock.recv(ANSWER - len(self._answer))
        except BlockingIOError:
            self._check(self._sock)
            return None
        if not data:
            raise ProtocolError("the peer left before it proved itself")
        self._answer += data
        if len(self._answer) < ANSWER:
            return None
        accepted, verdict = self._server.judge(self._answer)
        self._sock.send(verdict)
        if not accepted:
            raise ProtocolError("the peer does not know the secret")
        return self._opened(self._sock)

    def _shaken(self, sock: Encrypted) -> bool:
        try:
            over = sock.shake()
        except ssl.SSLError as e:
            raise ProtocolError(tls.refused(e)) from e
        self.wants_write = sock.unsent
        self._check(sock)
        if not over:
            return False
        self._shakes = None
        self._most = sock.taken + AFTERWARDS
        sock.send(self._server.challenge())
        return True

    def _check(self, sock: socket.socket | Encrypted) -> None:
        if isinstance(sock, Encrypted) and sock.taken > self._most:
            raise ProtocolError(
                f"the peer has said {sock.taken} bytes and not proved itself; {self._most} will do"
            )

    def more_time(self) -> float:
        """Its patience is over: the seconds that it may have beyond; 0 to drop it."""
        if self.patience == LIMIT:
            return 0.0
        self.patience = LIMIT
        if self._heard:
            return LIMIT - SILENCE
        with suppress(OSError):
            # Not through TLS: who says nothing does not speak it.
            self._socket.send(TLS_WANTED)
        return 0.0

    def close(self) -> None:
        """Give the connection up."""
        self._sock.close()


def authenticated(address: str, reach: Callable[[], S], secret: bytes) -> S:
    """A connection made by `reach`, when both sides have proved that they know the secret.

    Raises:
        Disconnected: nobody listens there.
        Refused: one of the two does not know the other's secret, or speaks another protocol, or
            will not have the other's certificate.
    """
    sock = None
    try:
        sock = reach()
        until = time.monotonic() + LIMIT
        bound = tls.binding(sock.certificate) if isinstance(sock, Encrypted) else b""
        client = ClientSide(secret, secrets.token_bytes(NONCE), bound)
        sock.sendall(client.answer(_exactly(sock, CHALLENGE, until)))
        client.check(_exactly(sock, VERDICT, until))
        return sock
    except BaseException as e:
        if sock is not None:
            sock.close()
        if isinstance(e, ProtocolError):
            raise Refused(f"{address}: {e}") from e
        if isinstance(e, ssl.SSLError):
            why = tls.told(e)
            raise (tls.gone(e) if why is None else Refused(f"{address}: {why}")) from e
        # Some errors of ours are an OSError too.
        if isinstance(e, OSError) and not isinstance(e, PacelineError):
            raise Disconnected(f"no server at {address} ({e.strerror or e})") from e
        raise


def _exactly(sock: socket.socket | Encrypted, nbytes: int, until: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        if time.monotonic() > until:
            raise Disconnected(f"the server did not prove itself within {LIMIT:.0f} s")
        part = sock.recv(nbytes - len(data))
        if not part:
            raise Disconnected("the server ended the connection before it was authenticated")
        data += part
    return data
