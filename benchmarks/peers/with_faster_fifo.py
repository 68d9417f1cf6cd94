"""faster-fifo: a queue in shared memory; `put_many` and `get_many`, as its README advises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import faster_fifo_reduction  # noqa: F401 (so that queues may be sent to spawned processes)
from faster_fifo import Queue
from peer import PRODUCERS, Round, crew, items, serve, taken

ROOM_BYTES = 256 << 20


def producer(index: int, queue: Any) -> Callable[..., None]:
    """Puts several at once."""

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        several = items(nbytes, at_once, kind)
        for _ in range(turns):
            if len(several) == 1:
                queue.put(several[0], timeout=60)
            else:
                queue.put_many(several, timeout=60)

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """A queue with room for 256 MB."""
    waiting = Queue(max_size_bytes=ROOM_BYTES, loads=None, dumps=None)
    with crew(PRODUCERS, producer, waiting) as producers:

        def take(nbytes: int, at_once: int, kind: str, rest: int) -> int:
            return len(waiting.get_many(timeout=60, max_messages_to_get=min(1000, rest)))

        yield taken(producers, take)


if __name__ == "__main__":
    serve(queue=queue)
