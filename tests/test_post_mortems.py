"""Post-mortems: what a worker leaves when it fails, and running that alone again."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, quiet, until

from paceline import (
    Cluster,
    Refused,
    SchemaError,
    TaskFailed,
    TimedOut,
    Variable,
    WorkerFailed,
)  # fmt: skip
from paceline.core.versions import count_of
from paceline.post_mortems import AUTO, KEEP, Facts, Folder, PostMortem, read
from paceline.replay import replay
from paceline.testing import full_disk
from paceline.worker.line import FILES

pytestmark = pytest.mark.timeout(120)

FACTS = Facts(
    paceline="1", at=0.0, worker="worker:3", seed=5, how="it failed", function="f", item=2,
    shapes="$.x float32[2]", input=None, versions={"policy": 7}, saved={"policy": 7}, absent={},
    output=["a line"], environment={}, path=[], argv=[],
)  # fmt: skip


# The file


def written(folder: Path, variables: Mapping[str, Any] | None = None) -> Path:
    there = Folder(str(folder))
    path = there.place("worker:3")
    there.write(path, FACTS, b"function", b"input", variables or {})
    return path


def test_what_is_written_is_what_is_read_and_only_its_user_may(tmp_path: Path) -> None:
    tree = {"w": np.arange(6.0).reshape(2, 3), "n": 3, "raw": b"\x00\xff", "b": [True, None, "x"]}
    path = written(tmp_path / "new" / "folder", {"policy": tree, "empty": {}})
    assert path.stat().st_mode & 0o777 == 0o600
    found = read(path)
    assert (found.facts, found.function, found.input) == (FACTS, b"function", b"input")
    np.testing.assert_array_equal(found.variables["policy"].pop("w"), tree.pop("w"))
    assert found.variables == {"policy": tree, "empty": {}}
    assert "worker:3, in f, item 2, with seed 5" in found.facts.told()


def test_the_newest_files_stay_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    paths = [written(tmp_path) for _ in range(KEEP)]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1e9 - age, 1e9 - age))
    newest = written(tmp_path)
    assert {*tmp_path.iterdir()} == {*paths[1:], newest, tmp_path / "mine.txt"}


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path)
    path.chmod(mode)
    with pytest.raises(Refused, match=rf"^the post-mortem .* has mode {mode:o}: others may have"):
        read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(Refused, match=r"^the post-mortem .* belongs to user 12345: to run it is"):
        read(path)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, part: float) -> None:
    path = written(tmp_path, {"policy": np.zeros(100)})
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(SchemaError, match=r" is no whole post-mortem: "):
        read(path)


def test_a_file_of_which_a_byte_has_changed_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"policy": np.full(100, 7, np.uint8)})
    content = path.read_bytes()
    path.write_bytes(content.replace(bytes([7] * 100), bytes([7] * 99 + [8])))
    with pytest.raises(SchemaError, match=r" is no whole post-mortem: Bad CRC-32 for file 'varia"):
        read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^the post-mortem .*/none cannot be read: No such file"):
        read(tmp_path / "none")


def test_a_full_disk_leaves_nothing_of_a_file(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(OSError, match=r"File too large"):
        written(tmp_path, {"policy": np.zeros(1000)})
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_all_is_the_users_alone_or_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    there = Folder(AUTO)
    there.write(there.place("worker:0"), FACTS, b"", None, {})
    assert there.path.parent == tmp_path
    assert there.path.stat().st_mode & 0o777 == 0o700
    there.path.chmod(0o777)
    with pytest.raises(Refused, match=r" is not a folder of this user's alone$"):
        there.write(there.place("worker:0"), FACTS, b"", None, {})


# What a failure leaves

HOWS: dict[str, tuple[Callable[[], object], str]] = {
    "exits": (lambda: os._exit(3), r"worker:0 ended with exit status 3 \("),
    "crashes": (
        lambda: ctypes.string_at(0),
        r"worker:0 was killed by SIGSEGV \((?s:.*)\nFatal Python error: Segmentation fault(?s:.*)"
        r"test_post_mortems\.py\", line \d+ in failing$",
    ),
    "kills": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"worker:0 was killed by SIGKILL \("),
    "raises": (lambda: 1 / 0, r"Traceback(?s:.*)ZeroDivisionError: division by zero\n\(seed"),
    "leaves": (lambda: sys.exit(4), r"worker:0 ended with exit status [14] \("),
}


SLOW = ("exits", "leaves")
"""Those that differ little from others."""


def failing(policy: Any, how: Callable[[], object], gate: str, worker: Any) -> Iterator[Any]:
    noise = np.random.default_rng(worker.seed)

    def fails() -> None:
        how()

    for n in range(2):
        policy.read()
        yield {"obs": np.zeros((2, n + 1), np.float32), "noise": noise.integers(1 << 30)}
    until(lambda: os.path.exists(gate))
    fails()


def failed(folder: Path, engine: str, how: str) -> tuple[PostMortem, Path, WorkerFailed, Any]:
    """Have a worker fail after two items; after it had read version 1, there is version 2."""
    act, _ = HOWS[how]
    gate = folder / "gate"
    with quiet(1, engine, restarts=0, post_mortem=folder / "dead", seed=3) as cluster:
        policy = cluster.variable("policy", np.arange(3.0))
        batches = cluster.collect(failing, policy, act, str(gate), batch_size=2, max_lag=None)
        data = batches.next(timeout=LIMIT).data
        policy.assign(np.full(3, 9.0))
        gate.touch()
        with pytest.raises(WorkerFailed) as raised:
            batches.next(timeout=LIMIT)
    [path] = (folder / "dead").iterdir()
    return read(path), path, raised.value, data


def check_facts(found: PostMortem, path: Path, error: WorkerFailed, how: str) -> None:
    facts = found.facts
    assert (facts.worker, facts.function, facts.item) == ("worker:0", "failing", 2)
    assert facts.shapes == "$.obs float32[2,2], $.noise int64[]"
    assert str(error).endswith(f"run it alone again, in a debugger: paceline replay {path}")
    assert f"seed {facts.seed}, item 2, parameters' version 1" in str(error)


@pytest.mark.parametrize(
    "how",
    ["crashes", "kills", "raises", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def test_a_failure_leaves_a_file_that_says_what_was_known_and_fails_again(
    tmp_path: Path, how: str
) -> None:
    found, path, error, data = failed(tmp_path, "processes", how)
    check_facts(found, path, error, how)
    # Who raises still has what it read; of who is dead, the newest is what there is.
    version = 1 if how == "raises" else 2
    assert count_of(found.facts.saved["policy"]) == version
    wanted = np.arange(3.0) if version == 1 else np.full(3, 9.0)
    np.testing.assert_array_equal(found.variables["policy"], wanted)
    if how in ("raises", "leaves"):
        made: list[Any] = []
        outcome = replay(found, on_item=made.append)
        assert type(outcome.error) is (ZeroDivisionError if how == "raises" else SystemExit)
        assert "in fails" in str(outcome)
        assert [item["noise"] for item in made] == [int(item["noise"]) for item in data]
    else:
        status = {"exits": 3, "crashes": -signal.SIGSEGV, "kills": -signal.SIGKILL}[how]
        done = command(path, "--no-debugger")
        assert done.returncode == status
        assert "it is run again, alone:" in done.stdout
        assert how != "crashes" or "in fails" in done.stderr


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_without_processes_a_failure_leaves_the_same(tmp_path: Path, engine: str) -> None:
    found, path, error, data = failed(tmp_path, engine, "raises")
    check_facts(found, path, error, "raises")
    assert count_of(found.facts.saved["policy"]) == 1
    made: list[Any] = []
    assert isinstance(replay(found, on_item=made.append).error, ZeroDivisionError)
    assert [item["noise"] for item in made] == [int(item["noise"]) for item in data]


def test_the_debugger_shows_where_it_failed(tmp_path: Path) -> None:
    _, path, _, _ = failed(tmp_path, "serial", "raises")
    done = command(path, words="up\nup\np worker, n\nq\n")
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "(<Worker worker:0, seed" in done.stdout
    assert done.stdout.split("(<Worker")[1].split(">, ")[1].startswith("1)")


def command(path: Path, *options: str, words: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "replay", str(path), *options],
        input=words, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# Calls


def test_an_input_that_kills_its_worker_can_be_run_again(tmp_path: Path) -> None:
    def halves(x: int, policy: Any) -> float:
        if x == 3 and os.environ.get("MERCY") is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(policy.read().tree[0]) * x / 2

    with quiet(1, post_mortem=tmp_path) as cluster:
        policy = cluster.variable("policy", np.full(1, 5.0))
        with pytest.raises(WorkerFailed, match=r"paceline replay ") as raised:
            cluster.map(halves, [1, 3], policy, retries=0)
    [path] = tmp_path.iterdir()
    assert str(path) in str(raised.value)
    found = read(path)
    assert (found.facts.item, found.facts.input) == (None, "halves(3)")
    os.environ["MERCY"] = "1"
    try:
        assert replay(found).result == 7.5
    finally:
        del os.environ["MERCY"]


def inverse(x: int, policy: Any) -> float:
    snapshot = policy.read()
    if x == 0:
        policy.assign(np.full(1, 7.0))
    return 1 / (x * float(snapshot.tree[0]))


HOW: dict[str, Callable[[Cluster, Variable[Any]], Any]] = {
    "map": lambda cluster, policy: cluster.map(inverse, [1, 0], policy),
    "submit": lambda cluster, policy: cluster.submit(inverse, 0, policy).result(timeout=LIMIT),
    "run": lambda cluster, policy: cluster.run(functools.partial(inverse, 0), policy),
}


@pytest.mark.parametrize(
    ("how", "engine"),
    [*product(HOW, ["processes"]), ("map", "threads"), ("map", "serial"), ("run", "serial")],
)
def test_what_a_called_function_raises_can_be_run_again(
    tmp_path: Path, how: str, engine: str
) -> None:
    with quiet(1, engine, post_mortem=tmp_path) as cluster:
        policy = cluster.variable("policy", np.full(1, 5.0))
        with pytest.raises(TaskFailed, match=r"paceline replay ") as raised:
            HOW[how](cluster, policy)
    [path] = tmp_path.iterdir()
    assert str(path) in str(raised.value)
    found = read(path)
    assert found.facts.item is None
    assert found.facts.input == (None if how == "run" else "inverse(0)")
    assert "ZeroDivisionError" in found.facts.how
    # It had read that, and made another one before it failed.
    assert found.variables["policy"] == [5.0]
    again = replay(found)
    assert isinstance(again.error, ZeroDivisionError)
    if (how, engine) == ("map", "processes"):
        assert "ZeroDivisionError" in command(path, "--no-debugger").stdout


def test_of_many_calls_that_raise_a_few_leave_a_file(tmp_path: Path) -> None:
    with quiet(2, post_mortem=tmp_path) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        found = cluster.map(inverse, range(1, 41), policy, return_exceptions=True)
        assert all(isinstance(each, TaskFailed) for each in found)
        assert sum("paceline replay" in str(each) for each in found) == FILES
        # Another function is another one.
        with pytest.raises(TaskFailed, match=r"paceline replay "):
            cluster.map(lambda x: 1 / x, [0])
    assert len([*tmp_path.iterdir()]) == FILES + 1


def test_what_may_not_travel_or_has_no_folder_leaves_no_file(tmp_path: Path) -> None:
    with (
        quiet(1, "threads", post_mortem=tmp_path) as cluster,
        pytest.raises(SchemaError, match=r"^the result of .*: "),
    ):
        cluster.map(lambda x: object(), [0])
    assert not [*tmp_path.iterdir()]
    with quiet(1, "threads") as cluster, pytest.raises(TaskFailed) as raised:
        cluster.map(lambda x: 1 / x, [0])
    assert "replay" not in str(raised.value)


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_a_call_that_takes_too_long_says_what_it_is_at(tmp_path: Path, engine: str) -> None:
    def hangs(gate: str) -> None:
        until(lambda: os.path.exists(gate))

    gate = tmp_path / "gate"
    with quiet(1, engine, post_mortem=tmp_path / "dead") as cluster:
        with pytest.raises(TimedOut, match=r"in worker:0; it is at:\n(?s:.*) in hangs\n") as raised:
            cluster.map(hangs, [str(gate)], task_timeout=0.5, retries=0)
        gate.touch()
    [path] = (tmp_path / "dead").iterdir()
    assert str(raised.value).endswith(f"paceline replay {path}")
    assert " in hangs" in read(path).facts.how


# What cannot be had


@pytest.mark.parametrize("full", [False, True])
def test_a_file_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    def fails(gate: str) -> Iterator[Any]:
        yield 1
        until(lambda: os.path.exists(gate))
        raise ArithmeticError("in my own words")

    folder = tmp_path / "dead"
    if not full:
        folder.write_text("no folder")
    with quiet(1, restarts=0, post_mortem=folder) as cluster:
        batches = cluster.collect(fails, str(tmp_path / "gate"), batch_size=1)
        batches.next(timeout=LIMIT)
        (tmp_path / "gate").touch()
        with full_disk(100) if full else nullcontext():
            with pytest.raises(WorkerFailed, match=r"ArithmeticError: in my own words"):
                batches.next(timeout=LIMIT)
            until(lambda: caplog.messages)
    why = "File too large" if full else "File exists"
    [told] = caplog.messages
    assert re.search(rf"^the post-mortem of worker:0, .*, cannot be written: .*{why}", told)
    assert not full or list(folder.iterdir()) == []


def test_without_a_folder_nothing_is_written_or_said(tmp_path: Path) -> None:
    def fails() -> Iterator[Any]:
        yield 1 / 0

    with quiet(1, "serial", post_mortem=None) as cluster:
        with pytest.raises(WorkerFailed) as raised:
            cluster.collect(fails, batch_size=1).next()
    assert "replay" not in str(raised.value)
    with pytest.raises(SchemaError, match=r"^post_mortem: the path of a folder, not 3$"):
        quiet(1, "serial", post_mortem=3)


def test_variables_that_are_too_large_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.post_mortems.LARGE", 64)
    found, path, _, _ = failed(tmp_path, "serial", "leaves")
    assert found.variables.keys() == {"policy"}

    def fails(large: Any) -> Iterator[Any]:
        yield large.read().version / 0

    with quiet(1, "serial", restarts=0, post_mortem=tmp_path / "other") as cluster:
        large = cluster.variable("large", np.zeros(9))
        with pytest.raises(WorkerFailed):
            cluster.collect(fails, large, batch_size=1).next()
    [path] = (tmp_path / "other").iterdir()
    found = read(path)
    assert "it had read version 1; none is here: 'large' has 128 bytes" in found.facts.told()
    with pytest.raises(SchemaError, match=r"^the function has the variable 'large', which is not"):
        replay(found)


def test_queues_and_counters_are_stood_in_for_and_nobody_is_waited_for(tmp_path: Path) -> None:
    def fails(queue: Any, steps: Any, worker: Any) -> Iterator[Any]:
        queue.enqueue({"x": worker.index})
        steps.add(1)
        yield steps.value
        queue.dequeue()
        queue.dequeue()

    with quiet(1, "serial", restarts=0, post_mortem=tmp_path) as cluster:
        queue, steps = cluster.queue("queue", 5), cluster.counter("steps")
        batches = cluster.collect(fails, queue, steps, batch_size=1)
        with pytest.raises(WorkerFailed, match=r"WouldBlock"):
            list(batches)
    [path] = tmp_path.iterdir()
    outcome = replay(read(path))
    assert outcome.items == 1
    assert "WouldBlock" in str(outcome)


# Alive


def test_a_worker_in_native_code_that_holds_the_lock_is_not_taken_for_dead() -> None:
    def stuck(worker: Any) -> Iterator[Any]:
        began = time.monotonic()
        ctypes.PyDLL(None).sleep(3)  # holds the interpreter lock: no Python code runs
        yield {"took": time.monotonic() - began, "seed": worker.seed}

    with quiet(1, restarts=0, seed=3) as cluster:
        batch = cluster.collect(stuck, batch_size=1).next(timeout=LIMIT)
        assert cluster.stats().workers[0].starts == 1
    assert batch.data["took"][0] >= 3
