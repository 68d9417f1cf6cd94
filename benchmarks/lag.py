"""The largest lag handed over, and what was dropped, for trainers and bounds of every kind.

python benchmarks/lag.py [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import paceline


def items(policy: paceline.Variable[Any]) -> Iterator[dict[str, Any]]:
    """Items of about 2 ms, each with the process that made it."""
    while True:
        policy.read()
        time.sleep(0.002)
        yield {"x": np.zeros(64), "pid": os.getpid()}


def run(max_lag: int | None, trainer: str, seconds: float) -> str:
    """Train for a while; what came out, as a row."""
    with paceline.Cluster(workers=3, progress="quiet", restarts=1000) as cluster:
        policy = cluster.variable("policy", np.zeros(16))
        collection = cluster.collect(items, policy, batch_size=8, max_lag=max_lag)
        largest = batches = killed = 0
        last = collection.next().version
        until = time.monotonic() + seconds
        next_kill = time.monotonic() + 0.3
        while time.monotonic() < until:
            batch = collection.next(timeout=10)
            batches += 1
            largest = max(largest, int(batch.lag.max()))
            assert (batch.version >= last.min()).all()
            if trainer == "slow":
                time.sleep(0.03)
            if trainer == "with workers killed" and time.monotonic() > next_kill:
                os.kill(int(batch.data["pid"][0]), signal.SIGKILL)
                killed += 1
                next_kill = time.monotonic() + 0.5
            for _ in range({"three assigns": 3, "never assigns": 0}.get(trainer, 1)):
                policy.assign(np.full(16, float(batches)))
        stats = collection.stats()
    ended = stats["delivered"] + sum(stats["dropped"].values()) + stats["stored"]
    bound = "none" if max_lag is None else str(max_lag)
    good = ended == stats["accepted"] and (max_lag is None or largest <= max_lag)
    row = f"{bound:>7}  {trainer:<20} {largest:>11} {batches:>8} {stats['accepted']:>9}  "
    return row + f"{stats['dropped'] or '-'!s:<24} {killed:>6}   {'ok' if good else 'BROKEN'}"


def main() -> None:
    """One row for each bound and trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(
        f"{'max_lag':>7}  {'trainer':<20} {'largest lag':>11} {'batches':>8} {'accepted':>9}",
        end="",
    )
    print(f"  {'dropped':<24} {'killed':>6}")
    rows = []
    for max_lag in (0, 1, 4, None):
        for trainer in ("slow", "fast", "three assigns", "never assigns", "with workers killed"):
            rows.append(run(max_lag, trainer, options.seconds))
            print(rows[-1], flush=True)
    raise SystemExit(any("BROKEN" in row for row in rows))


if __name__ == "__main__":
    main()
