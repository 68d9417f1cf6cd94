"""map, submit and run: functions called in the workers."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import threading
import time
from concurrent.futures import as_completed
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, waits
from clusters import LIMIT, beside, every_engine, following, named, quiet, runs, until

import paceline

pytestmark = pytest.mark.timeout(120)


def square(x: Any) -> Any:
    return x * x


def fails_at(bad: int, x: int) -> int:
    if x == bad:
        raise ValueError(f"no {x}")
    return x


def killed_by(bad: int, x: int) -> int:
    if x == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@every_engine
def test_results_come_in_the_order_of_the_inputs(engine: str) -> None:
    with quiet(3, engine) as cluster:
        assert cluster.map(square, range(50)) == [x * x for x in range(50)]
        assert cluster.map(square, []) == []


@every_engine
def test_a_function_is_given_its_input_the_resources_and_the_worker(engine: str) -> None:
    def play(game: str, table: Any, bonus: int, *, worker: paceline.Worker) -> tuple[Any, ...]:
        return game, float(table.read().tree["x"]), bonus, worker.job, worker.index < 2

    with quiet(2, engine) as cluster:
        table = cluster.variable("table", {"x": np.float64(3.0)})
        assert cluster.map(play, ["a", "b"], table, 7) == [
            ("a", 3.0, 7, "worker", True),
            ("b", 3.0, 7, "worker", True),
        ]


@dataclass
class Score:
    name: str
    points: Any


@every_engine
def test_results_are_data_that_the_caller_owns(engine: str) -> None:
    def play(n: int) -> Score:
        return Score("x", np.full(n, n, np.float32))

    with quiet(1, engine) as cluster:
        (result,) = cluster.map(play, [4])
    assert set(result) == {"name", "points"}
    result["points"] += 1
    np.testing.assert_array_equal(result["points"], np.full(4, 5, np.float32))


@every_engine
def test_a_function_that_raises_fails_its_own_future_alone(engine: str) -> None:
    with quiet(2, engine) as cluster:
        futures = [cluster.submit(functools.partial(fails_at, 2), x) for x in range(4)]
        assert [f.result(LIMIT) for f in futures if f is not futures[2]] == [0, 1, 3]
        error = futures[2].exception(LIMIT)
    assert isinstance(error, paceline.TaskFailed)
    assert error.input == 2
    text = str(error)
    assert re.match(r"fails_at\(2\) raised in worker:[01]:\nTraceback", text)
    assert text.endswith("ValueError: no 2")
    assert "paceline/worker" not in text


@every_engine
def test_map_raises_the_first_error_and_its_workers_go_on(engine: str) -> None:
    with quiet(2, engine) as cluster:
        with pytest.raises(paceline.TaskFailed, match=r"^fails_at\(5\) raised in"):
            cluster.map(functools.partial(fails_at, 5), range(100))
        assert cluster.map(square, [3]) == [9]


@every_engine
def test_failures_stand_in_their_places_where_they_are_wanted(engine: str) -> None:
    with quiet(2, engine) as cluster:
        found = cluster.map(functools.partial(fails_at, 2), range(6), return_exceptions=True)
        assert [one for one in found if isinstance(one, int)] == [0, 1, 3, 4, 5]
        error = found[2]
        assert isinstance(error, paceline.TaskFailed)
        assert error.input == 2
        calls = cluster.stats().calls["worker"]
        assert (calls.done, calls.failed, calls.waiting, calls.running) == (5, 1, 0, 0)


def test_inputs_that_kill_or_take_too_long_leave_the_others_their_results() -> None:
    def odd(x: int) -> int:
        if x == 1:
            os._exit(3)
        if x == 3:
            time.sleep(LIMIT)
        return x

    with quiet(2) as cluster:
        found = cluster.map(odd, range(6), task_timeout=1.0, retries=1, return_exceptions=True)
        kinds = [type(one) for one in found]
        assert kinds == [int, paceline.WorkerFailed, int, paceline.TimedOut, int, int]
        assert cluster.stats().calls["worker"].retried == 2
        assert "calls of worker: 4 done, 2 failed" in str(cluster.stats())


def test_what_ends_the_cluster_is_no_failure_of_an_input() -> None:
    def ends(x: int) -> int:
        time.sleep(LIMIT)
        return x

    with quiet(1) as cluster:
        call = Call(lambda: cluster.map(ends, [0], return_exceptions=True))
        until(lambda: cluster.stats().calls["worker"].running)
        cluster.close()
        with pytest.raises(paceline.Closed):
            call.outcome()


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan")])
def test_a_time_limit_that_is_none_is_refused(timeout: Any) -> None:
    with (
        quiet(1, "serial") as cluster,
        pytest.raises(ValueError, match=r"^task_timeout must be (>= 0 )?seconds or None, not "),
    ):
        cluster.map(square, [1], task_timeout=timeout)


@every_engine
def test_a_result_that_may_not_travel_is_named_by_its_path(engine: str) -> None:
    with quiet(1, engine) as cluster:
        future = cluster.submit(lambda x: {"a": [x, object()]}, 1)
        with pytest.raises(
            paceline.SchemaError,
            match=r"^the result of <lambda>\(1\): leaf \$\.a\[1\] is an object;",
        ):
            future.result(LIMIT)


@every_engine
def test_an_input_that_cannot_travel_is_refused_before_anything_is_called(engine: str) -> None:
    with quiet(1, engine) as cluster, open(__file__) as file:
        with pytest.raises(paceline.FunctionError, match="is an open file"):
            cluster.map(square, [1, file])
        assert cluster.map(square, [2]) == [4]


@beside
def test_futures_are_those_of_the_standard_library(engine: str) -> None:
    seen: list[int] = []
    with quiet(2, engine) as cluster:
        futures = {cluster.submit(square, x): x for x in range(8)}
        for future in as_completed(futures, LIMIT):
            assert future.result() == futures[future] ** 2
        last = cluster.submit(square, 9)
        last.add_done_callback(lambda f: seen.append(f.result()))
        wait_for([last], LIMIT)
        until(lambda: seen == [81])


def test_a_callback_may_ask_for_more() -> None:
    done = threading.Event()
    with quiet(1, "threads") as cluster:

        def more(future: Any) -> None:
            cluster.submit(square, future.result()).add_done_callback(lambda f: done.set())

        cluster.submit(square, 2).add_done_callback(more)
        assert done.wait(LIMIT)


@beside
@pytest.mark.parametrize("in_time", [True, False])
def test_a_call_may_wait_in_a_worker_whose_collection_has_ended(engine: str, in_time: bool) -> None:
    with quiet(2, engine) as cluster:
        counter, policy = cluster.counter("c"), cluster.variable("policy", 0)
        batches = cluster.collect(following, policy, batch_size=4)
        batches.next()
        batches.close()
        if in_time:
            counter.add()
        waiting = [
            cluster.submit(lambda n, c: c.wait_for(1, LIMIT) + n, n, counter) for n in (1, 2)
        ]
        if not in_time:
            until(lambda: waits(cluster.session, "count") == 2)
            counter.add()
        assert [each.result(LIMIT) for each in waiting] == [2, 3]


@beside
def test_what_waits_can_be_cancelled(engine: str, tmp_path: Path) -> None:
    def hold(gate: str) -> None:
        Path(gate + ".in").touch()
        until(Path(gate).exists)

    gate = str(tmp_path / "gate")
    with quiet(1, engine) as cluster:
        first = cluster.submit(hold, gate)
        until(Path(gate + ".in").exists)
        second = cluster.submit(square, 2)
        assert second.cancel()
        assert not first.cancel()
        Path(gate).touch()
        first.result(LIMIT)
        assert cluster.map(square, [3]) == [9]


def test_an_input_that_kills_its_worker_fails_after_its_retries_with_the_input() -> None:
    with quiet(2, restarts=0) as cluster:
        futures = [cluster.submit(functools.partial(killed_by, 1), x, retries=1) for x in range(4)]
        assert [f.result(LIMIT) for f in futures if f is not futures[1]] == [0, 2, 3]
        with pytest.raises(
            paceline.WorkerFailed,
            match=r"^killed_by\(1\) killed its worker 2 times; at last worker:[01] was killed by",
        ) as failed:
            futures[1].result(LIMIT)
        assert failed.value.input == 1
        # That was the input's doing: the workers' own budget is untouched.
        assert cluster.map(square, range(4)) == [0, 1, 4, 9]


def test_a_worker_killed_from_outside_loses_no_call(tmp_path: Path) -> None:
    def work(x: int) -> int:
        (tmp_path / f"{x}.{os.getpid()}").touch()
        if x == 2:
            until(lambda: len(list(tmp_path.glob("2.*"))) == 2)
        return x

    with quiet(4) as cluster:
        futures = [cluster.submit(work, x) for x in range(8)]
        (victim,) = until(lambda: list(tmp_path.glob("2.*")))
        os.kill(int(victim.suffix[1:]), signal.SIGKILL)
        assert [f.result(LIMIT) for f in futures] == list(range(8))


def test_a_simulator_that_holds_the_interpreter_lock_is_no_dead_worker(tmp_path: Path) -> None:
    def simulate(x: int) -> int:
        (tmp_path / f"{x}.{os.getpid()}").touch()
        ctypes.PyDLL(None).sleep(1)
        return x

    with quiet(4) as cluster:
        futures = [cluster.submit(simulate, x) for x in range(6)]
        (victim,) = until(lambda: list(tmp_path.glob("1.*")))
        os.kill(int(victim.suffix[1:]), signal.SIGKILL)
        assert [f.result(LIMIT) for f in futures] == list(range(6))
    assert len(list(tmp_path.iterdir())) == 7


def test_a_call_that_takes_too_long_ends_with_its_process(tmp_path: Path) -> None:
    def stuck(x: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        return until(lambda: False, 60.0) or x

    with quiet(1) as cluster:
        future = cluster.submit(stuck, 1, task_timeout=0.2, retries=1)
        with pytest.raises(
            paceline.TimedOut,
            match=r"^stuck\(1\) took more than task_timeout=0\.2 s in worker:0, 2 times;"
            r" it is at:\n(?s:.*) in stuck$",
        ):
            future.result(LIMIT)
        pids = [int(path.name) for path in tmp_path.iterdir()]
        assert len(pids) == 2
        until(lambda: not any(map(runs, pids)))
        assert cluster.map(square, [3]) == [9]


def test_a_thread_that_takes_too_long_is_left_behind_and_its_result_ignored(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    with quiet(1, "threads") as cluster:
        future = cluster.submit(functools.partial(_until, gate), 1, task_timeout=0.05, retries=0)
        with pytest.raises(paceline.TimedOut, match=r"took more than task_timeout=0\.05 s"):
            future.result(LIMIT)
        Path(gate).touch()
        assert cluster.map(square, [3]) == [9]


def test_serial_tells_of_a_call_that_took_too_long() -> None:
    def slow(x: int) -> int:
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 0.05)
        return x

    with quiet(1, "serial") as cluster:
        future = cluster.submit(slow, 1, task_timeout=0.01, retries=0)
        assert future.done()
        assert isinstance(future.exception(), paceline.TimedOut)


@every_engine
def test_a_future_of_a_stopped_cluster_says_so(engine: str, tmp_path: Path) -> None:
    cluster = quiet(1, engine)
    with cluster:
        if engine != "serial":
            first = cluster.submit(functools.partial(_hold, str(tmp_path / "in")), 0)
            until((tmp_path / "in").exists)
            second = cluster.submit(square, 1)
    if engine != "serial":
        for future in (first, second):
            with pytest.raises(paceline.Closed, match=r"\): the cluster is closed$"):
                future.result(LIMIT)
    with pytest.raises(paceline.Closed, match=r"^square: the cluster is closed$"):
        cluster.submit(square, 1)


def _hold(path: str, x: int, worker: paceline.Worker) -> None:
    Path(path).touch()
    until(worker.should_stop)


@every_engine
def test_run_calls_once_in_every_worker_and_answers_in_their_order(engine: str) -> None:
    def train(step: Any, *, worker: paceline.Worker) -> int:
        step.assign_add({"n": np.int64(1)})
        return worker.index

    with quiet(3, engine) as cluster:
        step = cluster.variable("step", {"n": np.int64(0)})
        assert cluster.run(train, step) == [0, 1, 2]
        assert step.read().tree["n"] == 3


@beside
def test_workers_that_run_can_wait_for_each_other(engine: str) -> None:
    def meet(arrived: Any, everyone: int) -> int:
        arrived.enqueue(1)
        until(lambda: arrived.size == everyone)
        return everyone

    with quiet(3, engine) as cluster:
        assert cluster.run(meet, cluster.queue("arrived", 3), 3) == [3, 3, 3]


@beside
def test_run_raises_the_first_error_and_ends_the_others(engine: str) -> None:
    def train(*, worker: paceline.Worker) -> None:
        if worker.index == 1:
            raise RuntimeError("diverged")
        until(worker.should_stop)

    with quiet(2, engine) as cluster:
        with pytest.raises(paceline.TaskFailed, match=r"(?s)^train raised in worker:1:.*diverged$"):
            cluster.run(train)
        assert cluster.map(square, range(4)) == [0, 1, 4, 9]


def test_run_ends_those_that_do_not_look(tmp_path: Path) -> None:
    def train(*, worker: paceline.Worker) -> None:
        if worker.index == 1:
            until((tmp_path / "0").exists)
            raise RuntimeError("diverged")
        (tmp_path / "pid").write_text(str(os.getpid()))
        (tmp_path / "0").touch()
        until(lambda: False, 60.0)

    with quiet(2) as cluster:
        with pytest.raises(paceline.TaskFailed, match=r"^train raised in worker:1"):
            cluster.run(train)
        until(lambda: not runs(int((tmp_path / "pid").read_text())))
        assert cluster.map(square, range(4)) == [0, 1, 4, 9]


def test_run_begins_again_in_a_worker_that_died(tmp_path: Path) -> None:
    def train(*, worker: paceline.Worker) -> str:
        if worker.index == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return f"done {worker.index}"

    with quiet(2) as cluster:
        assert cluster.run(train) == ["done 0", "done 1"]


def test_run_fails_with_a_worker_that_dies_beyond_its_budget() -> None:
    def train(*, worker: paceline.Worker) -> None:
        if worker.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with (
        quiet(2, restarts=1) as cluster,
        pytest.raises(
            paceline.WorkerFailed,
            match=r"(?s)^train: worker:1 failed 2 times within 60 s, its budget is restarts=1;",
        ),
    ):
        cluster.run(train)


def test_run_in_one_thread_says_why_a_wait_cannot_end() -> None:
    def meet(arrived: Any) -> None:
        arrived.dequeue(timeout=None)

    with quiet(2, "serial") as cluster:
        with pytest.raises(paceline.WouldBlock, match=r"(?s)^meet raised in worker:0:.*one thread"):
            cluster.run(meet, cluster.queue("arrived", 3))


def forever(*, worker: paceline.Worker) -> Any:
    while True:
        yield {"index": worker.index}


@every_engine
def test_one_job_is_called_while_another_collects(engine: str) -> None:
    with quiet({"actor": 2, "eval": 1}, engine) as cluster:
        batches = cluster.collect(forever, batch_size=2, job="actor")
        for _ in range(3):
            assert len(batches.next(timeout=LIMIT)) == 2
            assert cluster.map(square, range(3), job="eval") == [0, 1, 4]
        # Without being told, calls go to a job that does not collect.
        assert cluster.map(square, range(3)) == [0, 1, 4]
        batches.close()


@every_engine
def test_workers_that_collect_are_not_called(engine: str) -> None:
    with quiet(1, engine) as cluster:
        batches = cluster.collect(forever, batch_size=1)
        with pytest.raises(
            paceline.Refused, match=r"^square: the workers of job 'worker' collect for 'forever-1'"
        ):
            cluster.map(square, [1])
        batches.close()
        assert cluster.map(square, [2]) == [4]


@beside
def test_workers_that_are_called_do_not_collect(engine: str, tmp_path: Path) -> None:
    with quiet(1, engine) as cluster:
        future = cluster.submit(functools.partial(_until, str(tmp_path / "gate")), 0)
        with pytest.raises(paceline.Refused, match=r"^collection 'forever-1': job 'worker' has 1"):
            cluster.collect(forever, batch_size=1)
        (tmp_path / "gate").touch()
        future.result(LIMIT)
        batches = cluster.collect(forever, batch_size=1)
        assert len(batches.next(timeout=LIMIT)) == 1


def _until(path: str, x: int) -> None:
    until(Path(path).exists)


def test_calls_end_when_the_server_dies() -> None:
    with quiet(1) as cluster:
        cluster.map(square, [1])
        future = cluster.submit(functools.partial(_until, "/nowhere"), 0)
        os.kill(named("ps:0", os.getpid()), signal.SIGKILL)
        with pytest.raises(paceline.Disconnected, match=r"the server, ps:0, was killed by SIGKILL"):
            future.result(LIMIT)
        with pytest.raises(paceline.Disconnected, match=r"^square: the server"):
            cluster.map(square, [1])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_scipy_searches_with_map(workers: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    with quiet(workers) as cluster:
        found = optimize.differential_evolution(
            lambda x: float(np.sum((x - 0.5) ** 2)), [(-1, 1)] * 2, workers=cluster.map,
            updating="deferred", seed=1, maxiter=20, polish=False,
        )  # fmt: skip
    assert found.fun < 1e-3


def test_a_function_is_sent_once_and_many_are_kept() -> None:
    with quiet(1) as cluster:
        for n in range(100):
            assert cluster.map(functools.partial(fails_at, n + 1000), [n]) == [n]
        assert cluster.map(functools.partial(fails_at, 1000), [1]) == [1]


@pytest.mark.parametrize("retries", [-1, 1.5, True])
def test_a_number_of_retries_is_whole(retries: Any) -> None:
    with (
        quiet(1, "serial") as cluster,
        pytest.raises(paceline.SchemaError, match=r"^retries is a whole number"),
    ):
        cluster.map(square, [1], retries=retries)


@every_engine
def test_one_thread_maps_while_another_takes_batches(engine: str) -> None:
    def makes(policy: Any) -> Any:
        while True:
            yield policy.read().tree

    with quiet({"actor": 2, "eval": 1}, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(2))
        batches = cluster.collect(makes, policy, batch_size=4)
        call = Call(lambda: cluster.map(square, range(100)))
        while call.is_alive():
            batches.next(timeout=LIMIT)
        assert call.outcome() == [x * x for x in range(100)]


@every_engine
def test_a_collection_takes_a_job_that_has_none(engine: str) -> None:
    def names(worker: paceline.Worker) -> Any:
        while True:
            yield worker.job

    with quiet({"actor": 1, "eval": 1}, engine) as cluster:
        made = [cluster.collect(names, batch_size=1) for _ in range(2)]
        assert [one.next(timeout=LIMIT).data for one in made] == [["actor"], ["eval"]]
