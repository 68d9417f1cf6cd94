"""256 KB items from two producers to one consumer, beside memcpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from measure import MB, Effort, Figure, compare, memcpy, seconds

import paceline

SIZE = 256 << 10


def putting(queue: paceline.Queue[Any], many: int) -> Iterator[None]:
    """Enqueue for as long as the queue is open."""
    item = np.ones(SIZE, np.uint8)
    while True:
        try:
            if many == 1:
                queue.enqueue(item, timeout=None)
            else:
                queue.enqueue_many([item] * many, timeout=None)
        except paceline.Closed:
            yield None


def making() -> Iterator[Any]:
    """The same item for ever."""
    item = np.ones(SIZE, np.uint8)
    while True:
        yield item


def measure(effort: Effort) -> Iterator[Figure]:
    """Through a queue, 1 and 8 at a time, copied and as views; and collected."""
    times = effort.times(200)
    copied = memcpy(64 * MB)

    def rate(take: Any, count: int) -> float:
        return count * SIZE / seconds(take, times) / 1e9

    with paceline.Cluster(workers=2, progress="quiet") as cluster:
        for many in (1, 8):
            queue = cluster.queue(f"items-{many}", 64)
            putters = cluster.collect(putting, queue, many, batch_size=2, version_of=None)
            queue.dequeue_many(64)
            for how, copy in (("", True), (", as views", False)):
                yield compare(
                    f"256 KB items, 2 producers, {many} at a time{how}",
                    lambda: rate(lambda: queue.dequeue_many(8, copy=copy), 8),  # noqa: B023
                    "memcpy", copied, "GB/s", ">= 0.3", effort,
                )  # fmt: skip
            queue.close(cancel_pending_enqueues=True)
            putters.next()
            putters.close()
        made = cluster.collect(making, batch_size=16, max_lag=None)
        for _ in range(10):
            made.next()
        yield compare(
            "256 KB items, 2 workers, collected by 16", lambda: rate(made.next, 16),
            "memcpy", copied, "GB/s", ">= 0.3", effort,
        )  # fmt: skip
