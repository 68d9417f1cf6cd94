"""One program, every engine: what each of these does has to mean the same on all of them.

What an engine does otherwise by design is a field of its `Kind`, and a row of the second table of
engines in docs/collect.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, accounted, quiet, until

from paceline import (
    Closed,
    Cluster,
    FunctionError,
    Refused,
    SchemaError,
    TaskFailed,
    TimedOut,
    WorkerFailed,
    WouldBlock,
)
from paceline.core.versions import count_of

SEED = 7


@dataclass(frozen=True)
class Kind:
    """An engine, and what is otherwise there by design."""

    name: str
    beside: bool = True
    """Workers go on beside the chief; else each has its turn while the chief waits."""
    alone: bool = True
    """A worker is a process, which can be killed; else it is part of the chief's."""
    near: bool = True
    """How far a worker that died was is known: that is in memory of this host."""
    main: bool = True
    """Functions run in the main thread of their process."""

    def __str__(self) -> str:
        return self.name

    def cluster(self, **options: Any) -> Cluster:
        """Two workers, and a seed that is always the same."""
        return quiet(2, self.name, seed=SEED, **options)


SERIAL = Kind("serial", beside=False, alone=False)
THREADS = Kind("threads", alone=False, main=False)
PROCESSES = Kind("processes")
RAY = Kind("ray", near=False, main=False)


# The same bits


def walks(policy: Any, critic: Any, worker: Any) -> Iterator[Any]:
    """Items that depend on chance and on two variables, and have their own lengths."""
    random = np.random.default_rng(worker.seed)
    while True:
        w, scale = policy.read().tree["w"], critic.read().tree
        steps = [random.normal(size=4) * scale for _ in range(1 + int(random.integers(3)))]
        worker.log(reach=float(np.abs(steps[-1]).max()), steps=len(steps))
        yield {"path": np.cumsum(steps, axis=0) @ w, "by": worker.index}


def digest(cluster: Cluster) -> str:
    """The digest of all that a run makes: batches, stamps, metrics, parameters, calls."""
    policy = cluster.variable("bits policy", {"w": np.eye(4), "b": np.zeros(4)})
    critic = cluster.variable("bits critic", np.float64(1.0))
    found = hashlib.sha256()

    def add(*parts: Any) -> None:
        found.update(repr(parts).encode())

    batches = cluster.collect(walks, policy, critic, batch_size=5, schedule="lockstep")
    for number, batch in enumerate(batches, 1):
        ends = np.stack([item["path"][-1] for item in batch.items()])
        add(batch.worker, [count_of(int(version)) for version in batch.version])
        add(batch.lag.tolist(), {name: v.tolist() for name, v in batch.metrics.items()})
        for item in batch.items():
            found.update(item["path"].tobytes())
        tree = policy.read().tree
        policy.assign({"w": tree["w"] + 0.1 * ends.T @ ends / len(ends), "b": ends.mean(axis=0)})
        critic.assign_add(-0.01 * np.abs(ends).mean())
        if number == 8:
            break

    def score(n: int, policy: Any) -> Any:
        return np.random.default_rng(n).normal(size=4) @ policy.read().tree["w"]

    def draw(policy: Any, worker: Any) -> Any:
        return policy.read().tree["b"] * np.random.default_rng(worker.seed).normal(size=4)

    for array in (*cluster.map(score, range(6), policy), *cluster.run(draw, policy)):
        found.update(array.tobytes())
    add(policy.read().count, critic.read().count)
    found.update(policy.read().tree["w"].tobytes() + critic.read().tree.tobytes())
    return found.hexdigest()


def lockstep_gives_the_bits_that_it_gives_in_one_thread(kind: Kind, cluster: Cluster) -> None:
    with SERIAL.cluster() as serial:
        expected = digest(serial)
    assert digest(cluster) == expected


# Calls


