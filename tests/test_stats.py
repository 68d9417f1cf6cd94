"""cluster.stats and what is warned of."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, every_engine, following, quiet, until

import paceline
from paceline.core.stats import Spent, Stats
from paceline.watch import Watch

pytestmark = pytest.mark.timeout(120)


def spin(seconds: float) -> None:
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then:
        pass


def closes(spent: Spent) -> bool:
    return abs(sum(spent.seconds.values()) - spent.wall) <= 0.01 * spent.wall


@every_engine
def test_the_times_of_every_process_close_with_the_wall(engine: str) -> None:
    before = time.monotonic()
    with quiet(2, engine) as cluster:
        opened = time.monotonic()
        policy = cluster.variable("policy", {"x": np.zeros(3)})
        with cluster.collect(following, policy, batch_size=4) as batches:
            for _ in range(5):
                batches.next(timeout=LIMIT)
                policy.assign({"x": np.zeros(3)})
                spin(0.02)
            least = time.monotonic() - opened
            stats = cluster.stats()
            most = time.monotonic() - before
    assert least <= stats.wall <= most
    assert closes(stats.chief)
    assert stats.chief.seconds["busy"] >= 5 * 0.02
    assert stats.chief.seconds["batch"] > 0
    for worker in stats.workers:
        assert closes(worker.spent)
        assert least - 1.0 <= worker.spent.wall <= most
    if engine == "processes":
        assert stats.server is not None
        assert closes(stats.server)
    else:
        assert stats.server is None


@every_engine
def test_a_snapshot_says_what_each_worker_used_and_where_everything_is(engine: str) -> None:
    with quiet({"actor": 2, "eval": 1}, engine) as cluster:
        policy = cluster.variable("policy", {"x": np.zeros(3)})
        cluster.queue("spare", 7).enqueue({"x": 1})
        with cluster.collect(following, policy, batch_size=4, max_lag=None) as batches:

            def all_have_made_some() -> Stats | None:
                batches.next(timeout=LIMIT)
                policy.assign({"x": np.zeros(3)})
                stats = cluster.stats()
                return stats if all(worker.items for worker in stats.workers[:2]) else None

            stats = until(all_have_made_some)
    assert [worker.name for worker in stats.workers] == ["actor:0", "actor:1", "eval:0"]
    actors = stats.workers[:2]
    assert all(worker.collection == "following-1" and worker.alive for worker in actors)
    assert sum(worker.items for worker in actors) == stats.collections["following-1"].accepted
    for worker in actors:
        assert worker.version is not None
        assert worker.behind == stats.variables["policy"] - worker.version
    assert (stats.workers[2].items, stats.workers[2].collection) == (0, None)
    assert stats.queues["spare"].stored == 1
    assert all(q.conserved for q in [*stats.queues.values(), *stats.collections.values()])
    assert stats.calls["eval"] == dataclasses.replace(stats.calls["eval"], waiting=0, running=0)


def test_a_snapshot_cannot_be_changed() -> None:
    with quiet(1, "serial") as cluster:
        cluster.queue("q", 1)
        stats = cluster.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.wall = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        stats.queues["q"] = stats.queues["q"]  # type: ignore[index]
    with pytest.raises(TypeError):
        stats.chief.seconds["busy"] = 0.0  # type: ignore[index]


def hold(path: str, x: int, worker: paceline.Worker) -> None:
    until(lambda: os.path.exists(path) or worker.should_stop())


def test_a_call_that_runs_is_busy_however_long_nothing_is_heard(tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    with quiet(2) as cluster:
        cluster.map(abs, [1, 2])
        future = cluster.submit(functools.partial(hold, str(gate)), 0)

        def busy() -> Stats | None:
            stats = cluster.stats()
            return (
                stats if any(w.spent.seconds.get("busy", 0) > 0.3 for w in stats.workers) else None
            )

        stats = until(busy)
        assert (stats.calls["worker"].running, stats.calls["worker"].waiting) == (1, 0)
        assert sorted(w.spent.seconds.get("busy", 0) > 0.3 for w in stats.workers) == [False, True]
        gate.touch()
        future.result(LIMIT)


def test_a_worker_that_may_not_start_an_item_waits_for_admission() -> None:
    with quiet(1) as cluster:
        policy = cluster.variable("policy", {"x": np.zeros(3)})
        with cluster.collect(following, policy, batch_size=1) as batches:
            batches.next(timeout=LIMIT)
            until(lambda: cluster.stats().workers[0].spent.seconds.get("admission", 0) > 0.3)
            worker = cluster.stats().workers[0]
    assert worker.waits == "start 'following-1'"
    assert closes(worker.spent)


def reads_once(policy: paceline.Variable[Any]) -> Iterator[Any]:
    policy.read()
    while True:
        yield 1


def test_a_worker_that_never_reads_again_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with quiet(1, "threads") as cluster:
        policy = cluster.variable("policy", {"x": np.zeros(3)})
        watch = Watch(cluster.stats, every=0.01, window=0.02)
        with cluster.collect(reads_once, policy, batch_size=1, max_lag=None) as batches:
            for _ in range(30):
                batches.next(timeout=LIMIT)
                policy.assign({"x": np.zeros(3)})
            with caplog.at_level(logging.WARNING, "paceline"):
                for _ in range(4):
                    watch.judge(cluster.stats())
                    spin(0.02)
                    batches.next(timeout=LIMIT)
    found = [r.getMessage() for r in caplog.records if "worker:0 has made" in r.getMessage()]
    assert len(found) == 1
    assert re.match(
        r"worker:0 has made \d+ items with version 1, which is \d+ versions old", found[0]
    )


def test_the_watch_ends_with_the_cluster_and_not_when_the_server_is_gone() -> None:
    seen = []

    def look() -> Stats:
        seen.append(1)
        raise paceline.Disconnected("gone") if len(seen) == 1 else paceline.Closed("over")

    watch = Watch(look, every=0.001, window=0.01)
    watch.start()
    watch.start()
    until(
        lambda: len(seen) == 2 and "paceline-watch" not in [t.name for t in threading.enumerate()]
    )
    watch.close()
    watch.close()
    assert len(seen) == 2
