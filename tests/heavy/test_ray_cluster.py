"""Clusters whose servers and workers are actors of a Ray cluster on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import quiet
from rays import joined, nothing_of_ours, warned

import paceline
from paceline import Cluster, Refused, SchemaError, TaskFailed, WorkerFailed

pytestmark = [warned, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with joined(num_cpus=4):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_of_ours():
        yield


def play(policy: Any, worker: Any) -> Iterator[Any]:
    while True:
        yield {"w": policy.read().tree, "by": worker.index, "pid": os.getpid()}


def test_it_collects_maps_and_runs(tmp_path: Path) -> None:
    with quiet(2, engine="ray", ps=2) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        by: set[int] = set()
        for batch in cluster.collect(play, policy, batch_size=4, max_lag=1):
            # What an item was made with is the version that it says.
            assert (batch.lag <= 1).all()
            by |= set(batch.data["by"].tolist())
            policy.assign_add(np.ones(3))
            if by == {0, 1} and policy.read().count > 20:
                break
        assert cluster.map(lambda x: x * x, range(5)) == [0, 1, 4, 9, 16]
        assert cluster.run(lambda worker: (worker.job, worker.index)) == [
            ("worker", 0),
            ("worker", 1),
        ]
        large = np.arange(1 << 20, dtype=np.float64)
        spread = cluster.session.spread("large", {"a": large, "b": large})
        spread.assign_add({"a": large, "b": large})
        found = cluster.run(lambda spread: float(spread.read().tree["a"][-1]), spread)
        assert found == [2.0 * large[-1]] * 2


def test_lockstep_gives_the_bits_of_every_other_engine() -> None:
    def walk(policy: Any, worker: Any) -> Iterator[Any]:
        rng = np.random.default_rng(worker.seed)
        while True:
            yield policy.read().tree * rng.normal(size=4)

    def trained(engine: str) -> bytes:
        with quiet(2, engine=engine, seed=7) as cluster:
            policy = cluster.variable("policy", np.ones(4))
            batches = cluster.collect(walk, policy, batch_size=3, schedule="lockstep")
            for _, batch in zip(range(12), batches, strict=False):
                policy.assign_add(0.1 * batch.data.mean(axis=0))
            return bytes(policy.read().tree.tobytes())

    assert trained("ray") == trained("serial")


def test_a_killed_worker_is_started_again_by_ray_and_the_run_goes_on() -> None:
    with quiet(2, engine="ray") as cluster:
        policy = cluster.variable("policy", 0.0)
        pids: dict[int, set[int]] = {0: set(), 1: set()}
        killed = False
        for batch in cluster.collect(play, policy, batch_size=4):
            for by, pid in zip(batch.data["by"].tolist(), batch.data["pid"].tolist(), strict=True):
                pids[by].add(pid)
            if not killed and all(pids.values()):
                os.kill(next(iter(pids[0])), signal.SIGKILL)
                killed = True
            if len(pids[0]) == 2:
                break
        assert (len(pids[0]), len(pids[1])) == (2, 1)


def test_an_error_of_the_function_is_the_same_as_elsewhere() -> None:
    def fail(x: int) -> int:
        raise ArithmeticError(f"not {x}")

    def broken(policy: Any) -> Iterator[Any]:
        policy.read()
        yield 1 // 0

    with quiet(1, engine="ray", restarts=1) as cluster:
        with pytest.raises(
            TaskFailed, match=r"(?s)^fail\(3\) raised in worker:0:.*\nArithmeticError: not 3$"
        ):
            cluster.map(fail, [3])
        policy = cluster.variable("policy", 0.0)
        with pytest.raises(WorkerFailed, match=r"(?s)ZeroDivisionError: "):
            next(iter(cluster.collect(broken, policy, batch_size=1)))


def test_a_server_that_is_killed_ends_the_cluster_and_says_so() -> None:
    with quiet(1, engine="ray") as cluster:
        policy = cluster.variable("policy", 0.0)
        batches = iter(cluster.collect(play, policy, batch_size=1))
        next(batches)
        os.kill(cluster.processes()["ps:0"], signal.SIGKILL)
        with pytest.raises(paceline.Disconnected, match=r"ps:0"):
            for _ in batches:
                pass


def test_a_server_that_is_killed_comes_back_with_what_was_saved(tmp_path: Path) -> None:
    with quiet(1, engine="ray", checkpoint=tmp_path) as cluster:
        policy = cluster.variable("policy", np.arange(3.0))
        cluster.save()
        before = cluster.processes()["ps:0"]
        os.kill(before, signal.SIGKILL)
        assert policy.read(timeout=60).tree.tolist() == [0.0, 1.0, 2.0]
        assert cluster.stats().restarted == {"ps:0": 1}
        batches = cluster.collect(play, policy, batch_size=2)
        assert next(iter(batches)).data["w"].shape == (2, 3)
        batches.close()


def test_more_than_there_is_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        Refused,
        match=r"^99 tasks on the Ray cluster of 1 nodes: there is less CPU; they ask for 99 CPU"
        r" \(it has 4, \d free\); Ray\(worker=\.\.\.\) says what each takes",
    ):
        Cluster(99, engine="ray", progress="quiet")
    asked = paceline.Ray(worker={"num_cpus": 1, "resources": {"tpu": 1}}, wait=0.3)
    with pytest.raises(Refused, match=r"after 0\.3 s: there is less tpu; .*1 tpu \(it has 0, 0"):
        Cluster(1, engine=asked, progress="quiet")


def test_what_belongs_to_one_host_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^ps=0: a server in this process is for engines of thi"):
        Cluster(1, engine="ray", ps=0, progress="quiet")
    with pytest.raises(SchemaError, match=r"^transport='tcp': tasks on several hosts use TCP, and"):
        Cluster(1, engine="ray", transport="tcp", progress="quiet")


def test_code_that_a_node_cannot_import_is_named_with_what_to_do() -> None:
    module = types.ModuleType("of_this_process_alone")
    exec("def double(x): return 2 * x", module.__dict__)
    sys.modules[module.__name__] = module
    said = (
        r"No module named 'of_this_process_alone' on the node [\d.]+: install it on every node, or"
    )
    try:
        with quiet(1, engine="ray") as cluster:
            with pytest.raises(TaskFailed, match=said):
                cluster.map(module.double, [1])
            module.double.__code__ = (lambda x: (yield x)).__code__
            with pytest.raises(WorkerFailed, match=said):
                cluster.collect(module.double, 1, batch_size=1, version_of=None).next(timeout=60)
    finally:
        del sys.modules[module.__name__]


def test_nodes_with_another_version_are_told_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engines.ray.versions", lambda: {"Python": "3.9"})
    with pytest.raises(
        paceline.Disconnected,
        match=r"the node [\d.]+ \(\w{8}\) has Python 3\.\d+ and paceline \S+, this program has"
        r" Python 3\.9: they have to be the same",
    ):
        quiet(1, engine="ray").__enter__()


def test_without_ray_it_is_said_what_to_install() -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "import paceline\n"
        "try: paceline.Cluster(1, engine='ray')\n"
        "except paceline.Unsupported as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == (
        "engine 'ray' needs the package 'ray', which is not installed: pip install"
        " 'paceline[ray]'\n"
    )
