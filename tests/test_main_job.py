"""The main job, end to end: workers collect with the newest parameters, the chief trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.core.versions import count_of

ENGINES = ["serial", "threads", "processes"]
every_engine = pytest.mark.parametrize("engine", ENGINES)
beside = pytest.mark.parametrize("engine", ["threads", "processes"])


def quiet(workers: Any = 2, engine: str = "processes", **options: Any) -> paceline.Cluster:
    return paceline.Cluster(workers, engine=engine, progress="quiet", **options)


def followers(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    """Items that say with which parameters they were made."""
    while True:
        snapshot = policy.read()
        worker.log(steps=2, score=float(snapshot.tree[0]))
        yield {"used": snapshot.tree.copy(), "version": snapshot.version, "index": worker.index}


@every_engine
def test_every_item_is_stamped_with_the_version_it_was_made_with(engine: str) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(followers, policy, batch_size=4)
        for count in range(1, 30):
            batch = batches.next()
            assert batch.data["used"].shape == (4, 3)
            np.testing.assert_array_equal(batch.version, batch.data["version"])
            made_with = [count_of(int(v)) - 1 for v in batch.version]
            np.testing.assert_array_equal(batch.data["used"][:, 0], made_with)
            np.testing.assert_array_equal(batch.lag, [count - 1 - m for m in made_with])
            assert batch.lag.max() <= 1
            assert batch.worker == tuple(f"worker:{i}" for i in batch.data["index"])
            np.testing.assert_array_equal(batch.metrics["score"], made_with)
            assert batch.metrics["steps"].sum() == 8
            policy.assign(np.full(3, float(count)))


@every_engine
@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("assigns", [0, 1, 3])
def test_no_item_is_older_than_max_lag_and_all_are_accounted_for(
    engine: str, max_lag: int, assigns: int
) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(followers, policy, batch_size=3, max_lag=max_lag)
        for count in range(20):
            batch = batches.next()
            assert batch.lag.max() <= max_lag
            for _ in range(assigns):
                policy.assign(np.full(3, float(count)))
            stats = batches.stats()
            ended = stats["delivered"] + sum(stats["dropped"].values()) + stats["stored"]
            assert stats["accepted"] == ended


@every_engine
def test_leaving_the_loop_closes_the_generators(engine: str, tmp_path: Any) -> None:
    def rollouts(policy: Any, folder: str, worker: Any) -> Iterator[Any]:
        try:
            while True:
                yield policy.read().tree
        finally:
            open(f"{folder}/{worker.index}", "w").close()

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        made: set[str] = set()
        for batch in cluster.collect(rollouts, policy, str(tmp_path), batch_size=2):
            made |= set(batch.worker)
            if len(made) == 2:
                break
        # A second collection runs on the same workers.
        for batch in cluster.collect(followers, policy, batch_size=8):
            assert set(batch.worker) <= {"worker:0", "worker:1"}
            break
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@every_engine
def test_a_loop_over_functions_that_return_ends(engine: str) -> None:
    def three(policy: Any) -> Iterator[Any]:
        for i in range(3):
            policy.read()
            yield i

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        seen = [
            int(i) for batch in cluster.collect(three, policy, batch_size=2) for i in batch.data
        ]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]


@every_engine
def test_items_of_differing_shapes_come_as_a_list(engine: str) -> None:
    def ragged(worker: Any) -> Iterator[Any]:
        n = 0
        while True:
            n += 1
            yield {"x": np.full(n, worker.index), "name": f"item {n}"}

    with quiet(1, engine) as cluster:
        batch = cluster.collect(ragged, batch_size=3).next()
    assert [item["x"].shape for item in batch.data] == [(1,), (2,), (3,)]
    assert [item["name"] for item in batch.data] == ["item 1", "item 2", "item 3"]
    assert batch.lag.size == 0


def raises_at_once(policy: Any) -> Iterator[Any]:
    if policy is not None:
        raise ArithmeticError("my own words")
    yield


def returns_at_once(policy: Any) -> Iterator[Any]:
    return
    yield


def never_reads(policy: Any) -> Iterator[Any]:
    while True:
        yield 1


def no_generator(policy: Any) -> int:
    return 3


def odd_item(policy: Any) -> Iterator[Any]:
    policy.read()
    yield {"a": {"b": [np.zeros(2), object()]}}


def object_array(policy: Any) -> Iterator[Any]:
    policy.read()
    yield {"a": np.array([None, {}], dtype=object)}


@every_engine
@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (raises_at_once, r"(?s)^worker:\d cannot run:\nTraceback.*ArithmeticError: my own words"),
        (returns_at_once, r"(?s)^worker:\d cannot run:.*returns_at_once returned without yielding"),
        (never_reads, r"(?s)^worker:\d cannot run:.*without ever reading 'policy'"),
        (no_generator, r"(?s)^worker:\d cannot run:.*no_generator returned a int"),
        (
            odd_item,
            r"(?s)^worker:\d cannot run:.*item 0 of odd_item: leaf \$\.a\.b\[1\] is a object",
        ),
        (object_array, r"(?s)^worker:\d cannot run:.*leaf \$\.a is an array of object"),
    ],
)
def test_a_function_that_cannot_run_ends_the_run_with_its_own_error(
    engine: str, fn: Callable[..., Any], said: str
) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(fn, policy, batch_size=2)
        with pytest.raises(paceline.WorkerFailed, match=said) as caught:
            batches.next(timeout=30)
        if fn is raises_at_once:
            assert "seed" in str(caught.value)


@every_engine
def test_a_function_that_fails_now_and_then_is_started_again(engine: str) -> None:
    def shaky(policy: Any, worker: Any) -> Iterator[Any]:
        for _ in range(4):
            policy.read()
            yield worker.index
        raise ArithmeticError("now and then")

    with quiet(2, engine, restarts=1000) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(shaky, policy, batch_size=4)
        for _ in range(6):
            batches.next(timeout=30)


def test_a_crash_loop_over_its_budget_ends_the_run() -> None:
    def dies(policy: Any) -> Iterator[Any]:
        policy.read()
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    with quiet(1, restarts=2) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(dies, policy, batch_size=100)
        said = r"(?s)^worker:0 failed 3 times within 60 s, its budget is restarts=2.*SIGKILL"
        with pytest.raises(paceline.WorkerFailed, match=said):
            batches.next(timeout=30)


def with_pid(policy: Any) -> Iterator[Any]:
    while True:
        policy.read()
        yield {"pid": os.getpid(), "x": np.ones(5000)}


def test_a_killed_worker_is_restarted_and_nothing_is_lost() -> None:
    with quiet(2, restarts=100) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(with_pid, policy, batch_size=4)
        killed: set[int] = set()
        fresh: set[int] = set()
        until = time.monotonic() + 40
        while len(killed) < 3 or not fresh - killed:
            assert time.monotonic() < until
            batch = batches.next(timeout=20)
            pids = {int(pid) for pid in batch.data["pid"]}
            fresh |= pids
            victims = pids - killed
            if victims and len(killed) < 3:
                killed.add(victims.pop())
                os.kill(max(killed, key=lambda pid: pid in pids), signal.SIGKILL)
            policy.assign(np.zeros(3))
        stats = batches.stats()
        assert stats["accepted"] == (
            stats["delivered"] + sum(stats["dropped"].values()) + stats["stored"]
        )


def test_a_killed_server_ends_the_wait_with_its_name() -> None:
    def stuck(policy: Any) -> Iterator[Any]:
        policy.read()
        yield os.getppid()
        policy.read(newer_than=policy.version, timeout=None)
        yield 1

    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(stuck, policy, batch_size=1)
        batches.next()
        os.kill(server_pid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(paceline.Disconnected, match=r"ps:0, was killed by SIGKILL$"):
            batches.next()
        assert time.monotonic() - began < 5


def server_pid() -> int:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline") as line:
                    words = line.read().split("\0")
            except OSError:
                continue
            if "ps:0" in words and str(os.getpid()) in words:
                return int(entry)
    raise AssertionError("no server runs")


SCRIPT = """
import os, sys, time
import numpy as np
import paceline

