"""A cluster of four workers, from its start to the first item, beside a bare interpreter's imports.

What is wanted is less than a second beyond what the user's own imports cost: the time from
`Cluster(4)` to a first item of a function that does nothing, in a program that has imported
paceline, less the time in which as many interpreters start side by side and import NumPy.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from measure import Effort, Figure, figure, seconds

import paceline

WORKERS = 4


def trivial() -> Iterator[int]:
    """Nothing to do."""
    while True:
        yield 0


def measure(effort: Effort) -> Iterator[Figure]:
    """Seconds beyond the bare interpreters', of one."""
    pairs = []
    bare_ones = []
    for _ in range(effort.rounds):
        bare = seconds(interpreters)
        with ExitStack() as running:
            pairs.append((seconds(lambda: first_item(running)) - bare, 1.0))
        bare_ones.append(bare)
    what = f"start of {WORKERS} workers, beyond {sum(bare_ones) / len(bare_ones):.2f} s of imports"
    yield figure(what, pairs, "what is wanted", "s", "<= 1")


def interpreters() -> None:
    """Start as many interpreters as a cluster of four does, with NumPy, and wait for all."""
    command = [sys.executable, "-c", "import numpy"]
    for process in [subprocess.Popen(command) for _ in range(WORKERS + 1)]:
        process.wait()


def first_item(running: ExitStack) -> None:
    """Start a cluster and take an item."""
    cluster = running.enter_context(paceline.Cluster(WORKERS, progress="quiet"))
    cluster.collect(trivial, batch_size=1).next()
