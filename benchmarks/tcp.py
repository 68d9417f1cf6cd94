"""All over TCP on loopback: variables of any size beside a raw socket, a call beside a round trip.

And encrypted: the same beside what is not.
"""

from __future__ import annotations

import copy
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from measure import MB, Effort, Figure, compare, seconds
from served import SECRET

import paceline
from paceline.core import messages as m

CERTIFICATES = Path(__file__).parent.parent / "tests" / "certificates"

SERVER = """
import sys
from paceline import Tls
from paceline.server.loop import Server
from paceline.transports.tcp import TcpListener
tls = Tls(*sys.argv[2:]) if sys.argv[2:] else None
listener = TcpListener("127.0.0.1:0", tls=tls)
server = Server([listener], sys.argv[1].encode())
print(listener.place, flush=True)
server.serve()
"""

RAW = """
import socket, sys
import numpy as np
size = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
memory = memoryview(np.ones(size, np.uint8).data)
while what := sock.recv(1):
    if what == b"w":
        filled = 0
        while filled < size:
            filled += sock.recv_into(memory[filled:])
        sock.send(b"d")
    elif what == b"r":
        sock.sendall(memory)
    else:
        sock.send(what)
"""


def measure(effort: Effort) -> Iterator[Figure]:
    """Assign and read_into of variables from 1 MB on, and a small call."""
    for megabytes in (1,) if effort.quick else (1, 16, 64, 256):
        yield from sized(effort, megabytes * MB)
    if effort.large:
        yield from sized(effort, 1024 * MB)
    yield calls(effort)
    yield from encrypted(effort, (1 if effort.quick else 64) * MB)


def sized(effort: Effort, size: int) -> Iterator[Figure]:
    """Assign and read_into of a variable, beside the same bytes through a socket."""
    source = np.random.default_rng(0).random(size // 8)
    target = np.zeros_like(source)
    times = max(1, min(64, 192 * MB // size))
    with served() as session, raw(size) as sock:
        large = session.variable("large", source)
        memory, place = memoryview(source).cast("B"), memoryview(target).cast("B")

        def read_into() -> None:
            # A new handle has read nothing yet, so it has to ask.
            copy.copy(large).read_into(target)

        def write_raw() -> None:
            sock.send(b"w")
            sock.sendall(memory)
            sock.recv(1)

        def read_raw() -> None:
            sock.send(b"r")
            filled = 0
            while filled < size:
                filled += sock.recv_into(place[filled:])

        def speed(run: Callable[[], object]) -> Callable[[], float]:
            for _ in range(3):
                run()  # The server's memory has then been used before.
            return lambda: size / seconds(run, times) / 1e9

        for what, run, limit in (
            (f"TCP: assign of {size // MB} MB", lambda: large.assign(source), write_raw),
            (f"TCP: read_into of {size // MB} MB", read_into, read_raw),
        ):
            yield compare(
                what, speed(run), "raw socket", speed(limit), "GB/s", ">= 0.8", effort
            )  # fmt: skip


def encrypted(effort: Effort, size: int) -> Iterator[Figure]:
    """Assign and read_into through TLS, beside the same without."""
    source = np.random.default_rng(0).random(size // 8)
    target = np.zeros_like(source)
    with tempfile.TemporaryDirectory() as folder, served() as plain:
        files = [shutil.copy(CERTIFICATES / name, folder) for name in ("server.pem", "server.key")]
        os.chmod(files[1], 0o600)
        with served(*files) as session:
            one, two = session.variable("large", source), plain.variable("large", source)

            def speed(run: Callable[[], object]) -> Callable[[], float]:
                run()
                return lambda: size / seconds(run, 3) / 1e9

            for what, run, beside in (
                ("assign", lambda: one.assign(source), lambda: two.assign(source)),
                (
                    "read_into",
                    lambda: copy.copy(one).read_into(target),
                    lambda: copy.copy(two).read_into(target),
                ),
            ):
                yield compare(
                    f"TLS: {what} of {size // MB} MB", speed(run), "TCP without", speed(beside),
                    "GB/s", ">= 0.2", effort,
                )  # fmt: skip


def calls(effort: Effort) -> Figure:
    """Round trips with both ends on one core, where the scheduler has no say."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with served() as session, raw(1) as sock:
            session.variable("scalar", 1.0)
            connection, request = session.connection, m.Await("scalar", 0.0)
            times = effort.times(2000)

            def trip() -> None:
                sock.send(b"x")
                sock.recv(1)

            return compare(
                "TCP: call, both ends on one core",
                lambda: 1e6 * seconds(lambda: connection.call(request), times),
                "raw round trip", lambda: 1e6 * seconds(trip, times), "us", "<= 2", effort,
            )  # fmt: skip
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def served(*files: str) -> Iterator[paceline.Session]:
    """A session on a fresh server that listens on loopback; encrypted, with a certificate."""
    command = [sys.executable, "-c", SERVER, SECRET.decode(), *files]
    tls = paceline.Tls(ca=CERTIFICATES / "ca.pem") if files else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            place = child.stdout.readline().strip()
            with paceline.Session(f"tcp:{place}", secret=SECRET, tls=tls) as session:
                yield session
        finally:
            child.kill()


@contextmanager
def raw(size: int) -> Iterator[socket.socket]:
    """A connection to a process that takes and gives so many bytes, in plain Python."""
    command = [sys.executable, "-c", RAW, str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            with socket.create_connection(("127.0.0.1", int(child.stdout.readline()))) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield sock
        finally:
            child.kill()
