"""Mutual proof of a shared secret, which itself never travels.

The server sends a challenge; the client answers it and sends its own; the server answers that. Both
proofs are HMAC-SHA256 over both challenges, so neither can be replayed on another connection, and
over who proves it, so that none can be sent back. Where the connection is encrypted they are over
the server's certificate too (`binding`), so that nobody in between can pass them on.
"""

import hashlib
import hmac

from paceline.core.codec import PROTOCOL
from paceline.core.errors import ProtocolError, Refused

MAGIC = b"PACELINE" + PROTOCOL.to_bytes(2, "little")
NONCE = 32
CHALLENGE = len(MAGIC) + NONCE
ANSWER = len(MAGIC) + NONCE + 32
VERDICT = 1 + 32
ACCEPTED, WRONG_SECRET = 0, 1
TLS_WANTED = MAGIC[:8] + b"\xff\xff" + bytes(NONCE)
"""What a server that wants TLS tells a client that says nothing, in the place of a challenge."""


class ServerSide:
    """The server's half of one handshake; `nonce` is `NONCE` random bytes, used once."""

    def __init__(self, secret: bytes, nonce: bytes, binding: bytes = b"") -> None:
        self._secret = secret
        self._nonce = nonce
        self._binding = binding

    def challenge(self) -> bytes:
        """What is sent first."""
        return MAGIC + self._nonce

    def judge(self, answer: bytes) -> tuple[bool, bytes]:
        """Whether the client may come in, and the verdict to send it.

        Raises:
            ProtocolError: the answer is none of ours or of another protocol version.
        """
        _check_magic(answer, "client")
        nonce, proof = answer[len(MAGIC) : -32], answer[-32:]
        both = (self._nonce, nonce, self._binding)
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", *both)):
            return False, bytes([WRONG_SECRET]) + bytes(32)
        return True, bytes([ACCEPTED]) + _proof(self._secret, b"server", *both)


class ClientSide:
    """The client's half of one handshake; `nonce` is `NONCE` random bytes, used once."""

    def __init__(self, secret: bytes, nonce: bytes, binding: bytes = b"") -> None:
        self._secret = secret
        self._nonce = nonce
        self._binding = binding
        self._theirs = b""

    def answer(self, challenge: bytes) -> bytes:
        """Answer the server's challenge.

        Raises:
            ProtocolError: the other end is no server of ours or speaks another protocol version.
        """
        _check_magic(challenge, "server")
        self._theirs = challenge[len(MAGIC) :]
        both = (self._theirs, self._nonce, self._binding)
        return MAGIC + self._nonce + _proof(self._secret, b"client", *both)

    def check(self, verdict: bytes) -> None:
        """Check that the server accepted, and that it knows the secret too.

        Raises:
            Refused: one of the two has another secret.
        """
        if verdict[0] == WRONG_SECRET:
            raise Refused("the server refused this session: its secret is another one")
        wanted = _proof(self._secret, b"server", self._theirs, self._nonce, self._binding)
        if not hmac.compare_digest(verdict[1:], wanted):
            raise Refused("the server did not prove that it knows the cluster's secret")


def _proof(secret: bytes, role: bytes, server: bytes, client: bytes, binding: bytes) -> bytes:
    return hmac.new(secret, role + server + client + binding, hashlib.sha256).digest()


def _check_magic(data: bytes, who: str) -> None:
    if data[: len(MAGIC)] == MAGIC:
        return
    if data[: len(MAGIC)] == TLS_WANTED[: len(MAGIC)]:
        raise ProtocolError(f"the {who} wants TLS: give this process tls= too")
    if data[:2] == b"\x16\x03":
        raise ProtocolError(f"the {who} speaks TLS, and this process has no tls=")
    if data[:8] == MAGIC[:8]:
        theirs = int.from_bytes(data[8:10], "little")
        raise ProtocolError(f"the {who} speaks protocol {theirs}, this process {PROTOCOL}")
    raise ProtocolError(f"the {who} is not paceline: it sent {data[:10]!r}")
