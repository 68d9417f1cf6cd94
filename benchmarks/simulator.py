"""A simulator that holds the interpreter lock, in `map` with 4 workers, one of them killed.

    python benchmarks/simulator.py --seconds 30

Prints the results, who made each, and how long it took; fails unless every result came once and in
the order of the inputs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import tempfile
import time
from pathlib import Path

import paceline


def simulate(number: int, seconds: int, began: str) -> tuple[int, int]:
    """Sleep in a native call that keeps the interpreter lock."""
    Path(began, f"{number}-{os.getpid()}").touch()
    ctypes.PyDLL(None).sleep(seconds)
    return number, os.getpid()


def main() -> None:
    """Run it as a program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--inputs", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as began, paceline.Cluster(4, progress="quiet") as cluster:
        start = time.monotonic()
        futures = [
            cluster.submit(simulate, number, options.seconds, began)
            for number in range(options.inputs)
        ]
        while not (mine := list(Path(began).glob("1-*"))):
            time.sleep(0.01)
        victim = int(mine[0].name.partition("-")[2])
        os.kill(victim, signal.SIGKILL)
        results = [future.result() for future in futures]
        seconds = time.monotonic() - start
        begun = sorted(path.name for path in Path(began).iterdir())
    print(f"killed process {victim} at input 1")
    for number, pid in results:
        print(f"input {number}: made by process {pid}")
    assert [number for number, _ in results] == list(range(options.inputs))
    assert victim not in [pid for _, pid in results]
    print(
        f"{len(results)} results, each once and in order, from {len(begun)} calls begun, in"
        f" {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
