"""The main job, end to end: workers collect with the newest parameters, the chief trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import descendants, quiet

import paceline
from paceline.core.versions import count_of


def followers(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    """Items that say with which parameters they were made."""
    while True:
        snapshot = policy.read()
        worker.log(steps=2, score=float(snapshot.tree[0]))
        yield {"used": snapshot.tree.copy(), "version": snapshot.version, "index": worker.index}


@pytest.mark.parametrize(
    ("engine", "transport"),
    [("serial", "unix"), ("threads", "unix"), ("processes", "unix"), ("processes", "tcp")],
)
def test_every_item_is_stamped_with_the_version_it_was_made_with(
    engine: str, transport: str
) -> None:
    with quiet(2, engine, transport=transport) as cluster:
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_the_chief_ends_all_its_processes(tmp_path: Any, number: int) -> None:
    chief = script(tmp_path, "for ever")
    assert chief.stdout is not None
    assert chief.stdout.readline() == "running\n"
    pids = sorted(descendants(chief.pid))
    assert len(pids) >= 3
    chief.send_signal(number)
    _, err = chief.communicate(timeout=20)
    assert chief.returncode != 0
    assert gone(pids, within=5)
    if number == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")


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
