"""Reads of a variable over 3 servers under constant writes, one server killed again and again.

python benchmarks/torn_spread.py [--reads 100000] [--kilobytes 32] [--every 1.0]

Two processes assign, one adds, two read; every array of a version has one number throughout, so
each read can be checked. Each read is of another version than the one before. A server with a part
is killed, and started again at once, every so many seconds that it served.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import paceline

LEAVES = 6


def tree(words: int, number: int) -> dict[str, Any]:
    """A tree that has one number throughout."""
    return {f"w{n}": np.full(words, number) for n in range(LEAVES)}


def write(session: paceline.Session, words: int, adding: bool) -> None:
    """Write for as long as anybody reads."""
    shared = session.variable("shared")
    number = 0
    while not session.should_stop():
        number += 1
        try:
            if adding:
                shared.assign_add(tree(words, 1), timeout=5)
            else:
                shared.assign(tree(words, number), timeout=60)
        except (paceline.TimedOut, paceline.Closed):
            continue


def read(session: paceline.Session, reads: int) -> None:
    """Read, check, and say how many were torn and how long the longest took."""
    shared = session.variable("shared")
    torn, longest, last = 0, 0.0, None
    for _ in range(reads):
        began = time.perf_counter()
        snapshot = shared.read(newer_than=last, timeout=120)
        longest = max(longest, time.perf_counter() - began)
        last = snapshot.version
        numbers = {int(leaf.flat[at]) for leaf in snapshot.tree.values() for at in (0, -1)}
        torn += len(numbers) != 1 or any(
            leaf.min() != leaf.max() for leaf in snapshot.tree.values()
        )
    print(torn, longest, flush=True)


def act(role: str, index: int, folder: str, words: int, reads: int) -> None:
    """One of the processes."""
    spec = paceline.ClusterSpec.from_file(Path(folder) / "cluster.json")
    if role == "ps":
        with paceline.Server(spec, job_name="ps", task_index=index, secret=b"torn") as server:
            print("serves", flush=True)
            server.join()
        return
    with paceline.Session(spec, job="worker", index=index, secret=b"torn") as session:
        print("works", flush=True)
        if role == "read":
            read(session, reads)
        else:
            write(session, words, role == "add")


def start(role: str, index: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start one of the processes."""
    words = [role, str(index), options.folder, str(options.words), str(options.reads // 2)]
    made = subprocess.Popen(
        [sys.executable, __file__, "--act", *words], stdout=subprocess.PIPE, text=True
    )
    assert made.stdout is not None
    # It is there once it says so.
    made.stdout.readline()
    return made


def measure(options: argparse.Namespace) -> int:
    """Start all, kill one, count."""
    places = [f"unix:{options.folder}/{n}" for n in range(3)]
    spec = paceline.ClusterSpec({"ps": places, "worker": [f"a:{n}" for n in range(1, 7)]})
    (Path(options.folder) / "cluster.json").write_text(
        '{"cluster": ' + str(spec.as_dict()).replace("'", '"') + "}"
    )
    servers = [start("ps", n, options) for n in range(3)]
    everybody = list(servers)
    kills = 0
    began = time.monotonic()
    try:
        with paceline.Session(spec, job="worker", index=5, secret=b"torn") as session:
            shared = session.spread("shared", tree(options.words, 0))
            readers = [start("read", n, options) for n in (0, 1)]
            writers = [
                start(role, n, options) for n, role in enumerate(("assign", "assign", "add"), 2)
            ]
            everybody += [*readers, *writers]
            while any(each.poll() is None for each in readers):
                time.sleep(options.every)
                servers[1].kill()
                servers[1].wait()
                servers[1] = start("ps", 1, options)
                everybody.append(servers[1])
                kills += 1
            seconds = time.monotonic() - began
            said = [each.communicate()[0].split() for each in readers]
            versions = shared.read(timeout=60).count
            session.request_stop("all was read")
            for each in writers:
                each.wait(60)
    finally:
        for each in everybody:
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
    torn = sum(int(words[0]) for words in said)
    print(
        f"{options.reads:,} reads of another version each, of {versions:,}, over 3 servers, in"
        f" {seconds:.1f} s; ps:1 killed and started again {kills} times; the longest read took"
        f" {max(float(words[1]) for words in said):.2f} s: {torn} torn"
    )
    return torn


def main() -> None:
    """Measure, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reads", type=int, default=100_000)
    parser.add_argument("--kilobytes", type=float, default=32)
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--act", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.act:
        role, index, folder, words, reads = options.act
        act(role, int(index), folder, int(words), int(reads))
        return
    options.words = int(options.kilobytes * 1024) // 8
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        raise SystemExit(1 if measure(options) else 0)


if __name__ == "__main__":
    main()
