"""gRPC from Python, as a raw transport: unary calls with bytes, no protocol buffers, no limits.

grpc.github.io/grpc/python; one channel for each process, the server with a pool of threads, over
a Unix socket on the host and over TCP on loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from peer import READERS, Round, Sight, Source, crew, published, repeated, serve

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def hosted(place: str) -> None:
    """A server that keeps what it was given last, until standard input ends."""
    kept = [b""]

    def assign(request: bytes, _: Any) -> bytes:
        kept[0] = request
        return b""

    handlers = {
        "echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
        "assign": grpc.unary_unary_rpc_method_handler(assign),
        "read": grpc.unary_unary_rpc_method_handler(lambda *_: kept[0]),
    }
    server = grpc.server(ThreadPoolExecutor(16), options=UNLIMITED)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("peer", handlers)])
    server.add_insecure_port(place)
    server.start()
    sys.stdin.read()
    os._exit(0)


@contextmanager
def served(place: str) -> Iterator[grpc.Channel]:
    """A channel to a server in a process of its own."""
    command = [sys.executable, __file__, "server", place]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        with grpc.insecure_channel(place, UNLIMITED) as channel:
            grpc.channel_ready_future(channel).result(60)
            yield channel
        process.kill()


def unix(folder: str) -> str:
    """A socket in a folder."""
    return f"unix:{folder}/socket"


@contextmanager
def call() -> Iterator[Round]:
    """A call with a few bytes."""
    with tempfile.TemporaryDirectory() as folder, served(unix(folder)) as channel:
        echo = channel.unary_unary("/peer/echo")
        yield lambda cores, seconds: repeated(lambda: echo(b"x"), seconds)


def reader(index: int, place: str) -> Callable[..., None]:
    """Asks for the bytes."""
    ask = grpc.insecure_channel(place, UNLIMITED).unary_unary("/peer/read")
    sight = Sight()

    def read(nbytes: int, mode: str, number: float) -> None:
        sight.take(np.frombuffer(ask(b""), np.float32), "fresh", number)

    return read


@contextmanager
def publish() -> Iterator[Round]:
    """The bytes to the server, and from there to each reader."""
    with tempfile.TemporaryDirectory() as folder, served(unix(folder)) as channel:
        assign = channel.unary_unary("/peer/assign")
        with crew(READERS, reader, unix(folder)) as readers:
            yield published(lambda array, _: assign(array.tobytes()), readers, Source())


@contextmanager
def tcp() -> Iterator[Round]:
    """The same by one process, over TCP."""
    from peer import free_ports

    source = Source()
    with served(f"127.0.0.1:{free_ports(1)[0]}") as channel:
        assign, read = channel.unary_unary("/peer/assign"), channel.unary_unary("/peer/read")

        def made(nbytes: int) -> dict[str, float]:
            array = source.next(nbytes)
            began = time.perf_counter()
            assign(array.tobytes())
            there = time.perf_counter()
            got = np.frombuffer(read(b""), np.float32)
            end = time.perf_counter()
            assert got[0] == source.number
            return {"publish": there - began, "read": end - there, "seconds": end - began}

        yield made


if __name__ == "__main__":
    if sys.argv[1] == "server":
        hosted(sys.argv[2])
    serve(call=call, publish=publish, tcp=tcp)
