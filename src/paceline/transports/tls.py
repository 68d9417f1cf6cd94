"""Encryption of what goes over TCP, with the user's own certificates."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from paceline.core.errors import Disconnected, PacelineError, Refused, SchemaError
from paceline.transports.encrypted import Encrypted

VARIABLES = {"cert": "PACELINE_TLS_CERT", "key": "PACELINE_TLS_KEY", "ca": "PACELINE_TLS_CA"}

File: TypeAlias = str | os.PathLike[str]


class Certified(NamedTuple):
    """What a server encrypts with, and what proofs of the secret are bound to."""

    context: ssl.SSLContext
    binding: bytes


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate files, in PEM, with which a process encrypts what it sends over TCP.

    TLS 1.2 or newer. A session checks the server's certificate, and that it is for the host that it
    called. With a `ca` a server lets in only those who have a certificate too. The secret is proved
    as without TLS, inside, and bound to the server's certificate. Files are read when a server
    starts, and at each connection that a session makes.

    Args:
        cert: this process's certificate, followed by those between it and the `ca`, if any. A
            server needs one, and a session if the server has a `ca`.
        key: its private key, without a password; others may not read the file. By default it is in
            the file `cert`.
        ca: the certificates of those whose signature counts; by default those that the system
            trusts, and a server asks for none.
    """

    cert: File | None = None
    key: File | None = None
    ca: File | None = None

    def client(self) -> ssl.SSLContext:
        """What a session connects with.

        Raises:
            Refused: a file cannot be read or used; the message says which.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is None:
            context.load_default_certs()
        self._fill(context)
        return context

    def server(self) -> Certified:
        """What a server listens with; raises as `client`."""
        if self.cert is None:
            raise Refused("a server with tls= needs a certificate: Tls(cert=, key=)")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.options |= ssl.OP_NO_RENEGOTIATION
        # Nobody takes a connection up again with a ticket.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        self._fill(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        text = _text(self.cert)
        begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
        first = text[text.index(begin) : text.index(end) + len(end)]
        return Certified(context, binding(ssl.PEM_cert_to_DER_cert(first)))

    def _fill(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is not None:
            _text(self.ca)
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as e:
                raise Refused(f"the file {self.ca} has no certificates: {_reason(e)}") from e
        if self.cert is None:
            return
        key = self.key or self.cert
        _text(self.cert)
        _check_private(key)
        try:
            context.load_cert_chain(self.cert, self.key, _no_password)
        except ssl.SSLError as e:
            said = _reason(e)
            raise Refused(f"no certificate and key in {self.cert} and {key}: {said}") from e


def found(tls: Tls | None, named: Mapping[str, str] | None = None) -> Tls | None:
    """The files as given; or as a spec's file names them; or the environment; `None` for none.

    Raises:
        SchemaError: what was given is none.
    """
    if tls is not None:
        if not isinstance(tls, Tls):
            raise SchemaError(f"tls is a paceline.Tls, not {tls!r}")
        return tls
    if not named:
        named = {name: os.environ[var] for name, var in VARIABLES.items() if os.environ.get(var)}
    return Tls(**named) if named else None


def encrypted(sock: socket.socket, context: ssl.SSLContext, host: str) -> Encrypted:
    """A connection to a server, encrypted; raises as `ssl` does, see `told`."""
    made = Encrypted(sock, context, host.partition("%")[0])
    try:
        while not made.shake():
            """The socket waits."""
    except BaseException:
        sock.close()
        raise
    return made


def binding(certificate: bytes | None) -> bytes:
    """What a proof over this connection is bound to: the server's certificate."""
    assert certificate is not None
    return b"tls-server-end-point" + hashlib.sha256(certificate).digest()


def told(error: ssl.SSLError) -> PacelineError | None:
    """What went wrong at the client's end; `None` if the connection may just have broken."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Refused(f"the server's certificate will not do: {error.verify_message}")
    reason = error.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"):
        return Refused("the server speaks no TLS; give it tls= too, or leave it away here")
    if "ALERT" in reason:
        said = reason.partition("ALERT_")[2].lower().replace("_", " ")
        return Refused(f"the server refused this process's certificate, or its TLS: {said}")
    return None


def refused(error: ssl.SSLError) -> str:
    """Why a server refused a connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate will not do: {error.verify_message}"
    if error.reason == "HTTP_REQUEST":
        return "the client speaks HTTP, not TLS"
    return f"no TLS: {_reason(error)}"


def gone(error: ssl.SSLError) -> Disconnected:
    """A connection that broke while TLS was spoken."""
    return Disconnected(f"the connection broke ({_reason(error)})")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or error.strerror or str(error)).lower().replace("_", " ")


def _text(path: File) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 22)
    except OSError as e:
        raise Refused(f"the file {path} of tls= cannot be read: {e.strerror}") from e
    if ssl.PEM_HEADER not in text:
        raise Refused(f"the file {path} of tls= has no certificate in PEM")
    return text


def _check_private(path: File) -> None:
    try:
        mode = os.stat(path).st_mode & 0o777
    except OSError as e:
        raise Refused(f"the file {path} of tls= cannot be read: {e.strerror}") from e
    if mode & 0o007:
        raise Refused(f"the key file {path} has mode {mode:o}: others may use it; chmod 600 it")


def _no_password() -> str:
    raise Refused("the key of tls= has a password, which nobody could type in: store it without")
