"""Clusters that save by themselves and go on where they were, whoever ended them."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, every_engine, following, quiet, script, slow_beside, until

import paceline
from paceline import checkpoints, keeping


def seeds(worker: paceline.Worker) -> Iterator[Any]:
    while True:
        yield worker.seed


@pytest.mark.timeout(240)
@every_engine
def test_a_cluster_goes_on_with_what_it_saved_at_its_end(engine: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    for turn in range(3):
        with quiet(1, engine, checkpoint=tmp_path / "run") as cluster:
            assert (cluster.restored is None) == (turn == 0)
            policy = cluster.variable("policy", {"w": np.zeros(3)})
            steps = cluster.counter("steps", 5)
            first = policy.read()
            assert first.tree["w"].tolist() == [2.0 * turn] * 3
            assert steps.value == 5 + 2 * turn
            told.append((first.version, policy.version))
            batches = cluster.collect(following, policy, batch_size=1)
            for _ in range(2):
                batches.next(timeout=LIMIT)
                policy.assign_add({"w": np.ones(3)})
                steps.add()
            told.append((policy.version, policy.version))
        found = checkpoints.latest(tmp_path / "run")
        assert found is not None
        assert found.manifest.step == 2 * (turn + 1)
    versions = [version for pair in told for version in pair]
    assert versions == sorted(versions)
    assert len(set(versions)) == 6


def test_versions_grow_although_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quiet(1, "serial", checkpoint=tmp_path) as cluster:
        before = cluster.variable("w", np.zeros(2)).version
    monkeypatch.setattr("paceline.server.loop.time.time", lambda: 1000.0)
    with quiet(1, "serial", checkpoint=tmp_path) as cluster:
        assert cluster.variable("w").version > before


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["serial", "threads", slow_beside])
def test_a_resumed_run_has_other_seeds_and_a_new_one_the_same(engine: str, tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b", None):
        with quiet(1, engine, seed=7, checkpoint=folder) as cluster:
            batches = cluster.collect(seeds, batch_size=1, capacity=2)
            # The first two of one that is resumed may have been on their way before.
            found.append([int(batches.next(timeout=LIMIT).data[0]) for _ in range(3)][-1])
    first, again, other, plain = found
    assert first == other == plain != again


def test_an_error_saves_nothing_and_ctrl_c_does(tmp_path: Path) -> None:
    def fails(error: type[BaseException]) -> None:
        with quiet(1, "serial", checkpoint=tmp_path, save_every=None) as cluster:
            w = cluster.variable("w", np.zeros(1))
            w.assign_add(np.ones(1))
            raise error

    with pytest.raises(ArithmeticError):
        fails(ArithmeticError)
    assert checkpoints.latest(tmp_path) is None
    with pytest.raises(KeyboardInterrupt):
        fails(KeyboardInterrupt)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.read("w").tolist() == [1.0]


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_it_saves_while_it_goes_on_and_soon_after_a_variable_was_made(
    engine: str, tmp_path: Path
) -> None:
    with quiet(1, engine, checkpoint=tmp_path, save_every=None) as cluster:
        cluster.variable("w", np.zeros(1))
        until(lambda: checkpoints.found(tmp_path))
        with cluster.container("x"):
            for make in (
                lambda: cluster.variable("w", np.zeros(1)),
                lambda: cluster.reader("r", [1]),
                lambda: cluster.accumulator("mean", like=0.0),
            ):
                count = len(checkpoints.found(tmp_path))
                make()
                until(lambda: len(checkpoints.found(tmp_path)) > count)  # noqa: B023
    with quiet(1, engine, checkpoint=tmp_path, save_every=0.01, keep=2) as cluster:
        newest = checkpoints.found(tmp_path)[-1][0]
        until(lambda: checkpoints.found(tmp_path)[-1][0] > newest + 3)
        assert len(checkpoints.found(tmp_path)) <= 3


def test_in_one_thread_it_saves_between_batches(tmp_path: Path) -> None:
    with quiet(1, "serial", checkpoint=tmp_path, save_every=None) as cluster:
        w = cluster.variable("w", np.zeros(1))
        batches = cluster.collect(following, w, batch_size=1)
        batches.next()
        assert len(checkpoints.found(tmp_path)) == 1
        assert cluster.save().name == "checkpoint-000002-step-1"


def test_without_a_folder_nothing_is_saved_and_save_says_so() -> None:
    with (
        quiet(1, "serial") as cluster,
        pytest.raises(paceline.CheckpointError, match=r"^save: say"),
    ):
        cluster.save()


def test_a_structure_that_changed_is_refused_by_its_leaf(tmp_path: Path) -> None:
    with quiet(1, "serial", checkpoint=tmp_path) as cluster:
        cluster.variable("w", {"a": np.zeros(2)})
    with (
        quiet(1, "serial", checkpoint=tmp_path) as cluster,
        pytest.raises(paceline.SchemaError, match=r"\$\.a"),
    ):
        cluster.variable("w", {"a": np.zeros(3)})


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    with quiet(1, "serial", checkpoint=tmp_path) as cluster:
        w = cluster.variable("w", np.zeros(1))
        cluster.save()
        w.assign(np.ones(1))
    last = checkpoints.found(tmp_path)[-1][1]
    (last / "variable-0000.safetensors").write_bytes(b"")
    caplog.clear()
    with quiet(1, "serial", checkpoint=tmp_path) as cluster:
        assert cluster.variable("w").read().tree.tolist() == [0.0]
        assert cluster.restored is not None
        said = f"resumed from step 0, {cluster.restored.path}"
    assert f"{last} is not used" in caplog.text
    assert said in caplog.messages
    for _, path in checkpoints.found(tmp_path):
        (path / "manifest.json").write_text("{")
    with pytest.raises(paceline.CheckpointError, match=r"^no checkpoint in .* is good"):
        quiet(1, "serial", checkpoint=tmp_path)


def test_what_cannot_be_saved_at_the_end_is_raised_when_all_has_ended(tmp_path: Path) -> None:
    cluster = quiet(1, "serial", checkpoint=tmp_path)
    cluster.variable("w", np.zeros(1))
    (tmp_path / ".lock").mkdir()
    with pytest.raises(paceline.CheckpointError, match=r"^checkpoint of step 0 in"):
        cluster.close()
    cluster.close()


@pytest.mark.parametrize(("option", "value"), [("save_every", -1.0), ("keep", 0)])
def test_what_is_out_of_bounds_is_said_before_anything_starts(
    tmp_path: Path, option: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=rf"^{option}"):
        quiet(1, checkpoint=tmp_path, **{option: value})


TRAIN = """
import json, sys
import numpy as np
import paceline

