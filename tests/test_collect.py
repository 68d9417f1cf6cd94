"""Collecting: what workers yield comes in batches, and what cannot come is said."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import (
    LIMIT,
    accounted,
    beside,
    every_engine,
    following,
    gated,
    quiet,
    slow_beside,
    until,
)

import paceline
from paceline import Closed, FunctionError, SchemaError, TimedOut, UnknownName, WorkerFailed


def counting() -> Iterator[Any]:
    number = 0
    while True:
        yield number
        number += 1


# What arrives


@every_engine
def test_nested_trees_are_stacked_leaf_by_leaf_in_memory_of_their_own(engine: str) -> None:
    def nested() -> Iterator[Any]:
        for n in range(4):
            image = np.full((2, 3), n, np.uint8)
            yield {
                "obs": {"image": image, "parts": [np.float32(n), (n, "name", None)]},
                "done": n > 2,
            }

    with quiet(1, engine) as cluster:
        batch = cluster.collect(nested, batch_size=4).next()
    obs = batch.data["obs"]
    assert obs["image"].shape == (4, 2, 3)
    assert obs["image"].dtype == np.uint8
    assert obs["parts"][0].dtype == np.float32
    np.testing.assert_array_equal(obs["parts"][1][0], [0, 1, 2, 3])
    assert list(obs["parts"][1][1]) == ["name"] * 4
    np.testing.assert_array_equal(batch.data["done"], [False, False, False, True])
    obs["image"][:] = 7
    assert obs["image"].flags.owndata or obs["image"].flags.writeable
    assert batch.worker == ("worker:0",) * 4
    assert batch.version.tolist() == [-1] * 4


@every_engine
def test_a_batch_becomes_torch_tensors_over_its_own_memory(engine: str) -> None:
    torch = pytest.importorskip("torch")  # here, lest every worker imports it

    def items() -> Iterator[Any]:
        while True:
            yield {"x": np.arange(3, dtype=np.float32), "label": 5, "name": "n"}

    with quiet(1, engine) as cluster:
        batch = cluster.collect(items, batch_size=2).next()
    moved: Any = batch.to("torch")
    assert isinstance(moved.data["x"], torch.Tensor)
    assert moved.data["x"].shape == (2, 3)
    assert moved.data["label"].tolist() == [5, 5]
    moved.data["x"] += 1
    np.testing.assert_array_equal(batch.data["x"][1], [1, 2, 3])
    assert moved.worker == batch.worker
    with pytest.raises(UnknownName, match=r"^no adapter 'torhc'"):
        batch.to("torhc")


@every_engine
def test_a_torch_module_is_a_variables_value_and_filled_in_place(engine: str) -> None:
    torch = pytest.importorskip("torch")  # here, lest every worker imports it

    def plays(policy: Any, worker: Any) -> Iterator[Any]:
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        bias: Any = net[0].bias
        while True:
            version = policy.read_into(net)
            yield {"version": version, "bias": bias.detach()}

    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    bias: Any = net[0].bias
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", net)
        batches = cluster.collect(plays, policy, batch_size=2, max_lag=0)
        for step in range(3):
            batch = batches.next(timeout=LIMIT)
            np.testing.assert_array_equal(batch.data["bias"], [bias.detach().numpy()] * 2)
            np.testing.assert_array_equal(batch.version, batch.data["version"])
            with torch.no_grad():
                bias.fill_(float(step))
            policy.assign(net)


@every_engine
def test_items_that_change_their_shape_come_as_a_list_and_stack_again_later(engine: str) -> None:
    def ragged() -> Iterator[Any]:
        for n in (1, 2, 3, 3):
            yield np.zeros(n)

    with quiet(1, engine) as cluster:
        lists, arrays = list(cluster.collect(ragged, batch_size=2))
    assert [item.shape for item in lists.data] == [(1,), (2,)]
    assert arrays.data.shape == (2, 3)


@every_engine
def test_what_is_logged_travels_with_the_next_item(engine: str) -> None:
    def logs(worker: Any) -> Iterator[Any]:
        for n in range(3):
            if n != 1:
                worker.log(score=n, steps=10)
                worker.log(score=n + 0.5)
            yield n

    with quiet(1, engine) as cluster:
        batches = cluster.collect(logs, batch_size=1)
        metrics = [batch.metrics for batch in batches]
    assert [{k: v.tolist() for k, v in found.items()} for found in metrics] == [
        {"score": [0.0, 0.5], "steps": [10.0]},
        {},
        {"score": [2.0, 2.5], "steps": [10.0]},
    ]
    assert batches.tally.steps == 20
    assert batches.tally.means() == {"score": 1.25}


# How a collection ends


@every_engine
def test_leaving_the_loop_runs_what_the_generators_do_at_last(engine: str, tmp_path: Path) -> None:
    def tidy(folder: str, worker: Any) -> Iterator[Any]:
        try:
            yield from counting()
        finally:
            Path(folder, str(worker.index)).touch()

    with quiet(2, engine) as cluster:
        begun: set[str] = set()
        for batch in cluster.collect(tidy, str(tmp_path), batch_size=2):
            begun |= set(batch.worker)
            if len(begun) == 2:
                break
        if engine == "serial":
            assert len(cluster.collect(counting, batch_size=2).next()) == 2
        until(lambda: len(list(tmp_path.iterdir())) == 2)


@every_engine
def test_collections_follow_each_other_on_the_same_workers(engine: str) -> None:
    with quiet(2, engine) as cluster:
        for size in (1, 3, 2):
            with cluster.collect(counting, batch_size=size) as batches:
                for _ in range(3):
                    assert len(batches.next(timeout=LIMIT)) == size
            with pytest.raises(Closed, match=r"^collection 'counting-\d' is closed$"):
                batches.next()


@every_engine
def test_two_jobs_make_their_own_batches_side_by_side(engine: str) -> None:
    with quiet({"actor": 2, "eval": 1}, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        actors = cluster.collect(following, policy, batch_size=4, job="actor", max_lag=0)
        evals = cluster.collect(counting, batch_size=1, job="eval")
        for n in range(5):
            assert set(actors.next(timeout=LIMIT).worker) <= {"actor:0", "actor:1"}
            assert evals.next(timeout=LIMIT).data.tolist() == [n]
            policy.assign(np.zeros(3))
        evals.close()
        assert len(actors.next(timeout=LIMIT)) == 4
        said = r"^no workers of job 'actr'; there are \['actor', 'eval'\]$"
        with pytest.raises(SchemaError, match=said):
            cluster.collect(counting, batch_size=1, job="actr")


@beside
def test_should_stop_is_true_once_the_collection_is_closed(engine: str, tmp_path: Path) -> None:
    def long(done: str, worker: Any) -> Iterator[Any]:
        yield 1
        while not worker.should_stop():
            os.sched_yield()
        Path(done).touch()
        yield 2

    done = tmp_path / "done"
    with quiet(1, engine) as cluster:
        with cluster.collect(long, str(done), batch_size=1) as batches:
            batches.next(timeout=LIMIT)
            assert not done.exists()
        until(done.exists)


@beside
def test_should_stop_is_true_once_the_cluster_is_closed(engine: str, tmp_path: Path) -> None:
    def long(done: str, worker: Any) -> Iterator[Any]:
        yield 1
        while not worker.should_stop():
            os.sched_yield()
        Path(done).touch()

    done = tmp_path / "done"
    with quiet(1, engine) as cluster:
        cluster.collect(long, str(done), batch_size=1).next(timeout=LIMIT)
    until(done.exists)


@beside
def test_closing_a_collection_ends_its_functions_waits(engine: str) -> None:
    """Not only their steps: the next collection needs the workers now."""

    def waits(policy: Any, jobs: Any, worker: Any) -> Iterator[Any]:
        yield policy.read().version
        if worker.index:
            jobs.dequeue(timeout=None)
        policy.read(newer_than=policy.version, timeout=None)

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        jobs = cluster.queue("jobs", 1)
        for _ in range(3):
            with cluster.collect(waits, policy, jobs, batch_size=2) as batches:
                assert set(batches.next(timeout=LIMIT).worker) == {"worker:0", "worker:1"}
        with cluster.collect(following, policy, batch_size=2) as batches:
            begun: set[str] = set()
            while len(begun) < 2:
                begun |= set(batches.next(timeout=LIMIT).worker)


# Waiting


@beside
def test_a_wait_that_times_out_loses_nothing_and_says_what_is_missing(
    engine: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with quiet(1, engine) as cluster:
        batches = cluster.collect(gated, str(gate), batch_size=2)
        until(lambda: batches.stats()["stored"] == 1)
        said = (
            r"^next batch of 'gated-1': 1 of 2 items are there, [12] more are admitted; members: "
            r"chief:0, worker:0, after 0\.1 s "
        )
        with pytest.raises(TimedOut, match=said):
            batches.next(timeout=0.1)
        with pytest.raises(TimedOut, match=r"^next batch of 'gated-1': 1 of 2"):
            batches.next(timeout=0)
        gate.touch()
        assert batches.next(timeout=LIMIT).data.tolist() == [0, 1]
        assert batches.next(timeout=LIMIT).data.tolist() == [2, 3]
        assert accounted(batches.stats())


@every_engine
@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
def test_a_timeout_that_is_none_is_refused(engine: str, timeout: Any) -> None:
    with quiet(1, engine) as cluster:
        batches = cluster.collect(counting, batch_size=1)
        with pytest.raises(ValueError, match=r"^timeout must be (>= 0 )?seconds or None, not "):
            batches.next(timeout=timeout)
        assert batches.next(timeout=LIMIT).data.tolist() == [0]


# Bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, r"^batch_size is a whole number, 1 or more, not 0$"),
        ({"batch_size": -3}, r"^batch_size is a whole number, 1 or more, not -3$"),
        ({"batch_size": 2.0}, r"^batch_size is a whole number, 1 or more, not 2\.0$"),
        ({"batch_size": "2"}, r"^batch_size is a whole number, 1 or more, not '2'$"),
        ({"batch_size": True}, r"^batch_size is a whole number, 1 or more, not True$"),
        ({"batch_size": 5, "capacity": 4}, r"^batch_size=5 is outside of 1 to capacity=4$"),
        ({"batch_size": 1, "capacity": 0}, r"^capacity is a whole number, 1 or more, not 0$"),
        (
            {"batch_size": 1, "capacity_bytes": 0},
            r"^capacity_bytes is a whole number, 1 or more, not 0$",
        ),
        (
            {"batch_size": 1, "max_lag": -1},
            r"^max_lag is a whole number, 0 or more, or None, not -1$",
        ),
        (
            {"batch_size": 1, "max_lag": 0.5},
            r"^max_lag is a whole number, 0 or more, or None, not 0\.5$",
        ),
        (
            {"batch_size": 1, "version_of": "polic"},
            r"^version_of='polic' is not among the resources' variables \['policy'\]$",
        ),
        ({"batch_size": 1, "version_of": 3}, r"^version_of=3 is not among the resources'"),
    ],
)
def test_bad_numbers_are_refused_at_once_and_nothing_is_harmed(options: Any, said: str) -> None:
    with quiet(1, "serial") as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with pytest.raises(SchemaError, match=said):
            cluster.collect(following, policy, **options)
        size: Any = np.int64(2)
        assert len(cluster.collect(following, policy, batch_size=size, capacity=2).next()) == 2


@every_engine
def test_what_cannot_be_sent_is_named(engine: str) -> None:
    lock = threading.Lock()

    def locked() -> Iterator[Any]:
        with lock:
            yield 1

    with quiet(1, engine) as cluster:
        with pytest.raises(
            FunctionError, match=r"^locked cannot be sent to a worker: captured var"
        ):
            cluster.collect(locked, batch_size=1)
        with pytest.raises(FunctionError, match=r"cannot be sent to a worker: .*_thread\.lock"):
            cluster.collect(counting, lock, batch_size=1)
        assert cluster.collect(counting, batch_size=1).next(timeout=LIMIT).data.tolist() == [0]


@every_engine
def test_a_cluster_itself_cannot_travel(engine: str) -> None:
    with quiet(1, engine) as cluster:

        def captures() -> Iterator[Any]:
            yield repr(cluster)

        said = r"(?s)cannot run:\nFunctionError: a cluster cannot be used in another process"
        with pytest.raises(WorkerFailed, match=said):
            cluster.collect(captures, batch_size=1).next(timeout=LIMIT)


class Odd:
    pass


@every_engine
@pytest.mark.parametrize(
    ("item", "leaf"),
    [
        (
            lambda: {"a": {"b": [np.zeros(2), Odd()]}},
            r"leaf \$\.a\.b\[1\] is a .*Odd; allowed are ",
        ),
        (
            lambda: {"a": np.array([None, {}], object)},
            r"leaf \$\.a is an array of object; allowed ",
        ),
        (lambda: [1, {2, 3}], r"leaf \$\[1\] is a set; allowed are "),
        (lambda: 1 << 70, r"leaf \$ is an int of more than 64 bits: "),
        (lambda: {(1, 2): 3}, r"\$ has the key \(1, 2\); keys are str or int"),
    ],
)
def test_an_item_that_may_not_travel_is_refused_with_the_leaf_and_what_may(
    engine: str, item: Callable[[], Any], leaf: str
) -> None:
    def odd() -> Iterator[Any]:
        yield item()

    with quiet(1, engine) as cluster:
        with pytest.raises(
            WorkerFailed, match=rf"(?s)^worker:0 cannot run:.*item 0 of odd: {leaf}"
        ):
            cluster.collect(odd, batch_size=1).next(timeout=LIMIT)


# What travels to a worker


@every_engine
def test_captured_handles_reconnect(engine: str) -> None:
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.arange(3.0))
        results = cluster.queue("results", 10)
        session = cluster.session

        def captures() -> Iterator[Any]:
            for n in range(2):
                results.enqueue(n)
                yield [policy.read().tree, session.variable("policy").version, session.task]

        batch = cluster.collect(captures, batch_size=2).next(timeout=LIMIT)
        assert results.dequeue_many(2).data.tolist() == [0, 1]
        np.testing.assert_array_equal(batch.data[0], [np.arange(3.0)] * 2)
        assert batch.data[1].tolist() == [policy.version] * 2
        assert list(batch.data[2]) == ["worker:0"] * 2


@every_engine
def test_any_callable_that_makes_an_iterator_is_a_function(engine: str) -> None:
    class Player:
        def __init__(self, start: int) -> None:
            self.start = start

        def __call__(self, worker: Any) -> Iterator[Any]:
            yield from range(self.start + worker.index, 100)

    with quiet(1, engine) as cluster:
        assert cluster.collect(Player(5), batch_size=2).next().data.tolist() == [5, 6]
        assert cluster.collect(lambda: iter([1, 2]), batch_size=2).next().data.tolist() == [1, 2]


@pytest.mark.parametrize("engine", ["serial", "threads", slow_beside])
def test_one_seed_of_the_cluster_gives_each_worker_the_same_seed_again(engine: str) -> None:
    def seeds(seed: int | None) -> list[int]:
        def tells(worker: Any) -> Iterator[Any]:
            yield {"index": worker.index, "seed": worker.seed}

        with quiet({"actor": 2, "eval": 1}, engine, seed=seed) as cluster:
            assert seed is None or cluster.seed == seed
            found: dict[tuple[str, int], int] = {}
            for job, count in (("actor", 2), ("eval", 1)):
                data = cluster.collect(tells, batch_size=count, job=job).next(timeout=LIMIT).data
                found |= {(job, int(i)): int(s) for i, s in zip(*data.values(), strict=True)}
        return [found[key] for key in sorted(found)]

    first = seeds(3)
    assert len(set(first)) == 3
    assert seeds(3) == first
    assert not set(seeds(None)) & set(first)


def test_a_workers_environment_was_clean_before_its_first_import() -> None:
    def tells() -> Iterator[Any]:
        # What the process was started with; os.environ could have been changed since.
        lines = Path("/proc/self/environ").read_bytes().decode().split("\0")
        yield dict(line.split("=", 1) for line in lines if "=" in line)

    with quiet(1) as cluster:
        found = cluster.collect(tells, batch_size=1).next(timeout=LIMIT).data
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        assert found[name] == ["1"]
    assert found["CUDA_VISIBLE_DEVICES"] == [""]
    assert found["JAX_PLATFORMS"] == ["cpu"]
    with quiet(1, worker_threads=2, worker_devices="0,1") as cluster:
        found = cluster.collect(tells, batch_size=1).next(timeout=LIMIT).data
    assert found["OMP_NUM_THREADS"] == ["2"]
    assert found["CUDA_VISIBLE_DEVICES"] == ["0,1"]


def test_many_batches_are_made_in_order_and_none_twice() -> None:
    """A soak: every item of every worker arrives once, in its own order."""
    with quiet(2) as cluster:
        batches = cluster.collect(numbered, batch_size=8)
        last: dict[str, deque[int]] = {}
        until_at = time.monotonic() + 1
        while time.monotonic() < until_at:
            batch = batches.next(timeout=LIMIT)
            for who, number in zip(batch.worker, batch.data, strict=True):
                seen = last.setdefault(who, deque([-1], maxlen=1))
                assert number == seen[-1] + 1
                seen.append(int(number))
        assert accounted(batches.stats())


def numbered(worker: paceline.Worker) -> Iterator[int]:
    yield from counting()
