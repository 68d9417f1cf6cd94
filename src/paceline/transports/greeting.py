"""A connection that has not proved itself yet: it costs little, and not for long."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable

from paceline.core.errors import Disconnected, PacelineError, ProtocolError, Refused
from paceline.core.handshake import ANSWER, CHALLENGE, NONCE, VERDICT, ClientSide, ServerSide
from paceline.transports.base import Channel

LIMIT = 10.0
"""Seconds that a peer has to prove that it knows the secret."""


class Greeting:
    """The server's side of a handshake, step by step as bytes arrive.

    `origin` is where it comes from: a host, or a process of this one.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        opened: Callable[[socket.socket], Channel],
        origin: str,
    ) -> None:
        self.origin = origin
        self._sock = sock
        self._opened = opened
        self._server = ServerSide(secret, secrets.token_bytes(NONCE))
        self._answer = b""
        sock.setblocking(False)
        sock.send(self._server.challenge())

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    def advance(self) -> Channel | None:
        """Go on with what has arrived; the channel once the peer has proved itself.

        Raises:
            ProtocolError: it is no peer of ours, or does not know the secret; it has been told.
            OSError: it is gone.
        """
        try:
            data = self._sock.recv(ANSWER - len(self._answer))
        except BlockingIOError:
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

    def close(self) -> None:
        """Give the connection up."""
        self._sock.close()


def authenticated(address: str, reach: Callable[[], socket.socket], secret: bytes) -> socket.socket:
    """A connection made by `reach`, when both sides have proved that they know the secret.

    Raises:
        Disconnected: nobody listens there.
        Refused: one of the two does not know the other's secret, or speaks another protocol.
    """
    sock = None
    try:
        sock = reach()
        until = time.monotonic() + LIMIT
        client = ClientSide(secret, secrets.token_bytes(NONCE))
        sock.sendall(client.answer(_exactly(sock, CHALLENGE, until)))
        client.check(_exactly(sock, VERDICT, until))
        return sock
    except BaseException as e:
        if sock is not None:
            sock.close()
        if isinstance(e, ProtocolError):
            raise Refused(f"{address}: {e}") from e
        # Some errors of ours are an OSError too.
        if isinstance(e, OSError) and not isinstance(e, PacelineError):
            raise Disconnected(f"no server at {address} ({e.strerror or e})") from e
        raise


def _exactly(sock: socket.socket, nbytes: int, until: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        if time.monotonic() > until:
            raise Disconnected(f"the server did not prove itself within {LIMIT:.0f} s")
        part = sock.recv(nbytes - len(data))
        if not part:
            raise Disconnected("the server ended the connection before it was authenticated")
        data += part
    return data
