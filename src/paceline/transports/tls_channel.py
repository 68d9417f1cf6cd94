"""One end of an encrypted TCP connection: the same frames, through TLS."""

from __future__ import annotations

import socket
from typing import cast

from paceline.transports.base import Arena
from paceline.transports.encrypted import AT_ONCE, Encrypted
from paceline.transports.tcp_channel import TcpChannel


class TlsChannel(TcpChannel):
    """One end of an authenticated, encrypted connection between any two hosts."""

    def __init__(self, sock: Encrypted, arena: Arena, *, waits: bool) -> None:
        self._tls = sock
        sock.at_once = AT_ONCE
        super().__init__(cast(socket.socket, sock), arena, waits=waits)

    def _receive_ready(self, flags: int = 0) -> bool:
        ready = super()._receive_ready(flags)
        # What was taken from the socket is taken in now: whoever waits next waits for the socket.
        self._tls.at_once = 0
        try:
            while not self._tls.exhausted:
                super()._receive_ready(socket.MSG_DONTWAIT)
        finally:
            self._tls.at_once = AT_ONCE
        return ready
