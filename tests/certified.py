"""Certificates for tests, and the two ends of an encrypted connection."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

from calls import Call
from wires import ends

from paceline import Tls
from paceline.transports.base import HeapArena
from paceline.transports.encrypted import Encrypted
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


def sockets() -> tuple[Encrypted, Encrypted]:
    """The server's end and the client's of a connection that has just been encrypted."""
    one, two = ends()
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.num_tickets = 0
    accepting.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    calling = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    server = Encrypted(one, accepting)
    accepted = Call(shaken, server)
    client = Encrypted(two, calling, "127.0.0.1")
    shaken(client)
    accepted.outcome()
    return server, client


def shaken(end: Encrypted) -> None:
    """Shake hands, waiting for the other end."""
    while not end.shake():
        """It waits for bytes."""


def tls_pair() -> tuple[TlsChannel, TlsChannel]:
    """Both ends, which may wait."""
    one, two = sockets()
    return TlsChannel(one, HeapArena(), waits=True), TlsChannel(two, HeapArena(), waits=True)