def results_come_in_order_and_errors_fail_their_own_call(kind: Kind, cluster: Cluster) -> None:
    def halves(x: int, table: Any) -> float:
        if x == 2:
            raise ArithmeticError(f"not {x}")
        return x / 2 + float(table.read().tree)

    table = cluster.variable("halves table", 1.0)
    found = cluster.map(halves, range(6), table, return_exceptions=True)
    assert found[:2] + found[3:] == [1.0, 1.5, 2.5, 3.0, 3.5]
    said = r'(?s)^halves\(2\) raised in worker:\d:\nTraceback .*conformance\.py", line \d+, in halv'
    assert isinstance(found[2], TaskFailed)
    assert found[2].input == 2
    assert re.match(said, str(found[2]))
    assert str(found[2]).endswith("\nArithmeticError: not 2")
    assert "paceline/worker" not in str(found[2])
    with pytest.raises(TaskFailed, match=said):
        cluster.map(halves, [1, 2], table)
    future = cluster.submit(halves, 3, table)
    assert future.result(LIMIT) == 2.5
    with pytest.raises(
        SchemaError, match=r"^the result of <lambda>\(1\): leaf \$\.a\[1\] is an object;"
    ):
        cluster.map(lambda x: {"a": [x, object()]}, [1])
    assert cluster.run(lambda worker: (worker.job, worker.index)) == [("worker", 0), ("worker", 1)]


def functions_run_where_the_table_says(kind: Kind, cluster: Cluster) -> None:
    def place() -> tuple[int, bool]:
        return os.getpid(), threading.current_thread() is threading.main_thread()

    (one, first), (other, second) = cluster.run(place)
    assert (first, second) == (kind.main, kind.main)
    if kind.alone:
        assert len({one, other, os.getpid()}) == 3
        found = cluster.processes()
        assert (found["worker:0"], found["worker:1"]) == (one, other)
    else:
        assert one == other == os.getpid()
        assert cluster.processes() == {}
    future = cluster.submit(abs, -1)
    assert kind.beside or future.done()
    assert future.result(LIMIT) == 1


def the_first_error_of_a_run_is_raised_and_ends_the_others(kind: Kind, cluster: Cluster) -> None:
    beside = kind.beside

    def train(worker: Any) -> None:
        if worker.index == 0:
            raise RuntimeError("diverged")
        if beside:  # else it is not called
            until(worker.should_stop)

    with pytest.raises(
        TaskFailed, match=r"(?s)^train raised in worker:0:\nTraceback .*RuntimeError: diverged$"
    ):
        cluster.run(train)
    assert cluster.map(abs, [-1, 2]) == [1, 2]


# What cannot be sent


def what_cannot_travel_is_named_before_anything_starts(kind: Kind, cluster: Cluster) -> None:
    lock, config = threading.Lock(), {}

    def locked() -> Iterator[Any]:
        with lock:
            yield 1

    said = r"^locked cannot be sent to a worker: captured variable 'lock' is a _thread\.lock "
    with pytest.raises(FunctionError, match=said):
        cluster.collect(locked, batch_size=1)
    with pytest.raises(FunctionError, match=said):
        cluster.run(locked)
    said = r"^<lambda> cannot be sent to a worker: captured variable \"config\['log'\]\" is an open"
    with open(os.devnull) as config["log"], pytest.raises(FunctionError, match=said):
        cluster.map(lambda x: config, [1])
    with pytest.raises(SchemaError, match=r"^variable 'odd': leaf \$\.a is a set; allowed are "):
        cluster.variable("odd", {"a": {1}})
    assert cluster.map(abs, [-1]) == [1]


# How a collection ends


