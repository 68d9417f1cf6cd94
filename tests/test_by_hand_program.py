"""What `Cluster` does in tasks that were started by hand: here each is a thread."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, until
from hands import cluster, served

import paceline
from paceline import reach
from paceline.worker import own

SECRET = b"s" * 32
SEED = 7


class Tasks:
    """The tasks of a cluster, each a thread with the same program."""

    def __init__(self, spec: paceline.ClusterSpec) -> None:
        self.spec = spec
        self.post_mortem: Path | None = None
        self._pool = ThreadPoolExecutor()
        self.started: dict[str, Future[Any]] = {}

    def start(self, program: Callable[[paceline.Cluster], Any], *tasks: str) -> None:
        # A cluster whose chief is quick to leave does not wait for those who come later.
        together = threading.Barrier(len(tasks))
        for task in tasks:
            self.started[task] = self._pool.submit(self._run, program, task, together)

    def _run(
        self, program: Callable[[paceline.Cluster], Any], task: str, together: threading.Barrier
    ) -> Any:
        with self.cluster(task) as cluster:
            together.wait(LIMIT)
            return program(cluster)

    def cluster(self, task: str) -> paceline.Cluster:
        return paceline.Cluster(
            self.session(task), seed=SEED, progress="quiet", post_mortem=self.post_mortem
        )

    def session(self, task: str, timeout: float = LIMIT) -> paceline.Session:
        job, _, index = task.partition(":")
        return paceline.Session(
            self.spec, secret=SECRET, job=job, index=int(index), timeout=timeout
        )

    def result(self, task: str) -> Any:
        return self.started[task].result(LIMIT)

    def error(self, task: str) -> Any:
        return self.started[task].exception(LIMIT)

    def close(self) -> None:
        self._pool.shutdown()
        # Errors hold what their frames have.
        self.started.clear()


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    spec = cluster(tmp_path, "unix", ps=2, chief=1, worker=2, evaluator=1)
    with served(spec, secret=SECRET):
        made = Tasks(spec)
        try:
            yield made
        finally:
            made.close()


ALL = ("worker:1", "worker:0", "evaluator:0", "chief:0")


def five(worker: paceline.Worker) -> Iterator[int]:
    """Five items, as long as anybody wants them."""
    yield from range(5)


def endless() -> Iterator[int]:
    while True:
        yield 1


def test_a_collection_ends_when_all_workers_have_returned(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> int:
        first = sum(len(batch) for batch in cluster.collect(five, batch_size=1))
        return first + sum(
            len(batch) for batch in cluster.collect(five, batch_size=2, job="worker")
        )

    tasks.start(program, *ALL)
    assert {task: tasks.result(task) for task in ALL} == dict.fromkeys(ALL, 0) | {"chief:0": 20}


def test_each_job_has_its_own_collection(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> list[int]:
        train = cluster.collect(endless, batch_size=2)
        judge = cluster.collect(five, batch_size=5, job="evaluator")
        with train, judge:
            for batch in judge:
                assert set(batch.worker) == {"evaluator:0"}
                assert {each.name: each.collection for each in cluster.stats().workers} == {
                    "worker:0": "endless-1",
                    "worker:1": "endless-1",
                    "evaluator:0": "five-2",
                }
                return [*batch.data.tolist(), len(train.next())]
        return []

    tasks.start(program, *ALL)
    assert tasks.result("chief:0") == [0, 1, 2, 3, 4, 2]
    for task in ALL[:-1]:
        assert tasks.result(task) == []


def test_a_job_makes_items_for_the_newest_collection_only(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> Any:
        first = cluster.collect(endless, batch_size=1)
        if cluster.is_chief:
            first.next()
            with pytest.raises(paceline.Refused, match=r"^run\(.*'worker' collect for 'endless-1'"):
                cluster.run(len, "x")
        second = cluster.collect(five, batch_size=10)
        if cluster.is_chief:
            told = "^collection 'endless-1' ended when 'five-2' began: both are made by job 'work"
            with pytest.raises(paceline.Closed, match=told):
                first.next()
            first.close()
        items = [item for batch in second for item in batch.data]
        return items, cluster.run(lambda worker: worker.index)

    tasks.start(program, *ALL)
    items, indices = tasks.result("chief:0")
    assert sorted(items) == sorted([*range(5)] * 2)
    assert indices == [0, 1]
    assert tasks.result("worker:0") == tasks.result("worker:1") == ([], [])


def test_an_item_is_stamped_with_what_its_function_read(tasks: Tasks) -> None:
    def reads(v: paceline.Variable[float]) -> Iterator[float]:
        yield v.read().tree

    def program(cluster: paceline.Cluster) -> list[tuple[float, int]]:
        v = cluster.variable("v", 1.0)
        assert cluster.session.task == "chief:0" or v.read().tree == 1.0
        met = cluster.barrier("met", len(ALL))
        met.wait()
        if cluster.is_chief:
            v.assign(2.0)
        met.wait()
        found: list[tuple[float, int]] = []
        for batch in cluster.collect(reads, v, batch_size=1, max_lag=None):
            found += zip(batch.data.tolist(), batch.lag.tolist(), strict=True)
        return found

    tasks.start(program, *ALL)
    assert tasks.result("chief:0") == [(2.0, 0)] * 2


def test_a_run_in_lockstep_is_that_of_a_launched_cluster(tasks: Tasks) -> None:
    def plays(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
        draws = np.random.default_rng(worker.seed)
        while True:
            yield policy.read().tree + draws.normal(size=2)

    def program(cluster: paceline.Cluster) -> list[float]:
        policy = cluster.variable("policy", np.zeros(2))
        for batch in cluster.collect(
            plays, policy, batch_size=3, schedule="lockstep", job="worker"
        ):
            if policy.assign(batch.data.mean(axis=0)) > 5:
                break
        return policy.read().tree.tolist()

    tasks.start(program, *ALL)
    with paceline.Cluster(2, engine="threads", seed=SEED, progress="quiet") as launched:
        assert program(launched) == tasks.result("chief:0")


def test_a_chief_of_another_definition_begins_anew(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> Any:
        return cluster.collect(endless, batch_size=2)

    tasks.start(program, "worker:0")
    first = tasks.cluster("chief:0")
    first.collect(endless, batch_size=2).next()
    with pytest.raises(paceline.Refused, match="chief:0 is held by"):
        tasks.session("chief:0", timeout=0.0)
    for line in first.session.lines.all:
        line.close()
    with tasks.cluster("chief:0") as second:
        batches = second.collect(endless, batch_size=3)
        error = tasks.error("worker:0")
        assert isinstance(error, paceline.Closed)
        assert "another one has begun with the program's first call: start worker:0" in str(error)
        tasks.start(lambda cluster: cluster.collect(endless, batch_size=3), "worker:0")
        assert len(batches.next()) == 3
    first.close()
    assert tasks.result("worker:0").closed


def test_what_a_worker_has_of_a_collection_is_its_end(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> Any:
        made = cluster.collect(five, batch_size=1)
        if cluster.is_chief:
            return [made.next() for _ in range(10)]
        assert made.closed
        with pytest.raises(paceline.Closed, match="its batches went to the chief"):
            made.next()
        with pytest.raises(paceline.Closed, match="the chief has its counters"):
            made.stats()
        made.close()
        return list(made)

    tasks.start(program, *ALL)
    assert len(tasks.result("chief:0")) == 10
    assert tasks.result("worker:0") == tasks.result("evaluator:0") == []


def test_another_function_is_told_with_both(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> Any:
        fn = five if cluster.session.task == "worker:1" else endless
        return cluster.collect(fn, batch_size=1).next()

    tasks.start(program, "chief:0", "worker:1")
    error = tasks.error("worker:1")
    assert isinstance(error, paceline.SchemaError)
    assert str(error) == (
        "work 1 of this program is collect(five, batch_size=1, max_lag=1, version_of=None,"
        " schedule='lag', job='worker', capacity=2, capacity_bytes=1073741824) in worker:1 and"
        " collect(endless, batch_size=1, max_lag=1, version_of=None, schedule='lag', job='worker',"
        " capacity=2, capacity_bytes=1073741824) in the chief: all tasks run the same program, with"
        " the same calls in the same order"
    )
    tasks.start(program, "worker:0")
    assert len(tasks.result("chief:0")) == 1


def test_the_chief_s_value_is_the_one_that_counts(tasks: Tasks) -> None:
    workers_wait = threading.Event()

    def program(cluster: paceline.Cluster) -> Any:
        if cluster.is_chief:
            assert workers_wait.wait(LIMIT)
        workers_wait.set()
        there = cluster.variable("v", float(cluster.is_chief), overwrite=True)
        assert cluster.variable("v").read().tree == 1.0
        if cluster.session.task == "worker:0":
            with pytest.raises(paceline.SchemaError, match="variable 'v'"):
                cluster.variable("v", value="text")
            with pytest.raises(paceline.TimedOut, match="'w'"):
                cluster.variable("w", 1.0, timeout=0)
        cluster.run(len, [])
        return there.version == cluster.variable("v").version

    tasks.start(program, *ALL)
    assert all(tasks.result(task) for task in ALL)


def test_map_and_submit_are_refused_with_what_to_use(tasks: Tasks) -> None:
    with tasks.cluster("chief:0") as cluster:
        for call in (
            lambda: cluster.map(len, ["a"]),
            lambda: cluster.submit(len, "a"),
        ):
            with pytest.raises(paceline.Unsupported, match=r"through a queue or a reader .* `run`"):
                call()


def test_a_worker_says_what_it_waits_for_and_the_chief_who_is_missing(
    tasks: Tasks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "SAY_AFTER", 0.01)

    def program(cluster: paceline.Cluster) -> int:
        cluster.variable("v", 1)
        return sum(len(batch) for batch in cluster.collect(five, batch_size=5))

    tasks.start(program, "worker:0")
    told = "worker:0 waits: nobody has made the variable 'v' on any server"
    until(lambda: told in caplog.text)
    with tasks.session("looks:0") as session:
        session.variable("v", 1)
    told = "worker:0 waits: the chief has not begun work 1, collect(five, batch_size=5, max_l"
    until(lambda: told in caplog.text)
    with tasks.cluster("chief:0") as cluster:
        batches = cluster.collect(five, batch_size=5)
        batches.next()
        said = "chief:0: missing as collection 'five-1' begins: worker:1, evaluator:0"
        assert said in caplog.text
        batches.close()
    assert tasks.result("worker:0") == 0


def test_seeds_of_workers_are_those_of_a_launched_cluster(tasks: Tasks) -> None:
    def seed(worker: paceline.Worker) -> str:
        return str(worker.seed)

    tasks.start(lambda cluster: cluster.run(seed), *ALL)
    with paceline.Cluster(2, engine="threads", seed=SEED, progress="quiet") as launched:
        assert launched.run(seed) == tasks.result("chief:0")


def test_results_of_run_come_back_in_order_if_they_are_trees(tasks: Tasks) -> None:
    def tells(worker: paceline.Worker) -> Any:
        return object() if worker.index else {"a": np.arange(2), "by": worker.index}

    def program(cluster: paceline.Cluster) -> Any:
        first = cluster.run(tells)
        assert cluster.run(lambda worker: worker.index * 2, job="worker") == [0, 2] * bool(first)
        return first

    tasks.start(program, *ALL)
    whole, none = tasks.result("chief:0")
    assert (whole["a"].tolist(), whole["by"], none) == ([0, 1], 0, None)
    assert tasks.result("worker:0") == tasks.result("evaluator:0") == []


def test_an_error_in_run_reaches_the_chief_and_the_others_may_stop(tasks: Tasks) -> None:
    def fails(worker: paceline.Worker) -> None:
        if worker.index == 0:
            raise ValueError("no luck")
        until(worker.should_stop)

    def program(cluster: paceline.Cluster) -> Any:
        if not cluster.is_chief:
            return cluster.run(fails)
        with pytest.raises(paceline.TaskFailed, match=r"(?s)run\(fails.*worker:0:.*no luck"):
            cluster.run(fails)
        return "ended"

    tasks.start(program, *ALL)
    assert tasks.result("chief:0") == "ended"
    assert tasks.result("worker:1") == []
    assert str(tasks.error("worker:0")) == "no luck"


def test_the_chief_says_who_failed_also_between_two_looks(
    tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    def program(cluster: paceline.Cluster) -> None:
        if not cluster.is_chief:
            return
        for luck in ("no luck", "none again"):
            with pytest.raises(ValueError, match=f"^{luck}$"), tasks.session("worker:0"):
                raise ValueError(luck)
        # There again before anybody looked.
        with tasks.session("worker:0"):
            workers = {each.name: each for each in cluster.stats().workers}
        assert (workers["worker:0"].starts, workers["worker:1"].starts) == (3, 1)
        assert cluster.session.resources()["ended"] == {
            "worker:0": [2, "has failed: ValueError: none again"]
        }
        with pytest.raises(ValueError, match=r"^late$"), tasks.session("worker:1"):
            raise ValueError("late")

    tasks.start(program, "chief:0")
    tasks.result("chief:0")
    told = [text for text in caplog.messages if " has failed" in text]
    assert told == [
        "chief:0: worker:0 has failed: ValueError: none again (2 times since)",
        "chief:0: worker:1 has failed: ValueError: late",
    ]


def test_an_error_in_a_collection_is_its_worker_s_and_another_may_take_its_place(
    tasks: Tasks,
) -> None:
    again = threading.Event()

    def play(worker: paceline.Worker) -> Iterator[str]:
        if worker.index == 0 and not again.is_set():
            yield "first"
            raise ValueError("no luck")
        while True:
            yield "again" if worker.index == 0 else "other"

    def program(cluster: paceline.Cluster) -> set[str]:
        seen: set[str] = set()
        for batch in cluster.collect(play, batch_size=1, max_lag=None):
            seen |= set(batch.data)
            if len(seen) == 3:
                break
        return seen

    tasks.start(program, *ALL)
    error = tasks.error("worker:0")
    assert str(error) == "no luck"
    assert re.fullmatch(r"\(seed \d+, item 1, parameters' version none\)", error.__notes__[0])
    again.set()
    tasks.start(program, "worker:0")
    assert tasks.result("chief:0") == {"first", "other", "again"}
    assert tasks.result("worker:0") == tasks.result("worker:1") == set()


def test_the_chief_leaves_in_the_midst_and_the_workers_loops_end(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> str:
        found = cluster.collect(endless, batch_size=1)
        if cluster.is_chief:
            found.next()
        return "ended"

    tasks.start(program, *ALL)
    assert [tasks.result(task) for task in ALL] == ["ended"] * 4


def test_a_worker_that_the_chief_did_not_wait_for_ends_too(tasks: Tasks) -> None:
    gone = threading.Event()

    def program(cluster: paceline.Cluster) -> Any:
        if cluster.session.task == "worker:1":
            assert gone.wait(LIMIT)
        found = cluster.collect(endless, batch_size=1)
        if cluster.is_chief:
            return found.next() is None
        return list(found), cluster.run(len, "x")

    tasks.start(program, *ALL)
    assert not tasks.result("chief:0")
    gone.set()
    for task in ("worker:0", "worker:1"):
        assert tasks.result(task) == ([], [])


def test_a_supervisor_begins_and_saves_what_the_program_trains(
    tasks: Tasks, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def program(cluster: paceline.Cluster) -> Any:
        with paceline.Supervisor(cluster.session, init={"w": 1.0}, checkpoint=folder, steps=3) as s:
            weights = cluster.variable("w")
            for batch in cluster.collect(endless, batch_size=2):
                weights.assign_add(float(batch.data.sum()))
                s.step.add()
                if s.should_stop():
                    break
            return s.step.value

    tasks.start(program, *ALL)
    assert [tasks.result(task) for task in ("chief:0", "worker:0", "worker:1")] == [3, 3, 3]
    with paceline.Session() as session:
        assert session.restore(folder) is not None
        assert session.variable("w").read().tree == 7.0


def test_a_chief_that_fails_is_an_error_of_the_workers_too(tasks: Tasks) -> None:
    def program(cluster: paceline.Cluster) -> None:
        for _ in cluster.collect(endless, batch_size=1):
            raise ValueError("the loss is not a number")
        cluster.run(len, "x")

    tasks.start(program, *ALL)
    assert isinstance(tasks.error("chief:0"), ValueError)
    for task in ("worker:0", "worker:1"):
        error = tasks.error(task)
        assert isinstance(error, paceline.Closed)
        assert str(error) == (
            "the cluster is done: chief:0 failed: ValueError: the loss is not a number"
        )


def test_what_a_function_does_not_let_be_written_is_said_and_the_failure_stays(
    tasks: Tasks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks.post_mortem = tmp_path / "dead"
    stay = threading.Event()

    def fails(policy: paceline.Variable[Any], worker: paceline.Worker) -> None:
        if worker.index == 0:
            raise ValueError(f"no luck, {stay} is there")

    def program(cluster: paceline.Cluster) -> Any:
        policy = cluster.variable("policy", np.zeros(1))
        return cluster.run(fails, policy)

    tasks.start(program, *ALL)
    error = tasks.error("worker:0")
    assert str(error).startswith("no luck")
    assert not hasattr(error, "__notes__")
    assert not tasks.post_mortem.exists()
    assert "worker:0 leaves no post-mortem: fails cannot be sent to a worker: " in caplog.text
    assert isinstance(tasks.error("chief:0"), paceline.TaskFailed)


def test_whether_to_stop_is_asked_ten_times_a_second_at_most() -> None:
    asked: list[float] = []

    def is_over() -> bool:
        asked.append(time.monotonic())
        return len(asked) == 3

    with paceline.Session(job="worker", index=0) as session:
        worker = own.Own(session, SEED, is_over)
        until(worker.should_stop)
        assert worker.should_stop()
    assert len(asked) == 3
    assert min(np.diff(asked)) > 0.1 - 0.01


def test_a_cluster_by_hand_knows_its_tasks_and_is_one_of_them(tasks: Tasks) -> None:
    for options, told in (
        ({"job": "ps", "index": 1}, "ps:1 has no part in the program of chief:0, worker:0, "),
        ({"job": "look"}, r"look:0 has no part in the program of"),
    ):
        session = paceline.Session(tasks.spec, secret=SECRET, **options)
        with pytest.raises(paceline.SchemaError, match=told):
            paceline.Cluster(session)
    with pytest.raises(paceline.SchemaError, match="open the session on a ClusterSpec"):
        paceline.Cluster(paceline.Session())
    for more in ({"restarts": 5}, {"checkpoint": "here"}):
        with pytest.raises(
            paceline.SchemaError, match="only seed, post_mortem and progress can be said"
        ):
            paceline.Cluster(tasks.spec, **more)
    with tasks.cluster("chief:0") as made:
        with pytest.raises(paceline.SchemaError, match=r"no workers of job 'actor'; there are \["):
            made.run(len, job="actor")
        assert made.is_chief
        with pytest.raises(paceline.CheckpointError, match=r"or session\.save\(folder\)"):
            made.save()
        assert [(each.name, each.alive) for each in made.stats().workers] == [
            ("worker:0", False),
            ("worker:1", False),
            ("evaluator:0", False),
        ]


def test_a_cluster_that_cannot_be_leaves_no_session(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud: Any = "loud"
    content = {"cluster": tasks.spec.as_dict(), "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(content))
    with pytest.raises(ValueError, match="loud"):
        paceline.Cluster.from_environment(progress=loud, secret=SECRET)
    with paceline.Cluster.from_environment(progress="quiet", secret=SECRET) as made:
        assert repr(made) == "<Cluster of tasks started by hand, seen from worker:1>"


def test_a_cluster_by_hand_has_one_chief(tmp_path: Path) -> None:
    spec = cluster(tmp_path, "unix", ps=1, worker=2)
    with served(spec, secret=SECRET):
        session = paceline.Session(spec, secret=SECRET, job="worker", index=0)
        with pytest.raises(paceline.SchemaError, match=r"has one chief .* here are worker:0, work"):
            paceline.Cluster(session)
