"""Many readers of one large variable: the memory of each, and when the last one has a new version.

python benchmarks/readers.py [--readers 8] [--megabytes 256] [--rounds 9]

Times stand beside a memcpy of the variable's size in the same run: take the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import paceline

MB = 1 << 20
WARM = 4
"""Rounds before any counts: whatever is mapped or allocated once is there by then."""


def private(pid: int) -> int:
    """Bytes of a process that no other shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def readings(policy: paceline.Variable[Any]) -> Iterator[dict[str, float]]:
    """Each version as soon as it is there: when that was, and what looking at it has cost."""
    before = private(os.getpid())
    version = None
    while True:
        snapshot = policy.read(newer_than=version, timeout=120)
        at = time.monotonic()
        version = snapshot.version
        snapshot.tree[:: 4096 // 8].sum()
        yield {"at": at, "private": float(private(os.getpid()) - before)}


def main() -> None:
    """Assign, wait for all readers, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    nbytes = options.megabytes * MB
    source = np.arange(nbytes // 8, dtype=np.float64)
    target = np.zeros_like(source)
    copies, assigns, views, first, own = [], [], [], 0.0, 0.0
    with paceline.Cluster(workers=options.readers, progress="quiet") as cluster:
        policy = cluster.variable("policy", source)
        batches = cluster.collect(readings, policy, batch_size=options.readers, max_lag=None)
        batches.next(timeout=120)
        for number in range(WARM + options.rounds):
            # All of them should be waiting for the next version by then.
            time.sleep(0.3)
            began = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter() - began
            start = time.monotonic()
            policy.assign(source)
            assigned = time.monotonic() - start
            batch = batches.next(timeout=120)
            last = float(batch.data["at"].max()) - start
            own = float(batch.data["private"].max())
            if number == 0:
                first = assigned
            if number >= WARM:
                copies.append(copied)
                assigns.append(assigned)
                views.append(last)
        kept = policy.memory()["bytes"]
    limit, assign, last = (statistics.median(times) for times in (copies, assigns, views))
    print(
        f"{options.readers} readers of {options.megabytes} MB, medians of {options.rounds} rounds"
    )
    print(f"memcpy                       {limit * 1e3:8.1f} ms")
    print(f"assign                       {assign * 1e3:8.1f} ms   {assign / limit:5.2f} memcpys")
    print(f"  to the last reader's view  {last * 1e3:8.1f} ms   {last / limit:5.2f} memcpys")
    print(f"first assign (new memory)    {first * 1e3:8.1f} ms   {first / limit:5.2f} memcpys")
    print(f"private memory of a reader   {own / MB:8.1f} MB   {own / nbytes:5.1%} of the variable")
    print(f"versions kept at the end     {kept / MB:8.1f} MB   {kept / nbytes:5.2f} versions")


if __name__ == "__main__":
    main()