class Env:
    def __init__(self, seed): self.seed = seed
scale = 2.0
make = lambda seed: Env(seed)

def rollouts(policy, worker):
    env = make(worker.seed)
    while True:
        yield policy.read().tree * scale

with paceline.Cluster(workers=2, progress="quiet") as cluster:
    policy = cluster.variable("policy", np.ones(3))
    for n, batch in enumerate(cluster.collect(rollouts, policy, batch_size=2)):
        assert (batch.data == 2.0).all()
        if n == 3:
            print("running", flush=True)
        if n > 3 and sys.argv[1] == "once":
            break
print("done")
"""


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as children:
            found += [int(child) for child in children.read().split()]
    return found


def gone(pids: list[int], within: float) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
    return False


def script(tmp_path: Any, mode: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(path), mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_script_needs_no_guard_and_ends_by_itself(tmp_path: Any) -> None:
    out, err = script(tmp_path, "once").communicate(timeout=40)
    assert (out, err) == ("running\ndone\n", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_the_chief_ends_all_its_processes(tmp_path: Any, number: int) -> None:
    chief = script(tmp_path, "for ever")
    assert chief.stdout is not None
    assert chief.stdout.readline() == "running\n"
    pids = [int(pid) for pid in _processes_of(chief.pid)]
    assert len(pids) >= 3
    chief.send_signal(number)
    _, err = chief.communicate(timeout=20)
    assert chief.returncode != 0
    assert gone(pids, within=5)
    if number == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")


def _processes_of(pid: int) -> list[int]:
    found = children_of(pid)
    for child in list(found):
        found += children_of(child)
    return found


def test_what_a_worker_prints_is_shown_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    def talks(worker: Any) -> Iterator[Any]:
        sys.stdout.write(f"hello from {worker.index}\n")
        sys.stderr.write("careful\n")
        while True:
            yield 1

    with quiet(1) as cluster:
        cluster.collect(talks, batch_size=1).next()
    out, err = capfd.readouterr()
    assert "[worker:0] hello from 0\n" in out
    assert "[worker:0] careful\n" in err


def test_workers_have_one_thread_no_accelerator_and_seeds_of_their_own() -> None:
    def tells(worker: Any) -> Iterator[Any]:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        while True:
            yield {"env": [os.environ[name] for name in names], "seed": worker.seed}

    def seeds() -> dict[str, int]:
        with quiet(2, seed=7) as cluster:
            found: dict[str, int] = {}
            batches = cluster.collect(tells, batch_size=2)
            while len(found) < 2:
                batch = batches.next()
                assert batch.data["env"] == [["1", "1"], ["1", "1"], ["", ""]]
                found |= dict(zip(batch.worker, map(int, batch.data["seed"]), strict=True))
            return found

    first = seeds()
    assert len(set(first.values())) == 2
    assert seeds() == first


@beside
def test_two_jobs_are_collected_from_side_by_side(engine: str) -> None:
    with quiet({"actor": 2, "eval": 1}, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        acting = cluster.collect(followers, policy, batch_size=2, job="actor")
        judging = cluster.collect(followers, policy, batch_size=1, job="eval", max_lag=None)
        for _ in range(5):
            assert set(acting.next().worker) <= {"actor:0", "actor:1"}
            assert judging.next().worker == ("eval:0",)


@every_engine
def test_bad_numbers_are_refused_with_what_was_found(engine: str) -> None:
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with pytest.raises(
            paceline.SchemaError, match=r"^batch_size=9 is outside of 1 to capacity=8"
        ):
            cluster.collect(followers, policy, batch_size=9, capacity=8)
        with pytest.raises(paceline.SchemaError, match=r"^max_lag is 0 or more versions, or None"):
            cluster.collect(followers, policy, batch_size=1, max_lag=-1)
        with pytest.raises(paceline.SchemaError, match=r"^no workers of job 'judge'; there are"):
            cluster.collect(followers, policy, batch_size=1, job="judge")
        batches = cluster.collect(followers, policy, batch_size=1)
        for timeout in (-1, float("nan")):
            with pytest.raises(ValueError, match=r"^timeout must be >= 0 seconds or None"):
                batches.next(timeout=timeout)
    with pytest.raises(
        paceline.SchemaError, match=r"^workers of job 'worker' are 1 or more, not 0"
    ):
        quiet(0, engine)


@every_engine
def test_a_function_that_cannot_travel_is_refused_with_what_it_captured(engine: str) -> None:
    import threading

    guard = threading.Lock()

    def holds(policy: Any) -> Iterator[Any]:
        with guard:
            yield policy.read().tree

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with pytest.raises(paceline.FunctionError, match=r"holds cannot be sent.*'guard'"):
            cluster.collect(holds, policy, batch_size=1)


def test_a_captured_handle_reconnects_in_the_worker() -> None:
    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.arange(3.0))
        notes = cluster.queue("notes", 10)

        def captures() -> Iterator[Any]:
            while True:
                notes.enqueue({"pid": os.getpid()}, timeout=5)
                yield policy.read().tree

        batch = cluster.collect(captures, batch_size=1, capacity=1).next()
        np.testing.assert_array_equal(batch.data, [[0.0, 1.0, 2.0]])
        assert notes.dequeue()["pid"] != os.getpid()


def test_in_one_thread_a_wait_without_end_says_so() -> None:
    def waits(policy: Any) -> Iterator[Any]:
        policy.read()
        yield 1
        policy.read(newer_than=policy.version, timeout=None)
        yield 2

    with quiet(1, "serial") as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(waits, policy, batch_size=1)
        batches.next()
        with pytest.raises(paceline.WorkerFailed, match=r"WouldBlock: read 'policy' newer than"):
            batches.next()
        with pytest.raises(paceline.WouldBlock, match=r"^dequeue of 1 items from 'empty'"):
            cluster.queue("empty", 3).dequeue()


@every_engine
def test_closing_twice_and_after_the_end_is_fine(engine: str) -> None:
    cluster = quiet(2, engine)
    batches = cluster.collect(followers, cluster.variable("policy", np.zeros(3)), batch_size=2)
    batches.next()
    cluster.close()
    cluster.close()
    batches.close()
    with pytest.raises(paceline.Closed, match=r"^collection 'followers-1' is closed$"):
        batches.next()


def test_a_worker_that_is_stuck_does_not_hold_up_the_end() -> None:
    def stuck(policy: Any) -> Iterator[Any]:
        policy.read()
        yield 1
        time.sleep(60)
        yield 2

    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(stuck, policy, batch_size=1)
        batches.next()
        with pytest.raises(paceline.TimedOut, match=r"^next batch of 'stuck-1': 0 of 1 items"):
            batches.next(timeout=0.05)
        began = time.monotonic()
    assert time.monotonic() - began < 8


def test_a_forked_copy_of_a_cluster_leaves_its_parents_alone() -> None:
    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(followers, policy, batch_size=1)
        batches.next()
        pid = os.fork()
        if pid == 0:
            refused = 0
            try:
                policy.assign(np.ones(3))
            except paceline.Disconnected as e:
                refused = int("a forked process opens one of its own" in str(e))
            batches.close()
            cluster.close()
            os._exit(7 if refused else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        policy.assign(np.ones(3))
        batches.next()


def test_a_handle_of_another_cluster_is_refused() -> None:
    with quiet(1) as one, quiet(1) as other:
        mine = one.variable("policy", np.zeros(3))
        other.variable("policy", np.ones(3))
        batches = other.collect(followers, mine, batch_size=1)
        said = r"(?s)the variable 'policy' is on unix:@\S+, this session on unix:@"
        with pytest.raises(paceline.WorkerFailed, match=said):
            batches.next()


def test_a_batch_may_hold_more_plain_values_than_one_request() -> None:
    def texts() -> Iterator[Any]:
        while True:
            yield "x" * 40_000_000

    with quiet(1) as cluster:
        batch = cluster.collect(texts, batch_size=2).next()
        assert [len(text) for text in batch.data] == [40_000_000] * 2
