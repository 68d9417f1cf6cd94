"""Limits: a plain socket and a copy in memory, without any library."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from peer import Round, Sight, Source, repeated, serve

ECHO = """
import os, socket, sys
if sys.argv[2] != "free":
    os.sched_setaffinity(0, {int(sys.argv[2])})
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(1 << 16):
    sock.send(data)
"""

TAKER = """
import socket, sys
import numpy as np
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
memory = memoryview(bytearray(0))
while head := sock.recv(9, socket.MSG_WAITALL):
    size = int.from_bytes(head[1:], "little")
    if size != len(memory):
        memory = memoryview(np.ones(size, np.uint8).data)
    if head[:1] == b"w":
        filled = 0
        while filled < size:
            filled += sock.recv_into(memory[filled:])
        sock.send(b"d")
    else:
        sock.sendall(memory)
"""


@contextmanager
def call() -> Iterator[Round]:
    """A round trip of 60 bytes over a pair of Unix sockets, both ends in plain Python."""
    cores = sorted(os.sched_getaffinity(0))
    at: dict[str, tuple[Any, Any]] = {}
    message = b"x" * 60

    def made(cores_: str, seconds: float) -> dict[str, float]:
        if cores_ not in at:
            mine, other = socket.socketpair()
            core = {"free": "free", "one": str(cores[0]), "two": str(cores[-1])}[cores_]
            command = [sys.executable, "-c", ECHO, str(other.fileno()), core]
            at[cores_] = mine, subprocess.Popen(command, pass_fds=[other.fileno()])
            other.close()
        mine = at[cores_][0]
        os.sched_setaffinity(0, set(cores) if cores_ == "free" else {cores[0]})

        def trip() -> None:
            mine.send(message)
            mine.recv(1 << 16)

        return repeated(trip, seconds)

    try:
        yield lambda cores, seconds: made(cores, seconds)
    finally:
        for mine, process in at.values():
            mine.close()
            process.wait()


@contextmanager
def publish() -> Iterator[Round]:
    """Copies within one process, of memory in use: one, and one more for each reader."""
    source, middle, sight = Source(), Sight(), Sight()

    def made(nbytes: int, readers: int, mode: str) -> dict[str, float]:
        array = source.next(nbytes)
        middle.room(nbytes), sight.room(nbytes)
        began = time.perf_counter()
        np.copyto(middle.own, array)
        there = time.perf_counter()
        for _ in range(readers):
            sight.take(middle.own, mode, source.number)
        end = time.perf_counter()
        return {
            "publish": there - began,
            "read": (end - there) / readers,
            "seconds": end - began,
        }

    yield made


@contextmanager
def push() -> Iterator[Round]:
    """An addition in place, within one process."""
    source, target = Source(), Sight()

    def made(nbytes: int, seconds: float) -> dict[str, float]:
        array, total = source.next(nbytes), target.room(nbytes)
        return repeated(lambda: np.add(total, array, out=total), seconds)

    yield made


@contextmanager
def tcp() -> Iterator[Round]:
    """The bytes through a TCP socket on loopback, from and into memory in use, and back."""
    source, target = Source(), Sight()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", TAKER, str(listener.getsockname()[1])]
        with subprocess.Popen(command) as process:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def made(nbytes: int) -> dict[str, float]:
                array = memoryview(source.next(nbytes)).cast("B")
                place = memoryview(target.room(nbytes)).cast("B")
                size = nbytes.to_bytes(8, "little")
                began = time.perf_counter()
                sock.sendall(b"w" + size)
                sock.sendall(array)
                sock.recv(1)
                there = time.perf_counter()
                sock.sendall(b"r" + size)
                filled = 0
                while filled < nbytes:
                    filled += sock.recv_into(place[filled:])
                end = time.perf_counter()
                assert target.own[0] == source.number
                return {"publish": there - began, "read": end - there, "seconds": end - began}

            yield made
            sock.close()
            process.wait()


if __name__ == "__main__":
    serve(call=call, publish=publish, push=push, tcp=tcp)
