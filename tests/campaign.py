"""A seeded campaign of faults, which checks after each what paceline promises.

`python tests/campaign.py FAULTS SEED` prints the longest times to notice and to recover.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from clusters import LIMIT, accounted, quiet

import paceline
from paceline.testing import Chaos, Fault, Relay, Report, serving


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
        self._policy = cluster.variable("policy", {"a": np.zeros(9000), "b": np.zeros(7)})
        self._first = self._last = self._policy.version
        self._seen: dict[tuple[int, int], int] = {}
        self._batches = cluster.collect(counting, self._policy, batch_size=4, max_lag=2)

    def step(self) -> None:
        """Take a batch, look at each item, assign."""
        data = self._batches.next(timeout=LIMIT).data
        assert not data["torn"].any()
        # Each assign adds one to all leaves: a version that was applied twice, or not, shows.
        assert data["value"].tolist() == (data["version"] - self._first).tolist()
        for index, seed, number in zip(*data["maker"], data["number"], strict=True):
            maker = (int(index), int(seed))
            # In the order in which its maker made them: none twice.
            assert int(number) > self._seen.get(maker, -1)
            self._seen[maker] = int(number)
        value = self._last - self._first + 1.0
        version = self._policy.assign({"a": np.full(9000, value), "b": np.full(7, value)})
        assert version == self._last + 1
        self._last = version

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
    """The server stopped and slowed under a training."""
    with quiet(2) as cluster:
        training = Training(cluster)
        return Chaos(cluster, seed=seed).campaign(
            training.step,
            faults=faults,
            kinds=["pause", "slow"],
            targets=["ps"],
            check=training.check,
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


PARTS: dict[Callable[[int, int], Report], float] = {
    of_workers: 0.4,
    of_servers: 0.2,
    of_connections: 0.4,
}


def main(faults: int, seed: int) -> None:
    """Share the faults among the campaigns, and print how each went."""
    for campaign, share in PARTS.items():
        report = campaign(max(1, round(share * faults)), seed)
        sys.stdout.write(f"{campaign.__doc__}\n{report}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
