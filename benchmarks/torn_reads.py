"""Reads under constant assigns from another process: is any of them torn?

python benchmarks/torn_reads.py [--reads 1000000] [--megabytes 1]

Every version's bytes are its count, so each read can be checked: all words of a read must be equal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import paceline


def assign_for_ever(
    shared: paceline.Variable[Any], words: int, worker: paceline.Worker
) -> Iterator[int]:
    """The other process: a new version as fast as it can."""
    count = 0
    while not worker.should_stop():
        count += 1
        shared.assign(np.full(words, count))
    yield count


def main() -> None:
    """Read, check, count, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    options = parser.parse_args()
    words = int(options.megabytes * (1 << 20)) // 8
    with paceline.Cluster(workers=1, progress="quiet") as cluster:
        shared = cluster.variable("shared", np.zeros(words, np.int64))
        cluster.collect(assign_for_ever, shared, words, batch_size=1, version_of=None)
        torn = changed = 0
        last = shared.read(newer_than=shared.version).version
        began = time.perf_counter()
        for _ in range(options.reads):
            snapshot = shared.read()
            torn += snapshot.tree.min() != snapshot.tree.max()
            changed += snapshot.version != last
            last = snapshot.version
        seconds = time.perf_counter() - began
    print(
        f"{options.reads:,} reads of {options.megabytes} MB, {changed:,} of them of a new version,"
        f" in {seconds:.1f} s: {torn} torn"
    )
    raise SystemExit(1 if torn or not changed else 0)


if __name__ == "__main__":
    main()
