"""Servers in threads of their own, and a wire that can be cut anywhere."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Any, TypeVar

from calls import DEADLINE_SECONDS

from paceline.server.loop import LINGER, Server
from paceline.session import Session
from paceline.transports.base import HeapArena
from paceline.transports.shared import SharedArena
from paceline.transports.tcp import TcpListener, host_and_port
from paceline.transports.tcp_channel import TcpChannel

SECRET = b"secret"

C = TypeVar("C", bound=TcpChannel)


def ends() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@contextmanager
def server_and_client(kind: Callable[..., C], one: Any, two: Any) -> Iterator[tuple[C, C]]:
    """An end that never waits, as a server's, and the client's end of the same connection."""
    arena = SharedArena()
    server = kind(one, arena, waits=False)
    client = kind(two, HeapArena(), waits=True)
    yield server, client
    server.close()
    client.close()
    arena.close()


@contextmanager
def serve(
    *listeners: Any, secret: bytes = SECRET, linger: float = LINGER, **options: Any
) -> Iterator[Server]:
    """A server at these listeners, in a thread of its own."""
    server = Server(listeners, secret, linger=linger, **options)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE_SECONDS)
        server.close()


class Wire:
    """Carries connections to a server, and cuts each after so many bytes, both ways together.

    Attributes:
        carried: how many connections there have been.
        refuses: whether new ones are dropped at once.
        deaf: whether bytes are left where they are.
    """

    def __init__(self, place: str, bytes_of: Iterable[int | None] = repeat(None)) -> None:
        self.carried = 0
        self.refuses = False
        self.deaf = False
        self._bytes_of = iter(bytes_of)
        self._server = host_and_port(place)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._woken, self._waker = socket.socketpair()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._left: dict[socket.socket, int | None] = {}
        self._kept: list[socket.socket] = []
        self._said = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def session(self, **options: Any) -> Session:
        """A session over this wire."""
        return Session(f"tcp:{self.place}", secret=SECRET, **options)

    def cut(self) -> None:
        """Cut all connections now."""
        self._say("c")

    def drop_clients(self) -> None:
        """Cut all connections at the clients' ends; the server hears nothing of it."""
        self._say("d")

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._thread.is_alive():
            self._say("e")
            self._thread.join(DEADLINE_SECONDS)
        for one in (self._listener, self._woken, self._waker, *self._pairs, *self._kept):
            one.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, what: str) -> None:
        self._waker.send(what.encode())

    def _run(self) -> None:
        while True:
            reading = [self._listener, self._woken]
            if not self.deaf:
                reading += list(self._pairs)
            ready, _, _ = select.select(reading, [], [], 0.05)
            if self._woken in ready:
                for what in self._woken.recv(4096).decode():
                    if what == "e":
                        return
                    for one in list(self._left):
                        self._end(one, quietly=what == "d")
            if self._listener in ready:
                self._accept()
            for one in ready:
                if one in self._pairs:
                    self._carry(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.refuses:
            client.close()
            return
        self.carried += 1
        server = socket.create_connection(self._server)
        self._pairs |= {client: server, server: client}
        self._left[client] = next(self._bytes_of)

    def _carry(self, one: socket.socket) -> None:
        client = one if one in self._left else self._pairs[one]
        left = self._left[client]
        with suppress(OSError):
            data = one.recv(1 << 16 if left is None else min(left, 1 << 16))
            if data:
                self._pairs[one].sendall(data)
                if left is None:
                    return
                self._left[client] = left - len(data)
                if left > len(data):
                    return
        self._end(client)

    def _end(self, client: socket.socket, *, quietly: bool = False) -> None:
        server = self._pairs[client]
        del self._left[client], self._pairs[client], self._pairs[server]
        # Half of them by a reset, which also throws away what has arrived and was not read.
        if self.carried % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        if quietly:
            self._kept.append(server)
        else:
            server.close()


@contextmanager
def wired(
    bytes_of: Iterable[int | None] = repeat(None), *, linger: float = LINGER
) -> Iterator[tuple[Server, Wire]]:
    """A server, and a wire to it."""
    listener = TcpListener("127.0.0.1:0")
    with serve(listener, linger=linger) as server, Wire(listener.place, bytes_of) as wire:
        yield server, wire
