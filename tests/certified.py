"""Certificates for tests, and the two ends of an encrypted connection."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

from calls import Call
from wires import ends

from paceline import Tls
from paceline.transports.base import HeapArena
from paceline.transports.tls_channel import TlsChannel

CERTIFICATES = Path(__file__).parent / "certificates"


def files(folder: Path, name: str | None = "server", ca: str | None = "ca") -> Tls:
    """The certificate of that name, its key, and that `ca`, as a user has them."""
    for path in CERTIFICATES.glob("*.pem"):
        shutil.copy(path, folder)
    for path in CERTIFICATES.glob("*.key"):
        (folder / path.name).touch(mode=0o600)
        (folder / path.name).write_bytes(path.read_bytes())
    authority = None if ca is None else folder / f"{ca}.pem"
    if name is None:
        return Tls(ca=authority)
    return Tls(folder / f"{name}.pem", folder / f"{name}.key", authority)


def sockets() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """The server's end and the client's of a connection that has just been encrypted."""
    one, two = ends()
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.num_tickets = 0
    accepting.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    calling = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    accepted = Call(accepting.wrap_socket, one, True)
    called = calling.wrap_socket(two, server_hostname="127.0.0.1")
    server: ssl.SSLSocket = accepted.outcome()
    return server, called


def tls_pair() -> tuple[TlsChannel, TlsChannel]:
    """Both ends, which may wait."""
    one, two = sockets()
    return TlsChannel(one, HeapArena(), waits=True), TlsChannel(two, HeapArena(), waits=True)
