"""What more workers cost: items, the server's time for each, and memory beside a large model.

python benchmarks/scaling.py [--workers 1 2 4 8 16 32 64] [--seconds 5] [--megabytes 256]

Workers are light: each waits `--wait` seconds for an item, as for a simulator elsewhere. So what is
possible grows with workers until the machine is busy.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import paceline

MB = 1 << 20
TICKS = os.sysconf("SC_CLK_TCK")


def work(policy: paceline.Variable[Any], wait: float, worker: paceline.Worker) -> Iterator[Any]:
    """Light items: 1 KB, some milliseconds apart."""
    item = {"observation": np.zeros(256, np.float32), "by": worker.index}
    while True:
        policy.read()
        time.sleep(wait)
        yield item


def look(policy: paceline.Variable[Any]) -> int:
    """Look at all of a model."""
    return int(policy.read().tree[:: 4096 // 8].sum())


def cpu(pid: int) -> float:
    """Seconds of processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def share(pid: int) -> int:
    """Bytes of a process, those that it shares counted in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def throughput(workers: int, seconds: float, wait: float, engine: str) -> tuple[float, float]:
    """Items per second, and the server's processor time for one, in microseconds."""
    with paceline.Cluster(workers, engine=engine, progress="quiet", restarts=0) as cluster:
        policy = cluster.variable("policy", np.zeros(1024, np.float32))
        # Whoever trains takes an item of each worker; so none waits for the others.
        made = cluster.collect(work, policy, wait, batch_size=workers, max_lag=None)
        there: set[int] = set()
        while len(there) < workers:
            there |= set(made.next(timeout=120).data["by"].tolist())
        server = cluster.processes()["ps:0"]
        used, began, items = cpu(server), time.monotonic(), 0
        while time.monotonic() - began < seconds:
            items += len(made.next(timeout=120).data["by"])
            policy.assign(np.zeros(1024, np.float32))
        took = time.monotonic() - began
        return items / took, (cpu(server) - used) / items * 1e6


def memory(workers: int, nbytes: int) -> float:
    """MB of all processes of a cluster whose workers look at a model."""
    with paceline.Cluster(workers, progress="quiet", restarts=0) as cluster:
        policy = cluster.variable("policy", np.ones(nbytes // 8))
        cluster.run(look, policy)
        return sum(map(share, cluster.processes().values())) / MB


def main() -> None:
    """Measure one number of workers after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--wait", type=float, default=0.02)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--engine", default="processes", choices=["processes", "ray"])
    options = parser.parse_args()
    table = Table(caption=f"{os.cpu_count()} cores; an item each {options.wait:g} s at most")
    for heading in ("workers", "items/s", "of what is possible", "server's us/item"):
        table.add_column(heading, justify="right")
    for workers in options.workers:
        rate, cost = throughput(workers, options.seconds, options.wait, options.engine)
        possible = rate * options.wait / workers
        table.add_row(str(workers), f"{rate:,.0f}", f"{100 * possible:.0f} %", f"{cost:.0f}")
    console = Console()
    console.print(table)
    few, many = min(2, *options.workers), min(16, max(options.workers))
    if options.megabytes and many > few:
        nbytes = options.megabytes * MB
        added = (memory(many, nbytes) - memory(few, nbytes)) / (many - few)
        console.print(
            f"{added:.0f} MB for each worker more, all that looks at a model of"
            f" {options.megabytes} MB counted ({few} and {many} workers)"
        )


if __name__ == "__main__":
    main()
