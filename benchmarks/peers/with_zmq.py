"""ZeroMQ from Python, as a raw transport: request and reply, push and pull, without copies.

zeromq.org, pyzmq.readthedocs.io ("copy=False"): arrays are sent from where they are and received as
frames; two threads of input and output; Unix sockets on the host, TCP on loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq
from peer import (
    PRODUCERS,
    READERS,
    ROOM,
    Round,
    Sight,
    Source,
    crew,
    free_ports,
    items,
    published,
    repeated,
    serve,
    taken,
)


def hosted(place: str) -> None:
    """A server that keeps what it was given last."""
    sock = zmq.Context(io_threads=2).socket(zmq.REP)
    sock.bind(place)
    kept: Any = b""
    while True:
        what, *rest = sock.recv_multipart(copy=False)
        if rest:
            kept = rest[0]
        sock.send(what.bytes if rest or what.bytes == b"x" else kept, copy=False)


def line(place: str) -> Any:
    """A line to the server."""
    sock = zmq.Context(io_threads=2).socket(zmq.REQ)
    sock.connect(place)
    return sock


@contextmanager
def served(place: str) -> Iterator[Any]:
    """A line to a server in a process of its own."""
    with subprocess.Popen([sys.executable, __file__, "server", place]) as process:
        yield line(place)
        process.kill()


def place_in(folder: str) -> str:
    """A Unix socket in a folder."""
    return f"ipc://{folder}/socket"


@contextmanager
def call() -> Iterator[Round]:
    """A byte to the server and back."""
    with tempfile.TemporaryDirectory() as folder, served(place_in(folder)) as sock:

        def trip() -> None:
            sock.send(b"x")
            sock.recv()

        yield lambda cores, seconds: repeated(trip, seconds)


def read_from(sock: Any) -> Any:
    """What the server keeps."""
    sock.send(b"r")
    return np.frombuffer(sock.recv(copy=False).buffer, np.float32)


def reader(index: int, place: str) -> Callable[..., None]:
    """Asks for the bytes, which come into its own memory."""
    sock, sight = line(place), Sight()

    def read(nbytes: int, mode: str, number: float) -> None:
        sight.take(read_from(sock), "fresh", number)

    return read


@contextmanager
def publish() -> Iterator[Round]:
    """The bytes to the server, and from there to each reader."""
    with tempfile.TemporaryDirectory() as folder, served(place_in(folder)) as sock:

        def assign(array: Any, number: float) -> None:
            sock.send_multipart([b"w", array], copy=False)
            sock.recv()

        with crew(READERS, reader, place_in(folder)) as readers:
            yield published(assign, readers, Source())


@contextmanager
def tcp() -> Iterator[Round]:
    """The same by one process, over TCP."""
    source = Source()
    with served(f"tcp://127.0.0.1:{free_ports(1)[0]}") as sock:

        def made(nbytes: int) -> dict[str, float]:
            array = source.next(nbytes)
            began = time.perf_counter()
            sock.send_multipart([b"w", array], copy=False)
            sock.recv()
            there = time.perf_counter()
            got = read_from(sock)
            end = time.perf_counter()
            assert got[0] == source.number
            return {"publish": there - began, "read": end - there, "seconds": end - began}

        yield made


def producer(index: int, place: str) -> Callable[..., None]:
    """Sends arrays, several at once as the parts of one message."""
    sock = zmq.Context().socket(zmq.PUSH)
    sock.set_hwm(ROOM)
    sock.connect(place)

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        several = [each["observation"] for each in items(nbytes, at_once, kind)]
        for _ in range(turns):
            sock.send_multipart(several, copy=False)

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """Push and pull: no trees, no bound in bytes, one consumer."""
    with tempfile.TemporaryDirectory() as folder:
        sock = zmq.Context(io_threads=2).socket(zmq.PULL)
        sock.set_hwm(ROOM)
        sock.bind(place_in(folder))

        def take(nbytes: int, at_once: int, kind: str, rest: int) -> int:
            parts = sock.recv_multipart(copy=False)
            return len([np.frombuffer(part.buffer, np.float32) for part in parts])

        with crew(PRODUCERS, producer, place_in(folder)) as producers:
            yield taken(producers, take)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        hosted(sys.argv[2])
    serve(call=call, publish=publish, tcp=tcp, queue=queue)
    os._exit(0)  # What was sent and not received must not keep it.
