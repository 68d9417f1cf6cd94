"""Within one host: headers over a Unix socket, large buffers in shared memory."""

from __future__ import annotations

import os
import socket
import stat
import struct

from paceline.core.errors import Refused
from paceline.transports.base import Arena, Transport
from paceline.transports.greeting import Greeting, authenticated
from paceline.transports.shared import SharedArena
from paceline.transports.unix_channel import UnixChannel


def connect(place: str, secret: bytes, timeout: float | None) -> UnixChannel:
    """Connect to the server at a path, or at `@name` without a file, and prove the secret.

    Raises:
        Disconnected: nobody listens there.
        Refused: one of the two does not know the other's secret, or speaks another protocol.
    """
    name = socket_name(place)

    def reached() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(name)
        except BaseException:
            sock.close()
            raise
        return sock

    return UnixChannel(authenticated(f"unix:{place}", reached, secret), waits=True)


class UnixListener:
    """A server's ear at one address. A socket file that nobody listens to any more is replaced."""

    local = True

    def __init__(self, place: str, sock: socket.socket | None = None) -> None:
        self.place = place
        self._sock = sock or _bound(place)
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._sock.fileno()

    def accept(self, secret: bytes, arena: Arena) -> Greeting | None:
        """Take a connection that is not authenticated yet; `None` when there is none.

        A process of another user, root excepted, is not listened to: a name without a file has no
        permissions of its own.
        """
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return None
        process, user = _peer(sock)
        if user not in (os.getuid(), 0):
            sock.close()
            return None
        try:
            return Greeting(sock, secret, lambda sock: UnixChannel(sock, waits=False), process)
        except OSError:
            # It has left already.
            sock.close()
            return None

    def hand_over(self) -> None:
        """Let go of the socket, which another process that inherited it goes on listening at."""
        self._sock.close()

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        self._sock.close()
        if not self.place.startswith("@"):
            try:
                os.unlink(self.place)
            except FileNotFoundError:
                return


def socket_name(place: str) -> str:
    """The kernel's name of a socket address.

    Raises:
        Refused: the path is longer than the kernel takes.
    """
    length = len(os.fsencode(place))
    if length > 107:
        raise Refused(
            f"the socket path is {length} bytes long, the kernel takes 107: {place}; choose a"
            " shorter folder, or `unix:@name`, which needs no file"
        )
    return "\0" + place[1:] if place.startswith("@") else place


def _bound(place: str) -> socket.socket:
    name = socket_name(place)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(name)
        except OSError:
            if place.startswith("@") or not _stale(name):
                raise
            os.unlink(name)
            sock.bind(name)
        if not place.startswith("@"):
            os.chmod(name, 0o600)
        sock.listen(128)
    except OSError as e:
        sock.close()
        raise Refused(f"cannot listen at unix:{place}: {e.strerror}") from e
    return sock


def _peer(sock: socket.socket) -> tuple[str, int]:
    """The process at the other end and its user, where the kernel tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return "a process", os.getuid()
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"process {pid}", user


def _stale(name: str) -> bool:
    """Whether it is a socket that nobody listens to: anything else there is somebody's file."""
    try:
        if not stat.S_ISSOCK(os.stat(name).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


TRANSPORT = Transport(connect=connect, arena=SharedArena, listen=UnixListener)
