"""Everything in one thread: the same in a fixed order, for tests and debuggers."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import following, quiet

from paceline import TimedOut, WorkerFailed, WouldBlock


def test_workers_take_turns_in_a_fixed_order() -> None:
    def run() -> list[Any]:
        with quiet(3, "serial", seed=4) as cluster:
            policy = cluster.variable("policy", np.zeros(2))

            def draws(policy: Any, worker: Any) -> Iterator[Any]:
                random = np.random.default_rng(worker.seed)
                while True:
                    yield policy.read().tree + random.normal(size=2)

            made: list[Any] = []
            for batch in cluster.collect(draws, policy, batch_size=4):
                made.append((batch.worker, batch.lag.tolist(), batch.data.tolist()))
                policy.assign(batch.data[0])
                if len(made) == 5:
                    return made
            raise AssertionError("it ended")

    first = run()
    assert first == run()
    assert first[0][0] == ("worker:0", "worker:1", "worker:2", "worker:0")


def test_no_thread_and_no_process_is_started() -> None:
    before = threading.active_count()
    with quiet(2, "serial") as cluster:
        policy = cluster.variable("policy", np.zeros(2))
        cluster.collect(following, policy, batch_size=2).next()
        assert threading.active_count() == before


def test_a_function_runs_in_the_callers_thread_where_a_debugger_stops() -> None:
    def looks() -> Iterator[Any]:
        names = [frame.name for frame in traceback.extract_stack(sys._getframe())]
        yield [threading.current_thread() is threading.main_thread(), ",".join(names)]

    with quiet(1, "serial") as cluster:
        here, names = cluster.collect(looks, batch_size=1).next().data
    assert here.tolist() == [True]
    assert "test_a_function_runs_in_the_callers_thread_where_a_debugger_stops" in names[0]


def test_ctrl_c_in_a_workers_item_reaches_the_caller_and_ends_nothing_else() -> None:
    def interrupted(closed: Any) -> Iterator[Any]:
        try:
            yield 1
            raise KeyboardInterrupt
        finally:
            closed.enqueue(True)

    with quiet(1, "serial") as cluster:
        policy = cluster.variable("policy", np.zeros(2))
        closed = cluster.queue("closed", 1)
        batches = cluster.collect(interrupted, closed, batch_size=2)
        with pytest.raises(KeyboardInterrupt):
            batches.next()
        assert closed.dequeue(timeout=0) is True
        assert len(cluster.collect(following, policy, batch_size=2).next()) == 2


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_worker_that_would_wait_for_ever_is_told_for_what(timeout: float | None) -> None:
    def waits(policy: Any) -> Iterator[Any]:
        yield policy.read().version
        yield policy.read(newer_than=policy.version, timeout=timeout).version

    with quiet(1, "serial") as cluster:
        policy = cluster.variable("policy", np.zeros(2))
        said = (
            r"(?s)^worker:0 cannot run:.*WouldBlock: read 'policy' newer than version 1: it is 1;"
            r" the next assign ends the wait; .*everything runs in this one thread"
        )
        with pytest.raises(WorkerFailed, match=said):
            cluster.collect(waits, policy, batch_size=2).next()


def test_a_chief_that_would_wait_for_ever_is_told_for_what() -> None:
    with quiet(1, "serial") as cluster:
        queue = cluster.queue("jobs", 2)
        with pytest.raises(WouldBlock, match=r"^dequeue .*'jobs'.*one thread"):
            queue.dequeue(timeout=None)
        with pytest.raises(WouldBlock, match=r"^no variable 'nobody' is ini.*one thread"):
            cluster.variable("nobody", timeout=None)
        queue.enqueue_many([1, 2])
        full = r"^enqueue of 1 items to 'jobs': it is full.*one thread"
        with pytest.raises(WouldBlock, match=full):
            queue.enqueue(3, timeout=None)
        assert queue.dequeue_many(2).data.tolist() == [1, 2]
        with pytest.raises(TimedOut):
            queue.dequeue(timeout=0)


def test_a_batch_that_no_worker_can_complete_is_told() -> None:
    def one() -> Iterator[Any]:
        yield 1

    def endless(worker: Any) -> Iterator[Any]:
        while True:
            yield worker.index

    with quiet({"a": 1, "b": 1}, "serial") as cluster:
        assert list(cluster.collect(one, batch_size=2, job="a")) == []
        batches = cluster.collect(endless, batch_size=3, job="b")
        assert batches.next().worker == ("b:0",) * 3


def test_the_traceback_of_a_function_is_its_own_alone() -> None:
    def reader(policy: Any) -> Iterator[Any]:
        policy.read()
        yield policy.read(tag="nope").tree

    with quiet(1, "serial") as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        batches = cluster.collect(reader, policy, batch_size=1)
        with pytest.raises(WorkerFailed, match="no tag 'nope'") as caught:
            batches.next(timeout=20)
        assert "TimedOut" not in str(caught.value)


def test_ctrl_c_in_a_function_is_no_failure_of_it() -> None:
    def makes(presses: Any) -> Iterator[Any]:
        if presses.read().tree < 6:
            presses.assign_add(1)
            raise KeyboardInterrupt
        yield from range(100)

    with quiet(1, "serial", restarts=1) as cluster:
        batches = cluster.collect(makes, cluster.variable("presses", 0), batch_size=2)
        for _ in range(6):
            with pytest.raises(KeyboardInterrupt):
                batches.next(timeout=20)
        assert batches.next(timeout=20).data.tolist() == [0, 1]