def follows(policy, worker):
    while True:
        yield float(policy.read().tree[0])

with paceline.Cluster(2, seed=3, checkpoint="run", save_every=0.05, progress="quiet") as cluster:
    policy, done = cluster.variable("policy", np.zeros(1)), cluster.counter("done")
    net = policy.read().tree.copy()
    for batch in cluster.collect(follows, policy, batch_size=2):
        net += 1
        version = policy.assign(net)
        print(json.dumps([version, done.add(), net[0]]), flush=True)
        if net[0] >= 100_000:
            break
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "when", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT]
)
def test_a_chief_that_is_killed_and_started_again_goes_on(tmp_path: Path, when: int) -> None:
    run = tmp_path / "run"
    seen: list[list[list[float]]] = []
    for _ in range(3):
        chief = script(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{TRAIN}")
        assert chief.stdout is not None
        lines = [json.loads(chief.stdout.readline()) for _ in range(3)]
        newest = checkpoints.found(run)[-1][0] if checkpoints.found(run) else 0
        # One of these began after the third batch.
        while not (found := checkpoints.found(run)) or found[-1][0] < newest + 3:
            lines.append(json.loads(chief.stdout.readline()))
        chief.send_signal(when)
        _, err = chief.communicate(timeout=LIMIT)
        assert "CheckpointError" not in err
        seen.append(lines)
    for before, after in pairwise(seen):
        version, count, weight = after[0]
        assert version > before[-1][0]
        assert count > before[2][1]
        assert weight > before[2][2]
        # It and the counter may be saved at different moments, some batches apart.
        assert weight >= count - len(before)


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_what_is_in_other_containers_comes_back_into_them(engine: str, tmp_path: Path) -> None:
    with quiet(1, engine, checkpoint=tmp_path, save_every=None) as cluster:
        for container, value in (("", 0), ("x", 1), ("y", 2)):
            with cluster.container(container):
                cluster.variable("w", np.full(2, value))
                cluster.queue("q", 4).enqueue(value)
    with quiet(2, engine, ps=2, checkpoint=tmp_path, save_every=None) as cluster:
        for container, value in (("", 0), ("x", 1), ("y", 2)):
            with cluster.container(container):
                assert cluster.variable("w", np.full(2, 9)).read().tree.tolist() == [value] * 2
                assert cluster.queue("q").dequeue(timeout=0) == value


def test_nobody_is_left_when_a_launch_fails(tmp_path: Path) -> None:
    (tmp_path / keeping.LAUNCHES).write_text("many")
    with pytest.raises(paceline.CheckpointError, match=r"launches cannot be counted up"):
        quiet(1, checkpoint=tmp_path)


def test_it_is_resumed_with_more_workers_and_servers(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path) as cluster:
        cluster.variable("w", np.arange(4.0))
    with quiet(3, ps=2, checkpoint=tmp_path) as cluster:
        w = cluster.variable("w")
        assert w.read().tree.tolist() == [0, 1, 2, 3]
        cluster.collect(following, w, batch_size=3).next(timeout=LIMIT)
