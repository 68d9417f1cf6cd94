"""Constant traffic of every kind: do memory, descriptors, threads and segments stay what they are?

`python benchmarks/soak.py --minutes 10` looks at every process of a launched cluster, and compares
what each has after a tenth of the time with what it has at the end. Something that grew by more
than the slack is a failure.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import paceline
from paceline import Closed, Cluster, Session

MB = 1 << 20
SIZES = (64, 5_000, 40_000, 300_000)
"""Floats per item of each queue: inline, small shared, slabs, and a segment each."""

LIMIT = 120.0


class Held(NamedTuple):
    """What a process has: bytes (its own, and its share of what is shared), and counts."""

    memory: float
    descriptors: float
    threads: float
    segments: float


def held(pid: int) -> Held:
    """What a process has now."""
    folder = Path(f"/proc/{pid}")
    found = re.search(r"^Pss: +(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    segments = sum("memfd:paceline" in line for line in (folder / "maps").read_text().splitlines())
    descriptors = len(list((folder / "fd").iterdir()))
    return Held(int(found[1]) << 10, descriptors, len(list((folder / "task").iterdir())), segments)


def rollouts(policy: Any, league: Any, worker: Any) -> Iterator[Any]:
    """Items of several sizes, from a snapshot held for a while, and from a tagged one."""
    kept: deque[Any] = deque(maxlen=3)
    random = np.random.default_rng(worker.seed)
    for number in itertools.count():
        snapshot = policy.read()
        kept.append(snapshot)
        if number % 20 == 0:
            with suppress(paceline.UnknownName):
                policy.read(tag="champion")
        worker.log(number=number)
        yield {
            "w": snapshot.tree["w"][: int(random.choice([10, 200]))].copy(),
            "n": number,
            "text": "x" * 30,
        }


def squared(x: Any, worker: Any) -> Any:
    """What is mapped."""
    return {"x": np.asarray(x) ** 2, "index": worker.index}


class Traffic:
    """Threads that each do one kind of thing, again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.counts: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self.stop = threading.Event()
        self._target = cluster._staff._hosting._targets[0]  # type: ignore[attr-defined]
        self._secret = cluster._staff._hosting._secret  # type: ignore[attr-defined]
        kinds: list[Callable[[], Iterator[None]]] = [
            self.collecting, self.queueing, self.spreading, self.accumulating, self.mapping,
            self.visiting, self.holding, self.sharing_work,
        ]  # fmt: skip
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(LIMIT)

    def _run(self, kind: Callable[[], Iterator[None]]) -> None:
        name = kind.__name__
        try:
            for _ in kind():
                self.counts[name] = self.counts.get(name, 0) + 1
                if self.stop.wait(0.002):
                    return
        except BaseException as e:
            self.errors.append(e)

    def session(self) -> Session:
        """Another session on the cluster's servers."""
        return Session(self._target, secret=self._secret, job="guest")

    def collecting(self) -> Iterator[None]:
        """Batches, assigns, tags; and now and then another collection."""
        policy = self.cluster.variable("policy", {"w": np.zeros(60_000), "b": np.zeros(9)})
        while True:
            with self.cluster.collect(
                rollouts, policy, None, batch_size=8, max_lag=2, job="actor"
            ) as batches:
                for number in range(200):
                    data = batches.next(timeout=LIMIT).data
                    assert len(data) == 8 if isinstance(data, list) else len(data["n"]) == 8
                    policy.assign({"w": np.full(60_000, float(number)), "b": np.zeros(9)})
                    if number % 10 == 0:
                        if "champion" in policy.tags():
                            policy.untag("champion")
                        policy.tag("champion")
                        policy.tag(f"generation-{number}")
                    if number % 50 == 49:
                        for tag in policy.tags():
                            policy.untag(tag)
                    yield

    def queueing(self) -> Iterator[None]:
        """Items of every size through queues of every order."""
        session = self.cluster.session
        orders: list[Any] = ["fifo", "shuffle", "priority", "fifo"]
        queues = [
            session.queue(f"q{size}", 8, order=order)
            for size, order in zip(SIZES, orders, strict=True)
        ]
        while True:
            for size, order, queue in zip(SIZES, orders, queues, strict=True):
                items = [{"x": np.full(size, float(n)), "n": n} for n in range(4)]
                ranks = {"priority": list(range(4))} if order == "priority" else {}
                queue.enqueue_many(items, timeout=LIMIT, **ranks)
                assert len(queue.dequeue_many(3, timeout=LIMIT).data["n"]) == 3
                assert queue.dequeue(timeout=LIMIT, copy=False)["x"].shape == (size,)
            yield

    def spreading(self) -> Iterator[None]:
        """A variable on all servers: assigned, added to, read, by rows too."""
        tree = {"a": np.zeros((2000, 8)), "b": np.zeros(30_000), "n": 0}
        wide = self.cluster.session.spread("wide", tree)
        while True:
            wide.assign(tree)
            wide.assign_add({"a": np.ones((2000, 8)), "b": np.ones(30_000), "n": 1})
            wide.scatter_add([1, 2], np.ones((2, 8)), leaf="$.a")
            assert wide.read().tree["n"] == 1
            assert wide.gather([1, 3], leaf="$.a").tree[0, 0] == 2
            yield

    def accumulating(self) -> Iterator[None]:
        """Gradients, a counter, a barrier of two."""
        session = self.cluster.session
        gradients = session.accumulator("gradients", like=np.zeros(20_000))
        steps = session.counter("steps")
        while True:
            for _ in range(2):
                gradients.apply(np.ones(20_000), timeout=LIMIT)
            assert gradients.take(2, timeout=LIMIT).n == 2
            steps.add()
            yield

    def mapping(self) -> Iterator[None]:
        """Calls in the workers of another job."""
        while True:
            inputs = [np.full(n, 2.0) for n in (5, 3000, 20_000)]
            assert len(self.cluster.map(squared, inputs, job="caller")) == 3
            assert self.cluster.submit(squared, 3, job="caller").result(LIMIT)["x"] == 9
            yield

    def visiting(self) -> Iterator[None]:
        """Sessions that come, make something in a container, reset it, and go."""
        while True:
            with self.session() as guest:
                with guest.container("visit"):
                    made = guest.variable("v", np.zeros(20_000))
                    made.assign_add(np.ones(20_000))
                    assert made.read().tree[0] == 1
                    guest.queue("q", 4).enqueue(np.zeros(5_000))
                guest.reset("visit")
                assert guest.resources()
            self.cluster.stats()
            yield

    def holding(self) -> Iterator[None]:
        """Snapshots and items that are held for a while, over a session that lasts."""
        kept: deque[Any] = deque(maxlen=10)
        with self.session() as other:
            policy = other.variable("policy")
            while True:
                kept.append(policy.read())
                if len(kept) == 10:
                    kept.clear()
                yield

    def sharing_work(self) -> Iterator[None]:
        """Readers of pieces, made anew each time, and forgotten with their container."""
        while True:
            with self.session() as other:
                with other.container("work"):
                    reader = other.reader("pieces", range(20))
                    assert sum(1 for piece in reader) == 20
                other.reset("work")
            yield


