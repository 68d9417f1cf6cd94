"""A relay between sessions and a server, which cuts, loses, repeats and delays what it carries."""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from paceline.core.closing import Closing
from paceline.core.errors import Unsupported

Hurt = Literal["", "lose", "repeat", "tear"]

MOST = 1 << 20
"""Bytes that wait for one end, from which on no more is read from the other."""

PIECE = 1 << 16

QUIET = 0.02
"""Seconds after a server's last byte from which on its reply counts as whole."""

_READ = select.POLLIN | select.POLLHUP | select.POLLERR
_WRITE = select.POLLOUT | select.POLLHUP | select.POLLERR


class Relay(Closing):
    """Carries the connections of sessions to a server over TCP, and hurts them when told.

    `target` is what a session opens in the place of the server's own; the secret is the server's,
    which the relay does not know. Closing it cuts all connections. A server that is started again
    at its address is reached by the connections made from then on.

    Raises:
        Unsupported: the server is not reached over TCP. Over a Unix socket memory is passed along.
    """

    def __init__(self, server: str, *, port: int = 0) -> None:
        if not server.startswith("tcp:"):
            raise Unsupported(f"a relay carries connections over TCP, not to {server!r}")
        host, _, number = server.removeprefix("tcp:").rpartition(":")
        self._server = (host.strip("[]"), int(number))
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self.target = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried = 0
        """How many connections there have been."""
        self.delay = 0.0
        """Seconds that whatever is read from now on waits before it is passed on."""
        self._pairs: list[_Pair] = []
        self._asked: deque[Callable[[], object]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="paceline-relay", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Cut every connection now, both ways together."""
        self._ask(self._end_pairs)

    def lose(self) -> None:
        """Lose the next reply on each connection: it is cut when the server has sent one."""
        self._hurt("lose")

    def repeat(self) -> None:
        """Let the next reply on each connection arrive, and cut it before the server hears so.

        The server has it ready then, to send it again over the next connection.
        """
        self._hurt("repeat")

    def tear(self) -> None:
        """Let half of the next reply on each connection arrive, and cut it then."""
        self._hurt("tear")

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._thread.is_alive():
            self._ask(self._end)
            self._thread.join()

    def _hurt(self, how: Hurt) -> None:
        def hurt() -> None:
            for pair in self._pairs:
                pair.hurt = how

        self._ask(hurt)

    def _ask(self, command: Callable[[], object]) -> None:
        """Have a command carried out by the relay's thread; returns when it has been."""
        done = threading.Event()

        def run() -> None:
            command()
            done.set()

        self._asked.append(run)
        with suppress(OSError):
            self._waker.send(b"!")
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def _end_pairs(self) -> None:
        for pair in self._pairs:
            pair.end()

    def _end(self) -> None:
        self._over = True

    def _run(self) -> None:
        try:
            while not self._over:
                self._step()
        finally:
            self._end_pairs()
            for one in (self._listener, self._woken, self._waker):
                one.close()

    def _step(self) -> None:
        found = self._look()
        if found.get(self._woken.fileno()):
            self._woken.recv(PIECE)
            while self._asked:
                self._asked.popleft()()
        if found.get(self._listener.fileno()):
            self._accept()
        for pair in self._pairs:
            pair.step(found, self.delay)
        self._pairs = [pair for pair in self._pairs if not pair.over]

    def _look(self) -> dict[int, int]:
        """Wait for what there is to do: descriptors and their events."""
        now, wait = time.monotonic(), 0.5
        wanted: defaultdict[int, int] = defaultdict(int)
        for one in (self._listener, self._woken):
            wanted[one.fileno()] = select.POLLIN
        for pair in self._pairs:
            for half in pair.halves:
                if half.size < MOST and not half.over:
                    wanted[half.source.fileno()] |= select.POLLIN
                if half.waiting and half.waiting[0][0] <= now:
                    wanted[half.sink.fileno()] |= select.POLLOUT
                elif half.waiting:
                    wait = min(wait, half.waiting[0][0] - now)
            if not pair.replies.waiting:
                wait = min(wait, pair.ends - now)
        poll = select.poll()
        for descriptor, events in wanted.items():
            poll.register(descriptor, events)
        return dict(poll.poll(1000 * max(0.0, wait)))

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            # Whoever it was has gone.
            return
        try:
            server = socket.create_connection(self._server, timeout=1.0)
        except OSError:
            client.close()
            return
        self.carried += 1
        self._pairs.append(_Pair(client, server))


class _Half:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.waiting: deque[tuple[float, memoryview]] = deque()
        self.size = 0
        self.over = False

    def read(self) -> bytes:
        try:
            data = self.source.recv(PIECE)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.over = not data
        return data

    def put(self, data: bytes, delay: float) -> None:
        self.waiting.append((time.monotonic() + delay, memoryview(data)))
        self.size += len(data)

    def write(self) -> None:
        due, data = self.waiting.popleft()
        try:
            count = self.sink.send(data)
        except BlockingIOError:
            count = 0
        except OSError:
            self.over = True
            self.waiting.clear()
            return
        self.size -= count
        if count < len(data):
            self.waiting.appendleft((due, data[count:]))


class _Pair:
    """A connection, and the relay's own to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._ends = (client, server)
        for one in self._ends:
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.requests, self.replies = _Half(client, server), _Half(server, client)
        self.halves = (self.requests, self.replies)
        self.hurt: Hurt = ""
        self.ends = math.inf
        """When it is cut, if all replies have been passed on; no request is, once this is known."""
        self.over = False

    def step(self, found: Mapping[int, int], delay: float) -> None:
        """Carry what can be carried."""
        for half in self.halves:
            if not self.over and found.get(half.source.fileno(), 0) & _READ:
                self._read(half, delay)
            if not self.over and half.waiting and found.get(half.sink.fileno(), 0) & _WRITE:
                half.write()
        done = any(half.over and not half.waiting for half in self.halves)
        if done or (not self.replies.waiting and time.monotonic() >= self.ends):
            self.end()

    def _read(self, half: _Half, delay: float) -> None:
        data = half.read()
        if not data:
            return
        if half is self.requests:
            if self.ends == math.inf:
                half.put(data, delay)
        elif self.hurt == "repeat":
            half.put(data, 0.0)
            self.ends = time.monotonic() + QUIET
        elif self.hurt == "tear":
            if self.ends == math.inf:
                # Behind what is on its way already.
                half.put(data[: (len(data) + 1) // 2], 0.0)
                self.ends = time.monotonic()
        elif self.hurt == "lose":
            self.end()
        else:
            half.put(data, delay)

    def end(self) -> None:
        self.over = True
        for one in self._ends:
            one.close()
