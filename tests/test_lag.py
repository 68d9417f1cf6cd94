"""Pacing by lag: no item older than allowed is handed over, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, accounted, beside, every_engine, following, gated, quiet, until

import paceline
from paceline import TooStale
from paceline.core.versions import count_of

BATCHES = 25


def spun(turns: int) -> float:
    """Keep a processor busy for a while that depends on nothing but the number."""
    total = 0.0
    for turn in range(turns):
        total += turn * 0.5
    return total


def slow(policy: Any, worker: Any) -> Iterator[Any]:
    """Workers that are slower than the trainer, and not equally so."""
    while True:
        version = policy.read().version
        spun(20_000 * (1 + worker.index))
        yield {"version": version, "index": worker.index}


@every_engine
@pytest.mark.parametrize(
    "trainer",
    ["fast", "slow", pytest.param("assigns three times", marks=pytest.mark.slow), "never assigns"],
)
def test_no_trainer_is_handed_older_items_than_it_allows(engine: str, trainer: str) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        for max_lag in (0, 1, 4, None):
            train(cluster, policy, trainer, max_lag)


def train(cluster: paceline.Cluster, policy: Any, trainer: str, max_lag: int | None) -> None:
    assigns = {"assigns three times": 3, "never assigns": 0}.get(trainer, 1)
    fn = following if trainer == "slow" else slow
    with cluster.collect(fn, policy, batch_size=4, max_lag=max_lag) as batches:
        for _ in range(BATCHES):
            batch = batches.next(timeout=LIMIT)
            np.testing.assert_array_equal(batch.version, batch.data["version"])
            np.testing.assert_array_equal(batch.lag, policy.version - batch.version)
            assert max_lag is None or batch.lag.max() <= max_lag
            if trainer == "slow":
                spun(100_000)
            for _ in range(assigns):
                policy.assign(np.zeros(3))
        stats = batches.stats()
    assert accounted(stats)
    assert stats["delivered"] == BATCHES * 4
    assert stats["finished"] == BATCHES - 1
    assert set(stats["dropped"]) <= {"stale"}
    if max_lag is None or not assigns:
        assert stats["dropped"] == {}
    assert stats["stored"] <= stats["capacity"]


@beside
def test_a_trainer_that_assigns_once_per_batch_wastes_no_items_of_equal_workers(
    engine: str,
) -> None:
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(following, policy, batch_size=1, max_lag=2)
        for _ in range(200):
            batches.next(timeout=LIMIT)
            policy.assign(np.zeros(3))
        stats = batches.stats()
    assert stats["dropped"].get("stale", 0) <= 20


@pytest.mark.parametrize("max_lag", [0, 4])
def test_killed_workers_neither_stop_the_trainer_nor_make_it_see_old_items(max_lag: int) -> None:
    with quiet(2, restarts=100) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(following, policy, batch_size=4, max_lag=max_lag)
        killed: set[int] = set()
        while len(killed) < 4:
            batch = batches.next(timeout=LIMIT)
            assert batch.lag.max() <= max_lag
            victim = int(batch.data["pid"][-1])
            if victim not in killed:
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)
            policy.assign(np.zeros(3))
        until(lambda: set(batches.next(timeout=LIMIT).data["pid"]) - killed)
        assert accounted(batches.stats())


@every_engine
def test_a_trainer_that_assigns_while_it_waits_for_nothing_newer_is_told_so(engine: str) -> None:
    def behind(policy: Any) -> Iterator[Any]:
        first = policy.read().version
        while True:
            yield first  # it never reads again

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(behind, policy, batch_size=2, max_lag=1)
        assert batches.next(timeout=LIMIT).lag.tolist() == [0, 0]
        for _ in range(3):
            policy.assign(np.zeros(3))
        said = (
            r"^collection 'behind-1': 20 items in a row were more than max_lag=1 versions old; the"
            r" last: worker:0 made it with version 1, now is 4\. Assign less often, "
        )
        with pytest.raises(TooStale, match=said):
            batches.next(timeout=LIMIT)
        with pytest.raises(TooStale, match=said):
            batches.next(timeout=LIMIT)
        stats = batches.stats()
        assert accounted(stats)
        assert stats["dropped"]["stale"] >= 40


# What an item's stamp says


@every_engine
def test_the_stamp_is_the_first_version_read_for_the_item(engine: str) -> None:
    def reads_twice(policy: Any, gate: Any) -> Iterator[Any]:
        while True:
            first = policy.read().version
            policy.assign(np.zeros(3))  # a worker may assign, too
            second = policy.read().version
            yield {"first": first, "second": second}

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batch = cluster.collect(reads_twice, policy, 0, batch_size=3, max_lag=None).next()
    np.testing.assert_array_equal(batch.version, batch.data["first"])
    assert (batch.data["second"] > batch.data["first"]).all()


@every_engine
def test_an_item_made_without_a_read_has_the_version_still_held(engine: str) -> None:
    def now_and_then(policy: Any) -> Iterator[Any]:
        while True:
            version = policy.read().version
            for _ in range(3):
                yield version

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(now_and_then, policy, batch_size=2, max_lag=None)
        for _ in range(6):
            batch = batches.next(timeout=LIMIT)
            np.testing.assert_array_equal(batch.version, batch.data)
            policy.assign(np.zeros(3))


@every_engine
def test_read_into_stamps_like_read_also_when_nothing_had_changed(engine: str) -> None:
    def fills(policy: Any) -> Iterator[Any]:
        mine = np.zeros(3)
        while True:
            version = policy.read_into(mine)
            yield {"version": version, "used": mine.copy()}

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.full(3, 1.0))
        batches = cluster.collect(fills, policy, batch_size=2)
        for step in range(2, 12):
            batch = batches.next(timeout=LIMIT)
            np.testing.assert_array_equal(batch.version, batch.data["version"])
            made_with = [float(count_of(int(version))) for version in batch.version]
            np.testing.assert_array_equal(batch.data["used"][:, 0], made_with)
            policy.assign(np.full(3, float(step)))


@every_engine
def test_a_read_through_a_captured_handle_stamps_too(engine: str) -> None:
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))

        def captured(_: Any) -> Iterator[Any]:
            while True:
                yield policy.read().version

        batch = cluster.collect(captured, policy, batch_size=2).next()
    np.testing.assert_array_equal(batch.version, batch.data)


@every_engine
def test_another_variable_than_the_first_can_stamp_or_none(engine: str) -> None:
    def reads_both(policy: Any, critic: Any) -> Iterator[Any]:
        while True:
            yield [policy.read().version, critic.read().version]

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        critic = cluster.variable("critic", np.zeros(3))
        critic.assign(np.ones(3))
        for version_of, place in ((critic, 1), ("policy", 0), ("critic", 1)):
            with cluster.collect(
                reads_both, policy, critic, batch_size=1, version_of=version_of
            ) as batches:
                batch = batches.next()
                np.testing.assert_array_equal(batch.version, batch.data[place])
        batch = cluster.collect(reads_both, policy, critic, batch_size=2, version_of=None).next()
        assert batch.version.tolist() == [-1, -1]
        assert batch.lag.size == 0


# Functions that wait for the trainer


@beside
@pytest.mark.parametrize("quota", [1, 101])
def test_functions_that_wait_for_the_next_version_do_not_starve_the_batch(
    engine: str, quota: int
) -> None:
    """What they were admitted to make is made by others while they wait."""

    def rounds(policy: paceline.Variable[Any]) -> Iterator[Any]:
        snapshot = policy.read()
        while True:
            yield from range(quota)
            snapshot = policy.read(newer_than=snapshot.version, timeout=LIMIT)

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        for max_lag in (0, 1, None):
            with cluster.collect(rounds, policy, batch_size=2 * quota, max_lag=max_lag) as batches:
                for _ in range(5):
                    batch = batches.next(timeout=LIMIT)
                    assert set(batch.worker) == {"worker:0", "worker:1"}
                    policy.assign(np.zeros(3))
                assert accounted(batches.stats())


@beside
def test_functions_that_wait_for_work_from_the_trainer_hand_in_what_they_have(engine: str) -> None:
    def answers(questions: Any) -> Iterator[Any]:
        while True:
            yield questions.dequeue(timeout=LIMIT)

    with quiet(2, engine) as cluster:
        questions = cluster.queue("questions", 100)
        batches = cluster.collect(answers, questions, batch_size=3)
        for start in range(0, 60, 3):
            questions.enqueue_many([start, start + 1, start + 2])
            batch = batches.next(timeout=LIMIT)
            assert sorted(batch.data) == [start, start + 1, start + 2]


@beside
def test_a_worker_is_admitted_to_an_item_while_it_makes_the_one_before(
    engine: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with quiet(1, engine) as cluster:
        batches = cluster.collect(gated, str(gate), batch_size=3)
        until(lambda: batches.stats()["stored"] == 1)
        until(lambda: batches.stats()["running"] == 2)
        gate.touch()
        assert batches.next(timeout=LIMIT).data.tolist() == [0, 1, 2]
        assert accounted(batches.stats())
