"""torch.distributed.rpc: a process that holds the parameters, and functions that are called there.

docs.pytorch.org/docs/stable/rpc.html, and the tutorial "Implementing a Parameter Server Using
Distributed RPC Framework". TensorPipe chooses shared memory between processes of one host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peer import READERS, Crew, Round, Sight, Source, free_ports, published, repeated, serve
from torch.distributed import rpc

held: list[torch.Tensor] = []


def empty() -> None:
    """Do nothing."""


def keep(value: torch.Tensor) -> None:
    """Make it the newest."""
    held[:] = [value]


def newest() -> torch.Tensor:
    """What was kept."""
    return held[0]


def add(value: torch.Tensor) -> None:
    """In place."""
    held[0].add_(value)


def join(name: str, rank: int, world: int, port: int) -> None:
    """Take part, once all are there."""
    torch.set_num_threads(1 if name != "ps" else os.cpu_count() or 1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=16, rpc_timeout=120, init_method=f"tcp://127.0.0.1:{port}"
    )
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def member(index: int, world: int, port: int) -> Callable[..., None]:
    """The holder is the first, the others read."""
    join("ps" if index == 0 else f"reader{index}", index + 1, world, port)
    sight = Sight()

    def read(nbytes: int, mode: str, number: float) -> None:
        sight.take(rpc.rpc_sync("ps", newest).numpy(), "fresh", number)

    return read


class Readers:
    """All members but the holder."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    def tell(self, count: int, **what: Any) -> None:
        """The first of them."""
        for line in self.crew._lines[1 : count + 1]:
            line.send(what)

    def hear(self, count: int) -> list[float]:
        """The same."""
        return [line.recv() for line in self.crew._lines[1 : count + 1]]


@contextmanager
def joined(members: int) -> Iterator[Crew]:
    """The holder and readers, and this process."""
    (port,) = free_ports(1)
    crew = Crew(members, member, members + 1, port)
    try:
        join("chief", 0, members + 1, port)
        crew.ready()
        yield crew
    finally:
        rpc.shutdown(graceful=False)
        crew.close()


@contextmanager
def call() -> Iterator[Round]:
    """A function that does nothing."""
    with joined(1):
        yield lambda cores, seconds: repeated(lambda: rpc.rpc_sync("ps", empty), seconds)


@contextmanager
def publish() -> Iterator[Round]:
    """The tensor as an argument; and as what a function returns."""
    with joined(1 + READERS) as crew:

        def put(array: Any, number: float) -> None:
            rpc.rpc_sync("ps", keep, (torch.from_numpy(array),))

        yield published(put, Readers(crew), Source())


@contextmanager
def push() -> Iterator[Round]:
    """A function that adds its argument."""
    source = Source()
    with joined(1):

        def made(nbytes: int, seconds: float) -> dict[str, float]:
            value = torch.from_numpy(source.next(nbytes))
            rpc.rpc_sync("ps", keep, (value,))
            return repeated(lambda: rpc.rpc_sync("ps", add, (value,)), seconds)

        yield made


@contextmanager
def start() -> Iterator[Round]:
    """Four workers, until all have joined; in a fresh process, for a process can join only once."""

    def made() -> dict[str, float]:
        command = [sys.executable, __file__, "started"]
        return {"seconds": float(subprocess.check_output(command))}

    yield made


def started() -> None:
    """Print the seconds that it takes."""
    began = time.perf_counter()
    with joined(4):
        print(time.perf_counter() - began)


@contextmanager
def memory() -> Iterator[Round]:
    """The same, kept."""
    with joined(4):
        yield dict


if __name__ == "__main__":
    if sys.argv[1] == "started":
        started()
        sys.exit()
    serve(call=call, publish=publish, push=push, start=start, memory=memory)
