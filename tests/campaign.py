"""A seeded campaign of faults, which checks after each what paceline promises.

`python tests/campaign.py FAULTS SEED` prints the longest times to notice and to recover.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from clusters import LIMIT, accounted, quiet, until
from conftest import Holdings, holdings
from resumed import Run
from tasks import Tasks, tree

import paceline
from paceline import checkpoints
from paceline.core.versions import epoch_of
from paceline.testing import Chaos, Fault, Relay, Report, full_disk, serving


def counting(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    """Items that show a torn read, and who made which."""
    number = 0
    while True:
        snapshot = policy.read()
        leaves = {float(x) for leaf in snapshot.tree.values() for x in (leaf.min(), leaf.max())}
        yield {
            "torn": len(leaves) > 1,
            "value": max(leaves),
            "version": snapshot.version,
            "maker": (worker.index, worker.seed),
            "number": number,
        }
        number += 1


class Training:
    """Training steps that fail where an item, a version or an assign is not what it should be."""

    def __init__(self, cluster: paceline.Cluster) -> None:
        self._cluster = cluster
        self._processes = len(cluster.processes())
        self._policy = cluster.variable("policy", tree(0))
        self._last, self._value = self._policy.version, 0.0
        # What each version is; some are never seen by this process.
        self._values = {self._last: self._value}
        self._seen: dict[tuple[int, int], int] = {}
        self._batches = cluster.collect(counting, self._policy, batch_size=4, max_lag=2)

    def step(self) -> None:
        """Take a batch, look at each item, assign."""
        data = self._batches.next(timeout=LIMIT).data
        assert not data["torn"].any()
        for version, value in zip(data["version"].tolist(), data["value"].tolist(), strict=True):
            # A server that was started again brings back an older value, under a new version.
            assert value <= self._value
            assert self._values.setdefault(version, value) == value
        for index, seed, number in zip(*data["maker"], data["number"], strict=True):
            maker = (int(index), int(seed))
            # In the order in which its maker made them: none twice.
            assert int(number) > self._seen.get(maker, -1)
            self._seen[maker] = int(number)
        self._value += 1
        version = self._policy.assign(tree(self._value))
        assert version > self._last
        if epoch_of(version) == epoch_of(self._last):
            assert version == self._last + 1
        assert version not in self._values
        self._last, self._values[version] = version, self._value

    def check(self, fault: Fault) -> None:
        """What is accepted is accounted for, and all processes are there again."""
        assert accounted(self._batches.stats())
        assert len(self._cluster.processes()) == self._processes


def of_workers(faults: int, seed: int) -> Report:
    """Workers killed, stopped and slowed."""
    with quiet(3, restarts=1_000_000) as cluster:
        training = Training(cluster)
        return Chaos(cluster, seed=seed).campaign(
            training.step, faults=faults, targets=["worker"], check=training.check
        )


def of_servers(faults: int, seed: int) -> Report:
    """The server killed, stopped and slowed under a training that is saved."""
    with (
        TemporaryDirectory() as folder,
        quiet(2, checkpoint=folder, save_every=0.2, restarts=1_000_000) as cluster,
    ):
        training = Training(cluster)
        # What was never saved could not come back.
        cluster.save()
        return Chaos(cluster, seed=seed).campaign(
            training.step, faults=faults, targets=["ps"], check=training.check
        )


def of_connections(faults: int, seed: int) -> Report:
    """Connections cut, and replies lost, torn and late, between sessions and a server."""
    with serving("tcp") as server, Relay(server.target) as relay:
        one = paceline.Session(relay.target, secret=server.secret)
        other = paceline.Session(relay.target, secret=server.secret)
        with one, other:
            steps, taken = one.counter("steps"), 0
            queue, out = one.queue("items", 16), other.queue("items", 16)

            def work() -> None:
                nonlocal taken
                taken += 1
                assert steps.add(1) == taken
                out.enqueue({"number": taken, "array": np.full(3000, taken)}, timeout=LIMIT)
                item = queue.dequeue(timeout=LIMIT)
                assert item["number"] == taken
                assert (item["array"] == taken).all()

            def check(fault: Fault) -> None:
                assert accounted(queue.stats())
                assert len(one.resources()["members"]) == 2

            chaos = Chaos(dict, relays={"connection": relay}, seed=seed)
            return chaos.campaign(
                work, faults=faults, kinds=["cut", "lose", "repeat", "tear", "delay"], check=check
            )


def of_tasks(faults: int, seed: int) -> Report:
    """A cluster by hand: its server, chief and workers killed, stopped and slowed."""
    return _by_hand("unix", faults, seed)


def of_tasks_apart(faults: int, seed: int) -> Report:
    """The same over TCP, where connections are harmed too; they need not end with a process."""
    return _by_hand("tcp", faults, seed)


def _by_hand(carrier: str, faults: int, seed: int) -> Report:
    with TemporaryDirectory() as folder, closing(Tasks(Path(folder), carrier)) as tasks:
        relays = {} if tasks.relay is None else {"connection": tasks.relay}
        return Chaos(tasks.processes, relays=relays, seed=seed).campaign(
            tasks.step, faults=faults, check=tasks.check
        )


def of_chiefs(faults: int, seed: int) -> Report:
    """The chief of a launched cluster with checkpoints killed, stopped and slowed."""
    with TemporaryDirectory() as folder, closing(Run(Path(folder))) as run:
        return Chaos(run.processes, seed=seed).campaign(run.step, faults=faults, check=run.check)


def of_disks(faults: int, seed: int) -> Report:
    """No room for the checkpoints that a cluster in training saves by itself."""
    draw, done = random.Random(seed), list[Fault]()
    with TemporaryDirectory() as name, quiet(1, checkpoint=name, save_every=0.05) as cluster:
        folder = Path(name)
        training, told = Training(cluster), Told()
        with told:
            for _ in range(faults):
                training.step()
                began = time.monotonic()
                with full_disk(draw.randrange(4000)):
                    while not told.errors:
                        training.step()
                ends = time.monotonic()
                good = checkpoints.found(folder)
                while checkpoints.found(folder)[-1:] == good[-1:]:
                    training.step()
                assert checkpoints.latest(folder) is not None
                now = time.monotonic()
                done.append(Fault("fill", "disk", ends - began, now - ends))
                training.check(done[-1])
                told.errors.clear()
    return Report(seed, tuple(done))


class Told(logging.Handler):
    """The errors that are logged within its block, which are of checkpoints."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []
        self._log = logging.getLogger("paceline")

    def emit(self, record: logging.LogRecord) -> None:
        assert record.getMessage().startswith("checkpoint of step ")
        self.errors.append(record.getMessage())

    def __enter__(self) -> Told:
        self._before, self._log.propagate = self._log.propagate, False
        self._log.addHandler(self)
        return self

    def __exit__(self, *what: object) -> None:
        self._log.removeHandler(self)
        self._log.propagate = self._before


PARTS: dict[Callable[[int, int], Report], float] = {
    of_workers: 0.2,
    of_servers: 0.1,
    of_connections: 0.2,
    of_tasks: 0.3,
    of_tasks_apart: 0.1,
    of_chiefs: 0.06,
    of_disks: 0.04,
}


def main(faults: int, seed: int) -> None:
    """Share the faults among the campaigns, and print how each went; none leaves anything."""
    # That workers are started again would be most of what is printed.
    logging.getLogger("paceline").setLevel(logging.ERROR)
    for campaign, share in PARTS.items():
        before = holdings()
        report = campaign(max(1, round(share * faults)), seed)
        sys.stdout.write(f"{campaign.__doc__}\n{report}\n")
        sys.stdout.flush()
        _check_nothing_is_left(before)
    sys.stdout.write("nothing was left: no thread, process, descriptor or segment\n")


def _check_nothing_is_left(before: Holdings) -> None:
    def nothing() -> bool:
        gc.collect()
        return not holdings().beyond(before)

    try:
        until(nothing)
    except AssertionError:
        raise AssertionError(f"left: {holdings().beyond(before)}") from None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
