"""The demo's loops and what they leave behind, in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import checkpoints
from paceline.demo import policy
from paceline.demo.cartpole import BATCH_SIZE, SOLVED_RETURN, STEPS
from paceline.demo.policy import EPOCHS, MINIBATCH
from paceline.demo.record import Record
from paceline.demo.train import train

BATCH_STEPS = BATCH_SIZE * STEPS


def run(folder: Path, *, target: float = SOLVED_RETURN, **options: Any) -> Record:
    wanted = {"workers": 2, "seed": 0, "engine": "serial", "progress": "quiet"}
    with Record(folder, "run", target=target) as record:
        train(record, **{**wanted, "budget_steps": 5 * BATCH_STEPS, **options})
    return record


def lines(record: Record) -> list[dict[str, float]]:
    return [json.loads(line) for line in (record.folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_solve_cartpole(tmp_path: Path) -> None:
    record = run(tmp_path, engine="processes", budget_steps=500_000)
    assert record.solved
    assert record.mean_return is not None
    assert record.mean_return >= SOLVED_RETURN
    assert max(line["lag"] for line in lines(record)) <= 1


@pytest.mark.parametrize("short", [0, 1])
def test_training_ends_with_the_batch_that_reaches_the_budget(tmp_path: Path, short: int) -> None:
    record = run(tmp_path, budget_steps=3 * BATCH_STEPS + 1 - short)
    assert record.steps == (4 - short) * BATCH_STEPS
    assert not record.solved


def test_training_ends_when_the_last_100_episodes_reach_the_target(tmp_path: Path) -> None:
    record = run(tmp_path, target=1.0, budget_steps=100 * BATCH_STEPS)
    assert record.solved
    assert len(record.returns) >= 100
    assert lines(record)[-2]["episodes"] < 100


def test_metrics_have_a_line_for_each_batch(tmp_path: Path) -> None:
    record = run(tmp_path)
    found = lines(record)
    assert [line["batch"] for line in found] == [1, 2, 3, 4, 5]
    assert [line["steps"] for line in found] == [n * BATCH_STEPS for n in range(1, 6)]
    assert [line["seconds"] for line in found] == sorted(line["seconds"] for line in found)
    assert found[-1]["episodes"] == len(record.returns)
    assert found[-1]["mean_return"] == pytest.approx(np.mean(record.returns[-100:]))
    expected = "seconds batch steps episodes mean_return lag entropy value_error".split()
    assert all(list(line) == expected for line in found)


def test_the_parameters_are_those_after_the_last_batch(tmp_path: Path) -> None:
    record, same = run(tmp_path), run(tmp_path)
    with (
        np.load(record.folder / "parameters.npz") as one,
        np.load(same.folder / "parameters.npz") as two,
    ):
        first = policy.init(0)
        assert list(one) == list(first)
        for name, array in first.items():
            np.testing.assert_array_equal(one[name], two[name])
            assert one[name].shape == array.shape
            assert not np.array_equal(one[name], array)


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    content = (run(tmp_path).folder / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_a_folder_that_exists_is_left_alone_and_the_next_free_one_taken(tmp_path: Path) -> None:
    (tmp_path / "run-2").mkdir()
    folders = []
    for _ in range(3):
        with Record(tmp_path, "run", target=1.0) as record:
            folders.append(record.folder.name)
    assert folders == ["run", "run-3", "run-4"]


def test_a_run_without_a_batch_leaves_no_curve_and_no_parameters(tmp_path: Path) -> None:
    with Record(tmp_path, "run", target=1.0) as record:
        assert record.mean_return is None
        assert not record.solved
    record.close()
    assert [file.name for file in record.folder.iterdir()] == ["metrics.jsonl"]


def test_what_was_reached_is_written_however_the_run_ends(tmp_path: Path) -> None:
    def end() -> None:
        with Record(tmp_path, "run", target=1.0) as record:
            train(record, workers=1, seed=0, engine="serial", progress="quiet", budget_steps=1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end()
    names = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert names == ["curve.png", "metrics.jsonl", "parameters.npz"]


def test_with_a_checkpoint_it_goes_on_where_it_was(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for budget in (2, 5):
        record = run(tmp_path, budget_steps=budget * BATCH_STEPS, checkpoint=saved)
        assert record.steps == budget * BATCH_STEPS
    assert [line["steps"] for line in lines(record)] == [n * BATCH_STEPS for n in (3, 4, 5)]
    found = checkpoints.latest(saved)
    assert found is not None
    # Each batch is so many steps of Adam.
    each = EPOCHS * BATCH_STEPS // MINIBATCH
    assert found.read("learner")["count"] == 5 * each
    assert found.manifest.of().counters["steps"].value == 5 * BATCH_STEPS
