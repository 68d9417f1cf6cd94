"""Calls, assigns and items on a Ray cluster: paceline's beside the same through Ray's own means.

python benchmarks/beside_ray.py [--rounds 5]

Both run on the same cluster, in turns, within one run. Beside a call stands one of an actor's
method; beside an assign, and a read of what was assigned by a worker, `ray.put` and `ray.get`
through an actor; beside items that workers make, those that actors put into a `ray.util.queue`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from measure import Figure, figure, seconds
from ray.util.queue import Queue
from rich.console import Console
from run import table

import paceline

MB = 1 << 20
WORKERS = 2


class Holder:
    """What one writes with Ray to share parameters."""

    def __init__(self) -> None:
        self.kept: Any = None

    def empty(self) -> None:
        """Do nothing."""

    def keep(self, kept: list[Any]) -> None:
        """Keep a reference to parameters."""
        self.kept = kept[0]

    def newest(self) -> Any:
        """The reference."""
        return [self.kept]


class Producer:
    """Puts items into a queue, as fast as it takes them."""

    def make(self, queue: Any, nbytes: int, count: int) -> None:
        """So many items."""
        for _ in range(count):
            queue.put({"observation": np.zeros(nbytes, np.uint8)})


def items(nbytes: int) -> Iterator[Any]:
    """The same for `collect`."""
    while True:
        yield {"observation": np.zeros(nbytes, np.uint8)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    quiet = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    ray.init("local", num_cpus=6, **quiet)
    try:
        with paceline.Cluster(WORKERS, engine="ray", progress="quiet") as cluster:
            figures = list(measured(cluster, options.rounds))
    finally:
        ray.shutdown()
    Console().print(table(figures))


def measured(cluster: paceline.Cluster, rounds: int) -> Iterator[Figure]:
    """One line of the report after the other."""
    holder = ray.remote(Holder).remote()
    counter = cluster.counter("calls")

    def rate(run: Any, times: int) -> float:
        return 1 / seconds(run, times)

    def turns(ours: Any, theirs: Any) -> list[tuple[float, float]]:
        ours(), theirs()
        pairs = []
        for number in range(rounds):
            if number % 2:
                limit = theirs()
                pairs.append((ours(), limit))
            else:
                value = ours()
                pairs.append((value, theirs()))
        return pairs

    yield figure(
        "calls",
        turns(
            lambda: rate(lambda: counter.value, 2000),
            lambda: rate(lambda: ray.get(holder.empty.remote()), 300),
        ),
        "an actor's method", "calls/s", ">= 10",
    )  # fmt: skip
    for nbytes in (1 * MB, 64 * MB):
        tree = np.ones(nbytes, np.uint8)
        policy = cluster.variable(f"policy of {nbytes}", tree)

        def assigned(tree: Any = tree, policy: Any = policy) -> None:
            policy.assign(tree)

        def put(tree: Any = tree) -> None:
            ray.get(holder.keep.remote([ray.put(tree)]))

        times = 128 * MB // nbytes
        yield figure(
            f"assigns of {nbytes // MB} MB",
            turns(
                lambda assigned=assigned, times=times: rate(assigned, times),
                lambda put=put, times=times: rate(put, times),
            ),
            "ray.put, to an actor", "assigns/s", ">= 1",
        )  # fmt: skip
    for nbytes, count in ((1024, 2000), (256 * 1024, 400)):
        yield figure(
            f"items of {nbytes // 1024} KB from {WORKERS} workers",
            turns(
                lambda nbytes=nbytes, count=count: collected(cluster, nbytes, 4 * count),
                lambda nbytes=nbytes, count=count: queued(nbytes, count),
            ),
            "ray.util.queue", "items/s", ">= 10",
        )  # fmt: skip


def collected(cluster: paceline.Cluster, nbytes: int, count: int) -> float:
    """Items per second through `collect`, from the first batch on."""
    made = cluster.collect(items, nbytes, batch_size=16, version_of=None)
    try:
        made.next(timeout=60)
        began = time.perf_counter()
        for _ in range(count // 16):
            made.next(timeout=60)
        return count / (time.perf_counter() - began)
    finally:
        made.close()


def queued(nbytes: int, count: int) -> float:
    """Items per second through Ray's queue."""
    queue = Queue(maxsize=64, actor_options={"num_cpus": 0})
    producers = [ray.remote(num_cpus=0)(Producer).remote() for _ in range(WORKERS)]
    try:
        made = [each.make.remote(queue, nbytes, count // WORKERS) for each in producers]
        queue.get(timeout=60)
        began = time.perf_counter()
        for _ in range(count - 1):
            queue.get(timeout=60)
        took = time.perf_counter() - began
        ray.get(made)
        return (count - 1) / took
    finally:
        for each in producers:
            ray.kill(each)
        queue.shutdown(force=True)


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
