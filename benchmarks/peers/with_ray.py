"""Ray: actors, the object store, ray.util.queue, on a local cluster without its dashboard.

docs.ray.io: "Passing an object reference" (in a list, so that it stays one), "Objects" (arrays come
as read-only views of the store), "ray.util.queue". Several items at once go through the queue as
one list, as the "Ray Core tips" advise against many small calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

import numpy as np
import ray
from peer import (
    PRODUCERS,
    READERS,
    ROOM,
    Round,
    Sight,
    Source,
    items,
    published,
    repeated,
    serve,
    taken,
)
from ray.util.queue import Queue


def begin(store: int = 6 << 30) -> None:
    """A local cluster."""
    ray.init(
        "local", num_cpus=16, include_dashboard=False, logging_level="error", log_to_driver=False,
        object_store_memory=store,
    )  # fmt: skip


@ray.remote
class Holder:
    """What one writes to share parameters."""

    def __init__(self) -> None:
        self.total = np.zeros(0, np.float32)

    def empty(self) -> None:
        """Do nothing."""

    def start(self, value: Any) -> None:
        """A copy that may be written."""
        self.total = np.array(value)

    def add(self, value: Any) -> None:
        """In place."""
        np.add(self.total, value, out=self.total)


@ray.remote
class Reader:
    """Gets what it has a reference to."""

    def __init__(self) -> None:
        self.sight = Sight()

    def read(self, held: list[Any], mode: str, number: float) -> float:
        """Get it; the seconds that this took."""
        began = time.perf_counter()
        self.sight.take(ray.get(held[0]), mode, number)
        return time.perf_counter() - began


class Readers:
    """They get the reference with the call."""

    def __init__(self) -> None:
        self.actors = [Reader.remote() for _ in range(READERS)]
        self.held: Any = None
        self.pending: list[Any] = []

    def tell(self, count: int, nbytes: int, mode: str, number: float) -> None:
        """Call them."""
        self.pending = [
            actor.read.remote([self.held], mode, number) for actor in self.actors[:count]
        ]

    def hear(self, count: int) -> list[float]:
        """Their answers."""
        return list(ray.get(self.pending))


@contextmanager
def call() -> Iterator[Round]:
    """A method of an actor that does nothing."""
    begin()
    holder = Holder.remote()
    yield lambda cores, seconds: repeated(lambda: ray.get(holder.empty.remote()), seconds)
    ray.shutdown()


@contextmanager
def publish() -> Iterator[Round]:
    """`ray.put`, `ray.get` in actors."""
    begin()
    readers = Readers()

    def put(array: Any, number: float) -> None:
        readers.held = ray.put(array)

    yield published(put, readers, Source())
    ray.shutdown()


@contextmanager
def push() -> Iterator[Round]:
    """A method of an actor that adds its argument."""
    begin()
    source, holder = Source(), Holder.remote()

    def made(nbytes: int, seconds: float) -> dict[str, float]:
        array = source.next(nbytes)
        ray.get(holder.start.remote(array))
        return repeated(lambda: ray.get(holder.add.remote(array)), seconds)

    yield made
    ray.shutdown()


@ray.remote
class Producer:
    """Puts items, or lists of them."""

    def produce(self, queue: Any, nbytes: int, at_once: int, kind: str, turns: int) -> None:
        """In so many turns."""
        several = items(nbytes, at_once, kind)
        for _ in range(turns):
            queue.put(several)


class Producers:
    """Told by calls."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.actors = [Producer.remote() for _ in range(PRODUCERS)]
        self.pending: list[Any] = []

    def tell(self, count: int, **what: Any) -> None:
        """Call them."""
        self.pending = [actor.produce.remote(self.queue, **what) for actor in self.actors[:count]]

    def hear(self, count: int) -> None:
        """Wait for them."""
        ray.get(self.pending)


@contextmanager
def queue() -> Iterator[Round]:
    """`ray.util.queue.Queue`."""
    begin()
    waiting = Queue(maxsize=ROOM)
    yield taken(Producers(waiting), lambda *_: len(waiting.get(timeout=60)))
    ray.shutdown()


@contextmanager
def start() -> Iterator[Round]:
    """`ray.init` alone, which counts; and until four actors have answered."""

    def made() -> dict[str, float]:
        began = time.perf_counter()
        begin(1 << 28)
        alone = time.perf_counter() - began
        holders = [Holder.remote() for _ in range(4)]
        ray.get([each.empty.remote() for each in holders])
        whole = time.perf_counter() - began
        ray.shutdown()
        return {"seconds": alone, "four actors": whole}

    yield made


@contextmanager
def memory() -> Iterator[Round]:
    """Four actors that have answered."""
    begin(1 << 28)
    holders = [Holder.remote() for _ in range(4)]
    ray.get([each.empty.remote() for each in holders])
    yield dict
    ray.shutdown()


if __name__ == "__main__":
    serve(call=call, publish=publish, push=push, queue=queue, start=start, memory=memory)
