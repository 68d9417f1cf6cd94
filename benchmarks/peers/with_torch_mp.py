"""torch.multiprocessing: tensors in shared memory, and queues that pass them on by handle.

docs.pytorch.org/docs/stable/multiprocessing.html and its best practices ("reuse buffers passed
through a Queue"): what is published goes into one of two shared tensors in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing as mp
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
    serve,
    taken,
)

torch.set_num_threads(1)
spawn = mp.get_context("spawn")


def reader(index: int, queues: list[Any]) -> Callable[..., None]:
    """Gets the tensor from its queue, which maps it."""
    sight = Sight()

    def read(nbytes: int, mode: str, number: float) -> None:
        sight.take(queues[index].get(timeout=60).numpy(), mode, number)

    return read


class Told:
    """Readers that each have the tensor in a queue."""

    def __init__(self, readers: Any, queues: list[Any]) -> None:
        self.readers, self.queues = readers, queues
        self.tensor = torch.zeros(0)
        self.hear = readers.hear

    def tell(self, count: int, **what: Any) -> None:
        """Put it there."""
        for queue in self.queues[:count]:
            queue.put(self.tensor)
        self.readers.tell(count, **what)


@contextmanager
def publish() -> Iterator[Round]:
    """A copy into a shared tensor, which goes through the queues of the readers."""
    shared: dict[int, list[torch.Tensor]] = {}
    queues = [spawn.Queue() for _ in range(READERS)]
    with crew(READERS, reader, queues) as readers:
        told = Told(readers, queues)

        def into(array: Any, number: float) -> None:
            if array.nbytes not in shared:
                shared[array.nbytes] = [
                    torch.zeros(array.nbytes // 4).share_memory_() for _ in "ab"
                ]
            told.tensor = shared[array.nbytes][int(number) % 2]
            told.tensor.copy_(torch.from_numpy(array))

        yield published(into, told, Source())


def producer(index: int, queue: Any) -> Callable[..., None]:
    """Puts items, or lists of them."""

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        several = [
            {name: torch.from_numpy(value) for name, value in each.items()}
            for each in items(nbytes, at_once, kind)
        ]
        for _ in range(turns):
            # Else the second turn would send the same shared memory again.
            queue.put([{name: value.clone() for name, value in each.items()} for each in several])

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """`torch.multiprocessing.Queue`; several items at once go through it as one list."""
    waiting = spawn.Queue(ROOM)
    with crew(PRODUCERS, producer, waiting) as producers:
        yield taken(producers, lambda *_: len(waiting.get(timeout=60)))


if __name__ == "__main__":
    mp.set_sharing_strategy("file_system")
    serve(publish=publish, queue=queue)