def however_a_loop_is_left_its_generators_are_closed(kind: Kind, cluster: Cluster) -> None:
    closed = cluster.counter("loops closed")

    def tidy(closed: Any, worker: Any) -> Iterator[Any]:
        try:
            while True:
                yield worker.index
        finally:
            closed.add()

    def leave(way: str) -> None:
        collection = cluster.collect(tidy, closed, batch_size=2)
        begun: set[str] = set()
        for batch in collection:
            begun |= set(batch.worker)
            if len(begun) < 2:
                continue
            if way == "break":
                break
            if way == "close":
                collection.close()
            else:
                raise {"error": ArithmeticError, "ctrl-c": KeyboardInterrupt}[way](way)
        assert collection.closed
        with pytest.raises(Closed, match=r"^collection 'tidy-\d+' is closed$"):
            collection.next()
        collection.close()

    leave("break")
    leave("close")
    with pytest.raises(ArithmeticError, match=r"^error$"):
        leave("error")
    with pytest.raises(KeyboardInterrupt):
        leave("ctrl-c")
    if not kind.beside:
        # They go on to their end when they have their turn.
        assert closed.value < 8
        cluster.collect(lambda: iter([1, 2]), batch_size=2).next(timeout=LIMIT)
    until(lambda: closed.value == 8)


def a_second_collection_of_a_job_ends_the_first(kind: Kind, cluster: Cluster) -> None:
    def counts() -> Iterator[Any]:
        yield from range(1000)

    first = cluster.collect(counts, batch_size=2)
    first.next(timeout=LIMIT)
    with pytest.raises(Refused, match=r"^abs: the workers of job 'worker' collect for 'counts-\d"):
        cluster.map(abs, [1])
    second = cluster.collect(counts, batch_size=2)
    for ask in (first.next, lambda: list(first)):
        with pytest.raises(Closed, match=r"^collection 'counts-\d+' ended when 'counts-\d+' began"):
            ask()
    assert len(second.next(timeout=LIMIT)) == 2
    second.close()
    # A function that returns ends its loop, with what it made; none of it is lost.
    third = cluster.collect(lambda: iter(range(4)), batch_size=2)
    assert sum(len(batch) for batch in third) == 8


def a_function_at_work_learns_that_it_is_to_stop(kind: Kind, cluster: Cluster) -> None:
    beside = kind.beside
    stopped, waited = cluster.counter("learned"), cluster.counter("waited")

    def long(stopped: Any, nothing: Any, worker: Any) -> Iterator[Any]:
        try:
            yield worker.should_stop()
            if beside and worker.index == 0:
                until(worker.should_stop)
                stopped.add()
            elif beside:
                nothing.dequeue(timeout=None)
            while True:
                yield worker.should_stop()
        finally:
            waited.add()

    collection = cluster.collect(long, stopped, cluster.queue("nothing", 1), batch_size=2)
    assert collection.next(timeout=LIMIT).data.tolist() == [False, False]
    collection.close()
    if not beside:
        # While one is at work the chief, which would stop it, is not.
        cluster.collect(lambda: iter([1, 2]), batch_size=2).next(timeout=LIMIT)
    until(lambda: (stopped.value, waited.value) == (int(beside), 2))


# What is shared


def workers_share_queues_counters_and_barriers(kind: Kind, cluster: Cluster) -> None:
    answers = cluster.queue("answers", 3)
    count = cluster.counter("answered")

    def answer(worker: Any) -> int:
        answers = worker.session.queue("answers")
        answers.enqueue({"by": worker.index, "x": np.full(3, worker.index)}, timeout=LIMIT)
        return int(worker.session.counter("answered").add())

    assert sorted(cluster.run(answer)) == [1, 2]
    assert count.value == 2
    answers.enqueue({"by": 2, "x": np.full(3, 2)})
    with pytest.raises(TimedOut, match=r"^enqueue of 1 items to 'answers': it is full"):
        answers.enqueue({"by": 3, "x": np.zeros(3)}, timeout=0)
    batch = answers.dequeue_many(2, timeout=LIMIT)
    assert sorted(batch.data["by"].tolist()) == [0, 1]
    assert batch.data["x"].tolist() == [[by] * 3 for by in batch.data["by"].tolist()]
    assert accounted(answers.stats())
    answers.close()
    assert answers.dequeue(timeout=LIMIT)["by"] == 2
    with pytest.raises(Closed, match=r"^dequeue .*'answers'"):
        answers.dequeue(timeout=LIMIT)
    stats = answers.stats()
    assert (stats["accepted"], stats["delivered"], stats["stored"]) == (3, 3, 0)


