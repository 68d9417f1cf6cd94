"""A checkpoint while others train, beside the plain writing of as many bytes.

python benchmarks/checkpoint.py [--megabytes 1024] [--rounds 3] [--folder FOLDER]

A server in a process of its own has a variable of so many megabytes and a queue of 1,000 items;
another process assigns and reads a variable of 4 MB and adds to a counter, without a pause. This
process saves all of it, and in turn writes as many bytes into one file, each time with fsync. Then
the checkpoint is restored into another server, and every bit is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from served import SECRET, served

import paceline
from paceline import checkpoints

MB = 1 << 20
LEAVES = 16
ITEMS = 1000


def train(target: str) -> None:
    """Assign, read and count until told to stop; when each step ended, and how long it took."""
    with paceline.Session(target, secret=SECRET) as session:
        policy = session.variable("policy", np.zeros(MB))
        steps, over = session.counter("steps"), session.counter("over")
        net, times = np.zeros(MB), []
        while not over.value:
            began = time.monotonic()
            policy.assign(net)
            policy.read_into(net)
            steps.add()
            ended = time.monotonic()
            times.append((ended, ended - began))
    print(json.dumps(times))


def tree(megabytes: int) -> dict[str, Any]:
    """Arrays of random numbers, so many megabytes in all."""
    draws = np.random.default_rng(0)
    size = megabytes * MB // LEAVES // 8
    return {f"w{n}": draws.random(size) for n in range(LEAVES)}


def digest(content: dict[str, Any]) -> str:
    """The digest of all their bytes, in order."""
    found = hashlib.sha256()
    for array in content.values():
        found.update(array.data)
    return found.hexdigest()


def plainly(folder: Path, content: dict[str, Any]) -> float:
    """Seconds to write the arrays one after the other, and to have them on the disk."""
    began = time.monotonic()
    with (folder / "plain").open("wb", buffering=0) as file:
        for array in content.values():
            left = memoryview(array).cast("B")
            while left:
                left = left[file.write(left[: 4 * MB]) or 0 :]
        os.fsync(file.fileno())
    took = time.monotonic() - began
    (folder / "plain").unlink()
    return took


def save(folder: Path, content: dict[str, Any], rounds: int) -> None:
    """Save while another process trains, and print how long it took, and what that one felt."""
    with served() as session:
        session.variable("weights", content)
        queue = session.queue("items", ITEMS)
        queue.enqueue_many([{"x": np.full(512, n)} for n in range(ITEMS)])
        command = [sys.executable, __file__, "--train", session.connection.address]
        over = session.counter("over")
        with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
            session.counter("steps").wait_for(20)
            spans, plain, pauses = [], [], []
            for _ in range(rounds):
                plain.append(plainly(folder, content))
                began = time.monotonic()
                session.save(folder, keep=1)
                spans.append((began, time.monotonic()))
                pauses.append(newest(folder).manifest.pause)
            over.add()
            assert trainer.stdout is not None
            times = json.loads(trainer.stdout.read())
    size = sum(array.nbytes for array in content.values()) / 1e9
    took = [end - begin for begin, end in spans]
    print(f"save     {statistics.median(took):.2f} s for {size:.2f} GB: {_all(took)}")
    print(f"plain    {statistics.median(plain):.2f} s: {_all(plain)}")
    ratios = [one / other for one, other in zip(took, plain, strict=True)]
    print(f"ratio    {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
    print(f"pause    {1e3 * statistics.median(pauses):.2f} ms, at most {1e3 * max(pauses):.2f} ms")
    print_steps(times, spans)


def newest(folder: Path) -> checkpoints.Checkpoint:
    """The checkpoint that was written last."""
    found = checkpoints.latest(folder)
    assert found is not None
    return found


def print_steps(times: list[tuple[float, float]], spans: list[tuple[float, float]]) -> None:
    """How long the steps took that ended while a checkpoint was written, and all of them."""
    inside = [took for ended, took in times if any(begin < ended < end for begin, end in spans)]
    outside = [took for _, took in times[20:]]
    for word, some in (("saving", inside), ("all", outside)):
        print(
            f"step     {1e3 * statistics.median(some):.2f} ms, at most {1e3 * max(some):.1f} ms"
            f" ({word}, {len(some)} steps)"
        )


def restore(folder: Path, content: dict[str, Any]) -> None:
    """Restore into another server, and compare."""
    with served() as session:
        began = time.monotonic()
        assert session.restore(folder) is not None
        took = time.monotonic() - began
        equal = digest(session.variable("weights").read().tree) == digest(content)
        items = session.queue("items").dequeue_many(ITEMS)
        equal = equal and bool((items.data["x"][:, 0] == np.arange(ITEMS)).all())
    print(f"restore  {took:.2f} s, {'every bit is equal' if equal else 'BITS DIFFER'}")


def _all(seconds: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in seconds)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--megabytes", type=int, default=1024)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--folder", help="where to write; by default where temporary files are")
    asked.add_argument("--train", help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.train:
        train(options.train)
        return
    content = tree(options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        save(Path(folder), content, options.rounds)
        restore(Path(folder), content)


if __name__ == "__main__":
    main()
