"""Launched clusters with several servers, or with one inside of the trainer."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, descendants, every_engine, named, quiet, until

import paceline
from paceline import Disconnected, SchemaError, UnknownName
from paceline.core import messages as m

pytestmark = pytest.mark.timeout(120)


def both(policy: Any, other: Any) -> Iterator[Any]:
    while True:
        yield {"policy": policy.read().tree, "other": other.read().tree}


@every_engine
def test_a_collection_is_where_its_variable_is_and_reads_others_elsewhere(engine: str) -> None:
    with quiet(2, engine, ps=3) as cluster:
        with cluster.session.device("ps:2"):
            policy = cluster.variable("policy", np.zeros(3))
        other = cluster.variable("other", np.ones(2))
        for number, batch in enumerate(cluster.collect(both, policy, other, batch_size=4), 1):
            assert batch.data["other"].tolist() == [[1.0, 1.0]] * 4
            assert all(lag <= 1 for lag in batch.lag)
            policy.assign(np.full(3, float(number)))
            if number == 5:
                break
        if engine == "processes":
            homes = cluster.resources()["homes"]
            assert homes["collection both-1"] == homes["variable policy"] == "ps:2"
            assert homes["variable other"] == "ps:0"
            with pytest.raises(UnknownName, match=r"^ps:3 runs no server; there are \['ps:0', "):
                cluster.session.device("ps:3").__enter__()


def waiting(policy: Any, go: Any, worker: paceline.Worker) -> Iterator[Any]:
    while True:
        if worker.index == 0:
            go.dequeue(timeout=None)
        yield policy.read().tree


def test_a_function_that_waits_at_another_server_holds_nobody_up() -> None:
    with quiet(2, ps=2) as cluster:
        policy = cluster.variable("policy", 0)
        with cluster.session.device("ps:1"):
            go = cluster.queue("go", 1)
        collection = cluster.collect(waiting, policy, go, batch_size=2, max_lag=0)
        elsewhere = cluster.session.lines.all[1]

        def waits() -> list[str]:
            members = elsewhere.call(m.Stats()).content["members"]
            return [name for name, member in members.items() if member["waits"]]

        def makers() -> tuple[str, ...]:
            made = collection.next(timeout=LIMIT).worker
            policy.assign(1)
            return made

        # It was admitted to an item, else it would not have come so far; two are admitted at once.
        until(lambda: makers() and waits() == ["worker:0"])
        for _ in range(3):
            assert makers() == ("worker:1", "worker:1")
            assert waits() == ["worker:0"]
        go.enqueue(1)
        until(lambda: go.size == 0)


def stuck(policy: Any, never: Any) -> Iterator[Any]:
    yield policy.read().tree
    never.dequeue(timeout=None)


def test_waits_at_another_server_end_with_the_collection() -> None:
    with quiet(1, ps=2) as cluster:
        policy = cluster.variable("policy", 0)
        with cluster.session.device("ps:1"):
            never = cluster.queue("never", 1)
        with cluster.collect(stuck, policy, never, batch_size=1) as collection:
            collection.next(timeout=LIMIT)
        assert cluster.submit(abs, -1).result(LIMIT) == 1


def shared(work: Any, policy: Any) -> Iterator[Any]:
    for piece in work:
        yield piece.value + policy.read().tree


def test_workers_that_get_no_piece_of_a_reader_elsewhere_end_well() -> None:
    with quiet(2, ps=2) as cluster:
        policy = cluster.variable("policy", 1)
        with cluster.session.device("ps:1"):
            work = cluster.reader("work", [1])
        batches = [b.data.tolist() for b in cluster.collect(shared, work, policy, batch_size=1)]
    assert batches == [[2]]


@pytest.mark.parametrize("index", [0, 1])
def test_a_server_that_dies_ends_calls_to_the_others_too(index: int) -> None:
    with quiet(2, ps=2) as cluster:
        policy = cluster.variable("policy", 0)
        with cluster.session.device("ps:1"):
            other = cluster.queue("other", 1)
        collection = cluster.collect(waiting, policy, other, batch_size=64)
        killer = threading.Thread(
            target=os.kill, args=(named(f"ps:{index}", os.getpid()), signal.SIGKILL)
        )
        killer.start()
        try:
            with pytest.raises(Disconnected, match=f"the server, ps:{index}, was killed by SIGKIL"):
                collection.next(timeout=LIMIT)
            with pytest.raises(Disconnected, match=f"the server, ps:{index}, was killed by SIGKIL"):
                other.dequeue(timeout=LIMIT)
        finally:
            killer.join()


def test_stats_are_those_of_all_servers() -> None:
    with quiet(2, ps=2) as cluster:
        with cluster.session.device("ps:1"):
            policy = cluster.variable("policy", np.zeros(3))
        other = cluster.variable("other", np.ones(2))
        for batch in itertools.islice(cluster.collect(both, policy, other, batch_size=8), 4):
            policy.assign(batch.data["policy"][0] + 1)
        stats = cluster.stats()
        assert list(stats.servers) == ["ps:0", "ps:1"]
        assert stats.server == stats.servers["ps:0"]
        assert stats.variables == {"policy": 5, "other": 1}
        assert stats.collections["both-1"].delivered == 32
        assert sum(worker.items for worker in stats.workers) >= 32
        for spent in (*stats.servers.values(), *(worker.spent for worker in stats.workers)):
            assert abs(sum(spent.seconds.values()) - spent.wall) < 0.05
        assert "ps:1 " in str(stats)


def test_rounds_of_lockstep_have_all_their_variables_on_one_server() -> None:
    with quiet(2, ps=2) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with cluster.session.device("ps:1"):
            other = cluster.variable("other", np.ones(2))
            policy_1 = cluster.variable("policy_1", np.zeros(3))
        with pytest.raises(SchemaError, match=r"^in lockstep all variables are on one server"):
            cluster.collect(both, policy, other, batch_size=2, schedule="lockstep")
        collection = cluster.collect(both, policy_1, other, batch_size=2, schedule="lockstep")
        assert set(collection.next(timeout=LIMIT).worker) == {"worker:0", "worker:1"}


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_server_may_be_inside_of_the_trainer(transport: Any) -> None:
    with quiet(2, ps=0, transport=transport) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        other = cluster.variable("other", np.ones(2))
        for batch in itertools.islice(cluster.collect(both, policy, other, batch_size=2), 3):
            policy.assign(batch.data["policy"][0] + 1)
        # The guard and the workers.
        assert len(descendants(os.getpid())) == 3
        assert cluster.map(abs, [-1, -2]) == [1, 2]


def test_a_number_of_servers_is_none_below_0() -> None:
    with pytest.raises(SchemaError, match=r"^ps is a whole number, 0 or more, not -1"):
        paceline.Cluster(ps=-1)