@dataclass
class Watched:
    """One process, and what it had over the time."""

    name: str
    pid: int
    samples: list[tuple[float, Held]] = field(default_factory=list)

    def around(self, begin: float, end: float) -> Held:
        """The medians of a stretch of time."""
        some = [each for at, each in self.samples if begin <= at <= end] or [self.samples[-1][1]]
        return Held(*(statistics.median(column) for column in zip(*some, strict=True)))


def watch(watched: list[Watched], traffic: Traffic, seconds: float) -> None:
    """Look at all of them every second, until the time is up or something fails."""
    began = time.monotonic()
    shown = 0.0
    while (now := time.monotonic() - began) < seconds and not traffic.errors:
        for one in watched:
            one.samples.append((now, held(one.pid)))
        if now - shown > 60:
            shown = now
            total = sum(one.samples[-1][1].memory for one in watched) / MB
            print(f"{now / 60:5.1f} min: {total:.0f} MB in all; {traffic.counts}", flush=True)
        time.sleep(min(1.0, seconds / 50))


def report(watched: list[Watched], seconds: float, slack: Held) -> list[str]:
    """Show what each has at a tenth and at the end; what has grown."""
    grown = []
    print(f"after {seconds / 600:.1f} minutes -> after {seconds / 60:.1f}")
    print(f"{'':12}{'memory, MB':>22}{'descriptors':>16}{'threads':>14}{'segments':>16}")
    for one in watched:
        early = one.around(0.08 * seconds, 0.12 * seconds)
        late = one.around(0.96 * seconds, seconds)
        cells = [f"{early.memory / MB:.1f} -> {late.memory / MB:.1f}"]
        cells += [f"{a:.0f} -> {b:.0f}" for a, b in zip(early[1:], late[1:], strict=True)]
        print(f"{one.name:12}{cells[0]:>22}{cells[1]:>16}{cells[2]:>14}{cells[3]:>16}")
        # Pools fill, and samples fall where they fall: some may differ without a leak.
        for what, a, b, most in zip(Held._fields, early, late, slack, strict=True):
            if b - a > most:
                grown.append(f"{one.name}: {what} {a:.0f} -> {b:.0f}, slack {most:.0f}")
    return grown


def main() -> int:
    """What the command line says; the exit status."""
    parser = argparse.ArgumentParser("soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slack", type=float, default=12, help="MB that a process may grow by")
    options = parser.parse_args()
    seconds, slack = options.minutes * 60, Held(options.slack * MB, 6, 2, 6)
    with Cluster({"actor": 2, "caller": 1}, ps=2, progress="quiet") as cluster:
        pids = {"chief": os.getpid(), **cluster.processes()}
        watched = [Watched(name, pid) for name, pid in pids.items()]
        with Traffic(cluster) as traffic:
            watch(watched, traffic, seconds)
    print("done:", ", ".join(f"{count} {kind}" for kind, count in traffic.counts.items()))
    grown = report(watched, seconds, slack)
    # What ended with the cluster is no error.
    errors = [error for error in traffic.errors if not isinstance(error, Closed)]
    for line in (*grown, *map(repr, errors)):
        print(f"FAILED: {line}")
    return bool(grown or errors)


if __name__ == "__main__":
    sys.exit(main())
