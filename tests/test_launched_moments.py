"""Who dies at which moment in a launched cluster: what the others make of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, accounted, following, quiet, runs, script, until

from paceline import Worker, checkpoints
from paceline.testing import Chaos


class Fatal:
    """A function that kills whoever unpacks it, the first time."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, worker: Worker) -> Iterator[Any]:
        while True:
            yield worker.seed


def test_a_worker_that_dies_while_it_is_given_its_function_is_replaced(tmp_path: Path) -> None:
    with quiet(1) as cluster:
        first = cluster.processes()["worker:0"]
        batches = cluster.collect(Fatal(tmp_path / "mark"), batch_size=2)
        assert len(batches.next(timeout=LIMIT)) == 2
        assert cluster.processes()["worker:0"] != first
        stats = batches.stats()
        assert accounted(stats)
        assert not stats["dropped"]


def test_a_worker_that_dies_while_it_is_told_to_stop_is_there_for_the_next(tmp_path: Path) -> None:
    def dies() -> Iterator[Any]:
        try:
            while True:
                yield os.getpid()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with cluster.collect(dies, batch_size=1) as batches:
            first = int(batches.next(timeout=LIMIT).data[0])
        assert accounted(batches.stats())
        again = cluster.collect(following, policy, batch_size=1).next(timeout=LIMIT)
        assert int(again.data["pid"][0]) != first


def test_a_checkpoint_is_whole_although_a_worker_dies_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quiet(1, checkpoint=tmp_path, save_every=None) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(following, policy, batch_size=1)
        batches.next(timeout=LIMIT)
        policy.assign(np.ones(3))
        chaos, synced, killed = Chaos(cluster), os.fsync, list[int]()

        def kills(descriptor: int) -> None:
            if not killed:
                killed.append(chaos.kill("worker:0"))
                until(lambda: not runs(killed[0]))
            synced(descriptor)

        monkeypatch.setattr(os, "fsync", kills)
        path = cluster.save()
        monkeypatch.setattr(os, "fsync", synced)
        found = checkpoints.latest(tmp_path)
        assert found is not None
        assert found.path == path
        assert found.read("policy").tolist() == [1, 1, 1]
        until(lambda: int(batches.next(timeout=LIMIT).data["pid"][0]) != killed[0])
        assert accounted(batches.stats())


CHIEF = """
import os, signal, sys
import numpy as np
import paceline

moment, chief = sys.argv[1], os.getpid()

def die():
    os.kill(chief, signal.SIGKILL)

def slow(worker):
    try:
        while True:
            yield worker.index
    finally:
        if moment == "stopping":
            die()

cluster = paceline.Cluster(2, checkpoint="run", save_every=None, progress="quiet")
print(*cluster.processes().values(), flush=True)
if moment == "starting":
    # Its workers are about to import what they need.
    die()
policy = cluster.variable("policy", np.zeros(3))
batches = cluster.collect(slow, batch_size=2)
batches.next()
cluster.save()
policy.assign(np.ones(3))
if moment == "checkpointing":
    os.fsync = lambda descriptor: die()
    cluster.save()
cluster.close()
"""


@pytest.mark.parametrize("moment", ["starting", "checkpointing", "stopping"])
def test_all_end_with_a_chief_that_dies(moment: str, tmp_path: Path) -> None:
    chief = script(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{CHIEF}", words=[moment])
    assert chief.stdout is not None
    pids = [int(word) for word in chief.stdout.readline().split()]
    assert len(pids) == 3
    chief.communicate(timeout=LIMIT)
    assert chief.returncode == -signal.SIGKILL
    until(lambda: not any(map(runs, pids)), within=2)
    found = checkpoints.latest(tmp_path / "run")
    if moment == "starting":
        assert found is None
        return
    assert found is not None
    assert found.path == checkpoints.found(tmp_path / "run")[-1][1]
    # What it was writing is no checkpoint: the one before is. Before it stops anybody it saves.
    assert found.read("policy").tolist() == [float(moment == "stopping")] * 3
