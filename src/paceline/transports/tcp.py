"""Between hosts, or within one: everything over TCP."""

from __future__ import annotations

import ipaddress
import socket
from functools import partial

from paceline.core.errors import Disconnected, Refused, UnknownName
from paceline.transports.base import Arena, Transport
from paceline.transports.encrypted import Encrypted
from paceline.transports.greeting import Greeting, authenticated
from paceline.transports.kept import KeptArena
from paceline.transports.lasting import LastingChannel
from paceline.transports.tcp_channel import TcpChannel
from paceline.transports.tls import Tls, encrypted
from paceline.transports.tls_channel import TlsChannel


def connect(
    place: str,
    secret: bytes,
    timeout: float | None,
    tls: Tls | None = None,
    arena: Arena | None = None,
) -> TcpChannel:
    """Connect to the server at `host:port`, encrypted with `tls`, and prove the secret.

    Proxy settings of the environment are ignored. What arrives over it lies in `arena`, by default
    in this process's own memory.

    Raises:
        UnknownName: that is no place.
        Disconnected: nobody listens there.
        Refused: one of the two does not know the other's secret, speaks another protocol, or will
            not have the other's certificate.
    """
    address = host_and_port(place)
    context = None if tls is None else tls.client()

    def reached() -> socket.socket | Encrypted:
        sock = not_itself(socket.create_connection(address, timeout))
        return sock if context is None else encrypted(sock, context, address[0])

    sock = authenticated(f"tcp:{place}", reached, secret)
    if isinstance(sock, Encrypted):
        return TlsChannel(sock, arena or KeptArena(), waits=True)
    return TcpChannel(sock, arena or KeptArena(), waits=True)


def lasting(
    place: str,
    secret: bytes,
    timeout: float | None,
    tls: Tls | None = None,
    arena: Arena | None = None,
) -> LastingChannel:
    """A channel to that server that can make more connections to it; raises as `connect`."""
    again = partial(connect, place, secret, tls=tls, arena=arena)
    return LastingChannel(connect(place, secret, timeout, tls, arena), again)


class TcpListener:
    """A server's ear at one address, and at no other. Port 0 is one that the kernel chooses.

    `place` is the address it really has. With `tls` all that goes over it is encrypted.
    """

    def __init__(
        self, place: str, sock: socket.socket | None = None, tls: Tls | None = None
    ) -> None:
        self._certified = None if tls is None else tls.server()
        self._sock = sock or _bound(place)
        self._sock.setblocking(False)
        host, port = self._sock.getsockname()[:2]
        self.place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        """Whether only this host can reach it."""

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    def accept(self, secret: bytes, arena: Arena) -> Greeting | None:
        """Take a connection that is not authenticated yet; `None` when there is none.

        What arrives over it will lie in `arena`.
        """
        try:
            sock, (host, *_) = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        try:
            kind = TcpChannel if self._certified is None else TlsChannel
            opened = partial(kind, arena=arena, waits=False)
            return Greeting(sock, secret, opened, host, self._certified)
        except OSError:
            # It has left already.
            sock.close()
            return None

    def hand_over(self) -> None:
        """Let go of the socket, which another process that inherited it goes on listening at."""
        self._sock.close()

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()


def host_and_port(place: str) -> tuple[str, int]:
    """Take `host:port` or `[::1]:port` apart.

    Raises:
        UnknownName: it is neither.
    """
    host, _, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UnknownName(
            f"no address 'tcp:{place}'; it is tcp:host:port, such as tcp:127.0.0.1:4032 or"
            " tcp:[::1]:4032, with a port of 0 to 65535"
        )
    return host, int(port)


def not_itself(sock: socket.socket) -> socket.socket:
    """A connected socket, unless it is joined to itself.

    Where nobody listens, the kernel may choose the very port that is being called.

    Raises:
        Disconnected: it is.
    """
    host, port = sock.getpeername()[:2]
    if sock.getsockname()[:2] == (host, port):
        sock.close()
        raise Disconnected(f"no server at {host}:{port} (it called itself)")
    return sock


def _bound(place: str) -> socket.socket:
    host, port = host_and_port(place)
    sock = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        # A server may start again while old connections are still ending.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as e:
        if sock is not None:
            sock.close()
        raise Refused(f"cannot listen at tcp:{place}: {e.strerror}") from e
    return sock


TRANSPORT = Transport(connect=lasting, arena=KeptArena, listen=TcpListener, encrypts=True)
