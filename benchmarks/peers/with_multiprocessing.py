"""The standard library's multiprocessing: pipes, queues and shared memory, put together by hand.

docs.python.org/3/library/multiprocessing.html. What is published goes into one of two shared
memories in turn: nothing keeps a slow reader from seeing parts of two versions.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from peer import (
    PRODUCERS,
    READERS,
    ROOM,
    Round,
    Sight,
    Source,
    crew,
    items,
    published,
    repeated,
    serve,
    taken,
)

spawn = multiprocessing.get_context("spawn")


def echo(line: Any) -> None:
    """Send back what comes."""
    try:
        while True:
            line.send(line.recv())
    except EOFError:
        pass


@contextmanager
def call() -> Iterator[Round]:
    """A number through a pipe, and back."""
    mine, other = spawn.Pipe()
    process = spawn.Process(target=echo, args=(other,), daemon=True)
    process.start()
    other.close()

    def trip() -> None:
        mine.send(1.0)
        mine.recv()

    yield lambda cores, seconds: repeated(trip, seconds)
    mine.close()
    process.join(5)


def mapped(memory: SharedMemory, nbytes: int) -> Any:
    """The memory as an array."""
    return np.frombuffer(memory.buf, np.float32, nbytes // 4)


def reader(index: int) -> Callable[..., None]:
    """Reads from the shared memory that it is told."""
    sight, known = Sight(), dict[str, SharedMemory]()

    def read(nbytes: int, mode: str, number: float, place: str) -> None:
        if place not in known:
            known[place] = SharedMemory(place)
        sight.take(mapped(known[place], nbytes), mode, number)

    return read


class Told:
    """Readers that are told where the version is."""

    def __init__(self, readers: Any) -> None:
        self.readers, self.place = readers, ""
        self.hear = readers.hear

    def tell(self, count: int, **what: Any) -> None:
        """The same, with the place."""
        self.readers.tell(count, place=self.place, **what)


@contextmanager
def publish() -> Iterator[Round]:
    """A copy into shared memory; its name goes through a pipe."""
    made: dict[int, list[SharedMemory]] = {}
    with crew(READERS, reader) as readers:
        told = Told(readers)

        def into(array: Any, number: float) -> None:
            if array.nbytes not in made:
                made[array.nbytes] = [SharedMemory(create=True, size=array.nbytes) for _ in "ab"]
            memory = made[array.nbytes][int(number) % 2]
            np.copyto(mapped(memory, array.nbytes), array)
            told.place = memory.name

        try:
            yield published(into, told, Source())
        finally:
            for memory in itertools.chain(*made.values()):
                memory.unlink()


def producer(index: int, queue: Any) -> Callable[..., None]:
    """Puts items, or lists of them."""

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        several = items(nbytes, at_once, kind)
        for _ in range(turns):
            queue.put(several)

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """`multiprocessing.Queue`; several items at once go through it as one list."""
    waiting = spawn.Queue(ROOM)
    with crew(PRODUCERS, producer, waiting) as producers:
        yield taken(producers, lambda *_: len(waiting.get(timeout=60)))


def nothing(number: int) -> int:
    """Nothing to do."""
    time.sleep(0.05)  # So that each of the four takes one.
    return number


@contextmanager
def start() -> Iterator[Round]:
    """`Pool(4)` of fresh interpreters, until each has done something."""

    def made() -> dict[str, float]:
        began = time.perf_counter()
        with spawn.Pool(4) as pool:
            pool.map(nothing, range(4), chunksize=1)
            return {"seconds": time.perf_counter() - began}

    yield made


@contextmanager
def memory() -> Iterator[Round]:
    """The same, kept."""
    with spawn.Pool(4) as pool:
        pool.map(nothing, range(4), chunksize=1)
        yield dict


if __name__ == "__main__":
    serve(call=call, publish=publish, queue=queue, start=start, memory=memory)
