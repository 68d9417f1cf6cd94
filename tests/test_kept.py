"""What workers keep for whoever has their place after them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, every_engine, quiet, slow_beside

import paceline
from paceline import TaskFailed

pytestmark = pytest.mark.timeout(120)


def counting(policy: Any, worker: paceline.Worker) -> Iterator[Any]:
    state = worker.kept or {"done": 0, "at": np.zeros(2)}
    while True:
        policy.read()
        state["done"] += 1
        state["at"] += 1
        worker.keep(state)
        yield {"index": worker.index, "done": state["done"], "at": state["at"].copy()}


def kept(worker: paceline.Worker) -> Any:
    before = worker.kept
    worker.keep({"index": worker.index})
    return before


@pytest.mark.parametrize("engine", ["serial", "threads", slow_beside])
def test_what_was_kept_goes_on_in_another_cluster_with_more_workers(
    engine: str, tmp_path: Path
) -> None:
    last = 0
    for workers in (1, 2):
        with quiet(workers, engine) as cluster:
            cluster.session.restore(tmp_path)
            policy = cluster.variable("policy", 0)
            first: dict[int, int] = {}
            for batch in cluster.collect(counting, policy, batch_size=1, max_lag=None):
                index, done = int(batch.data["index"][0]), int(batch.data["done"][0])
                assert batch.data["at"][0].tolist() == [done, done]
                first.setdefault(index, done)
                if len(first) == workers and done > 2:
                    break
            if workers == 1:
                found = cluster.variable("kept by worker:0 for counting-1").read().tree
                last = int(found["done"])
                del found
                cluster.session.save(tmp_path)
            else:
                assert first == {0: last + 1, 1: 1}


def dying(policy: Any, worker: paceline.Worker) -> Iterator[Any]:
    policy.read()
    if worker.kept is None:
        worker.keep({"died": 1})
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        yield worker.kept


def test_what_was_kept_is_there_after_a_restart() -> None:
    with quiet(1) as cluster:
        policy = cluster.variable("policy", 0)
        with cluster.collect(dying, policy, batch_size=1) as collection:
            assert collection.next(timeout=LIMIT).data["died"].tolist() == [1]


@every_engine
def test_calls_of_a_worker_share_what_it_keeps(engine: str) -> None:
    with quiet(2, engine) as cluster:
        assert cluster.run(kept) == [None, None]
        assert cluster.run(kept) == [{"index": 0}, {"index": 1}]


def other(worker: paceline.Worker) -> None:
    worker.keep(1)
    worker.keep("two")


def test_what_is_kept_has_one_structure() -> None:
    with quiet(1, "serial") as cluster:
        with pytest.raises(TaskFailed, match=r"'kept by worker:0 for calls': leaf \$ is str"):
            cluster.run(other)