def workers_wait_for_each_other_where_they_are_beside(kind: Kind, cluster: Cluster) -> None:
    def meet(worker: Any) -> int:
        return int(worker.session.barrier("meeting", 2).wait(LIMIT))

    def passes(line: Any, worker: Any) -> Any:
        return line.dequeue(timeout=LIMIT) if worker.index == 0 else line.enqueue("it")

    line = cluster.queue("line", 1)
    if kind.beside:
        assert sorted(cluster.run(meet)) == [0, 1]
        assert cluster.run(passes, line) == ["it", None]
        return
    for function, given in ((meet, ()), (passes, (line,))):
        said = rf"(?s)^{function.__name__} raised in worker:0:.*one thread"
        with pytest.raises(WouldBlock, match=said):
            cluster.run(function, *given)


def items_say_what_they_were_made_with_and_none_is_lost(kind: Kind, cluster: Cluster) -> None:
    def reads(policy: Any) -> Iterator[Any]:
        while True:
            snapshot = policy.read()
            yield [snapshot.version, snapshot.tree]

    for bound in (0, 1, 3, None):
        policy = cluster.variable(f"stamps {bound}", 1)
        with cluster.collect(reads, policy, batch_size=3, max_lag=bound) as batches:
            for number in range(2, 10):
                batch = batches.next(timeout=LIMIT)
                versions, values = batch.data
                assert batch.version.tolist() == versions.tolist()
                assert [count_of(int(version)) for version in versions] == values.tolist()
                now = count_of(policy.version)
                assert batch.lag.tolist() == [now - value for value in values.tolist()]
                assert bound is None or batch.lag.max() <= bound
                policy.assign(number)
            stats = batches.stats()
            assert accounted(stats)
            assert stats["delivered"] == 8 * 3
            assert set(stats["dropped"]) <= {"stale"}
            assert bound is not None or stats["dropped"] == {}


ON_ONE_CLUSTER: tuple[Callable[[Kind, Cluster], None], ...] = (
    # The first: it has the seeds of workers that were never started again.
    lockstep_gives_the_bits_that_it_gives_in_one_thread,
    results_come_in_order_and_errors_fail_their_own_call,
    functions_run_where_the_table_says,
    what_cannot_travel_is_named_before_anything_starts,
    however_a_loop_is_left_its_generators_are_closed,
    a_second_collection_of_a_job_ends_the_first,
    a_function_at_work_learns_that_it_is_to_stop,
    workers_share_queues_counters_and_barriers,
    workers_wait_for_each_other_where_they_are_beside,
    items_say_what_they_were_made_with_and_none_is_lost,
    the_first_error_of_a_run_is_raised_and_ends_the_others,
)
"""For a cluster of `Kind.cluster`, one after the other or each on one of its own."""


# Functions that are wrong


def odd(policy: Any) -> Iterator[Any]:
    yield {"a": [policy.read().version, {2}]}


def never(policy: Any) -> Iterator[Any]:
    while True:
        yield 1


def listed(policy: Any) -> Any:
    return [policy.read().version]


def breaks(policy: Any) -> Iterator[Any]:
    yield policy.read().version
    raise ArithmeticError("in my own words")


def follows(policy: Any) -> Iterator[Any]:
    while True:
        yield policy.read().version


WRONG = {
    odd: r"item 0 of odd: leaf \$\.a\[1\] is a set; allowed are None, .* \(yielded at .*conforma",
    never: r"FunctionError: never yielded an item without ever reading 'policy', so nobody knows",
    listed: r"FunctionError: listed returned a list; to be collected from, a function yields its",
}
TRACEBACK = (
    r'Traceback .*conformance\.py", line \d+, in breaks\n.*\nArithmeticError: in my own words\n'
    r"\(seed \d+, item 1, parameters' version 1\)$"
)


def a_function_that_is_wrong_ends_its_run_with_what_is_wrong(kind: Kind, told: Any) -> None:
    with kind.cluster(restarts=1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        for function, said in WRONG.items():
            with pytest.raises(WorkerFailed, match=rf"(?s)^worker:\d cannot run:\n.*{said}"):
                cluster.collect(function, policy, batch_size=2).next(timeout=LIMIT)
        with pytest.raises(
            WorkerFailed,
            match=r"(?s)^worker:\d failed 2 times within 60 s, its budget is restarts=1; the last"
            rf" time:\n{TRACEBACK}",
        ):
            cluster.collect(breaks, policy, batch_size=50).next(timeout=LIMIT)
        lockstep = cluster.collect(breaks, policy, batch_size=2, schedule="lockstep")
        lockstep.next(timeout=LIMIT)
        for _ in range(2):
            with pytest.raises(
                WorkerFailed,
                match=r"(?s)^worker:\d failed; a run in lockstep goes on with all its workers as"
                rf" they began, or ends:\n{TRACEBACK}",
            ):
                lockstep.next(timeout=LIMIT)
        batches = cluster.collect(follows, policy, batch_size=2)
        assert batches.next(timeout=LIMIT).data.tolist() == [policy.version] * 2
        assert accounted(batches.stats())


# Workers that end


def leave(how: str) -> None:
    """End this worker."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)


def a_worker_that_ends_is_started_again_within_its_budget(kind: Kind, told: Any) -> None:
    second = "killed" if kind.alone else "exits"

    def train(tries: Any, worker: Any) -> str:
        if worker.index == 1 and tries.add() == 1:
            leave("exits")
        return f"done {worker.index}"

    def dies(policy: Any, lives: Any, worker: Any) -> Iterator[Any]:
        life = lives.add() if worker.index == 0 else 3
        for number in range(1_000_000):
            yield {"by": worker.index, "seed": worker.seed, "version": policy.read().version}
            if life < 3 and number == 2:
                leave(second if life == 2 else "exits")

    def exits(worker: Any) -> Iterator[Any]:
        yield worker.index
        if worker.index == 0:
            leave("exits")

    with kind.cluster(restarts=2) as cluster:
        assert cluster.run(train, cluster.counter("tries")) == ["done 0", "done 1"]
        policy, lives = cluster.variable("policy", 0), cluster.counter("lives")
        told.clear()
        batches = cluster.collect(dies, policy, lives, batch_size=2)
        seeds: dict[int, set[int]] = {0: set(), 1: set()}
        deadline = time.monotonic() + 2 * LIMIT
        while len(seeds[0]) < 3:
            assert time.monotonic() < deadline
            batch = batches.next(timeout=LIMIT)
            assert batch.version.tolist() == batch.data["version"].tolist()
            assert batch.lag.max() <= 1
            for by, seed in zip(batch.data["by"], batch.data["seed"], strict=True):
                seeds[int(by)].add(int(seed))
            policy.assign(0)
        assert len(seeds[1]) == 1
        assert accounted(batches.stats())
        batches.close()
        far = r", item \d+, parameters' version \d+" if kind.near else ""
        ways = {
            "exits": "ended with exit status 3",
            "killed": "was killed by SIGKILL" if kind.near else r"was lost: .+",
        }
        ends = [each for each in told.messages if each.startswith("worker:0 ")]
        assert len(ends) == 2
        for end, way in zip(ends, ("exits", second), strict=True):
            said = rf"worker:0 {ways[way]} \(seed \d+{far}\); it is restarted"
            assert re.match(said, end), end
        said = (
            r"^worker:0 failed 3 times within 60 s, its budget is restarts=2; the last time:\n"
            r"worker:0 ended with exit status 3 \(seed \d+"
        )
        with pytest.raises(WorkerFailed, match=said):
            cluster.collect(exits, batch_size=50).next(timeout=LIMIT)
        assert len(cluster.collect(follows, policy, batch_size=2).next(timeout=LIMIT)) == 2


def an_input_that_ends_its_worker_fails_and_no_other(kind: Kind, told: Any) -> None:
    def ends(x: int) -> int:
        if x == 1:
            leave("exits")
        if x == 2:
            raise KeyboardInterrupt
        return x

    def lasts(x: int) -> int:
        if x == 1:
            began = time.monotonic()
            until(lambda: time.monotonic() > began + 1.0)
        return x

    with kind.cluster(restarts=0) as cluster:
        [zero, error, three] = cluster.map(ends, [0, 1, 3], retries=0, return_exceptions=True)
        assert (zero, three) == (0, 3)
        assert isinstance(error, WorkerFailed)
        assert error.input == 1
        said = r"ends\(1\) killed its worker once; at last worker:\d ended with exit status 3 \(see"
        assert re.match(said, str(error))
        if kind.beside:
            [error] = cluster.map(ends, [2], retries=0, return_exceptions=True)
            said = r"ends\(2\) killed its worker once; at last worker:\d was killed by SIGINT \(see"
            assert re.match(said, str(error)), error
        else:  # it is the chief's Ctrl-C
            with pytest.raises(KeyboardInterrupt):
                cluster.map(ends, [2])
        began = time.monotonic()
        found = cluster.map(lasts, [0, 1, 3], task_timeout=0.3, retries=0, return_exceptions=True)
        assert (found[0], found[2]) == (0, 3)
        assert isinstance(found[1], TimedOut)
        said = r"lasts\(1\) took more than task_timeout=0\.3 s in worker:\d"
        if kind.beside:
            # Its stacks are those of the function alone, of which `until` is the innermost.
            said += r"; it is at:\n.* \(most recent call first\):\n(  File .*\n)+  File .* in lasts"
        else:
            # Nobody looked before it had returned.
            assert time.monotonic() > began + 1.0
        assert re.fullmatch(said, str(found[1])), found[1]
        assert cluster.map(abs, [-1, 2]) == [1, 2]


# The end of a cluster


def works(policy: Any, folder: str, worker: Any) -> Iterator[Any]:
    try:
        while not worker.should_stop():
            yield policy.read().version
    finally:
        Path(folder, str(worker.index)).touch()


def however_its_block_is_left_a_cluster_ends(kind: Kind, told: Any) -> None:
    def used(cluster: Cluster, folder: str, way: type[BaseException]) -> None:
        with cluster:
            policy = cluster.variable("policy", 0)
            batches = cluster.collect(works, policy, folder, batch_size=2)
            kept.extend([batches.next, lambda: policy.assign(1)])
            begun: set[str] = set()
            for batch in batches:
                begun |= set(batch.worker)
                if len(begun) == 2:
                    raise way

    for way in (ArithmeticError, KeyboardInterrupt):
        kept: list[Callable[[], object]] = []
        cluster = kind.cluster()
        with tempfile.TemporaryDirectory() as folder:
            with pytest.raises(way):
                used(cluster, folder, way)
            until(lambda: sorted(os.listdir(folder)) == ["0", "1"])
        cluster.close()
        cluster.close()
        for call in kept:
            with pytest.raises(Closed, match=r"^(collection .* is|.+: this session was) closed$"):
                call()
        with pytest.raises(Closed, match=r"^abs: the cluster is closed$"):
            cluster.map(abs, [1])
        with pytest.raises(Closed, match=r"^works: the cluster is closed$"):
            cluster.run(works, 1, "")


WHOLE: tuple[Callable[[Kind, Any], None], ...] = (
    a_function_that_is_wrong_ends_its_run_with_what_is_wrong,
    a_worker_that_ends_is_started_again_within_its_budget,
    an_input_that_ends_its_worker_fails_and_no_other,
    however_its_block_is_left_a_cluster_ends,
)
"""With clusters of their own, and what the log was told."""


def name_of(program: Any) -> str:
    """What pytest calls it."""
    return str(getattr(program, "__name__", program))
