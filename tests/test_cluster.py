"""Launching: from scripts, prompts and notebooks, with what was asked for, or not at all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, descendants, every_engine, following, output, quiet, script

import paceline
from paceline import SchemaError, UnknownName
from paceline.preflight import preflight

# A program with all that the main module can define and a worker may need.
PROGRAM = """
import numpy as np
import paceline

SCALE = 2.0

class Env:
    def __init__(self, seed):
        self.step = lambda x: x * SCALE + self.bias

    bias = 1.0

def make(seed):
    return Env(seed)

closure = (lambda factor: lambda x: x * factor)(10)

def rollouts(policy, worker):
    env = make(worker.seed)
    while True:
        yield {"x": closure(env.step(policy.read().tree))}

def main(engine):
    with paceline.Cluster(2, engine=engine, progress="quiet") as cluster:
        policy = cluster.variable("policy", np.ones(3))
        for batch in cluster.collect(rollouts, policy, batch_size=2):
            break
        print(__name__, batch.data["x"].tolist(), policy.version == batch.version[0])
        inner = lambda: (yield SCALE)
        print(cluster.collect(inner, batch_size=1).next().data.tolist())
"""
PRINTED = "__main__ [[30.0, 30.0, 30.0], [30.0, 30.0, 30.0]] True\n[2.0]\n"


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_script_without_a_guard_prints_once_and_ends(tmp_path: Path, engine: str) -> None:
    assert output(script(tmp_path, PROGRAM + f"\nmain({engine!r})\n")) == PRINTED


def test_what_is_typed_at_a_prompt_works() -> None:
    typed = PROGRAM.replace("\n\nclass", "\nclass")
    blocks = re.sub(r"\n(?=\S)", "\n\n", re.sub(r"\n+", "\n", typed))
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=blocks + "\n\nmain('processes')\n",
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout == PRINTED, done.stderr


def test_cells_of_a_notebook_work(tmp_path: Path) -> None:
    """Each cell is compiled under a name that is no file, and run in `__main__`'s namespace."""
    text = f"""
import sys
cells = [{PROGRAM!r}, "main('processes')"]
for number, cell in enumerate(cells):
    exec(compile(cell, f"<ipython-input-{{number}}>", "exec"), sys.modules["__main__"].__dict__)
"""
    assert output(script(tmp_path, text)) == PRINTED


def test_a_module_beside_the_script_is_found_by_its_workers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rollouts():\n    while True:\n        yield 5\n")
    text = """
import mine, paceline
with paceline.Cluster(1, progress="quiet") as cluster:
    print(cluster.collect(mine.rollouts, batch_size=2).next().data.tolist())
"""
    assert output(script(tmp_path, text)) == "[5, 5]\n"


def test_what_workers_print_has_their_name_in_front(tmp_path: Path) -> None:
    text = """
import os, sys, paceline
def talks(worker):
    print("one\\ntwo")
    print("careful", file=sys.stderr)
    os.system("echo from a program")
    yield 1
with paceline.Cluster({"actor": 1}, progress="quiet") as cluster:
    cluster.collect(talks, batch_size=1).next()
"""
    program = script(tmp_path, text)
    out, err = program.communicate(timeout=LIMIT)
    assert out.splitlines() == [f"[actor:0] {line}" for line in ("one", "two", "from a program")]
    assert err == "[actor:0] careful\n"


def test_ctrl_c_between_batches_ends_a_program_at_once_and_in_order(tmp_path: Path) -> None:
    text = """
import sys, paceline
def rollouts():
    try:
        while True:
            yield 1
    finally:
        print("put away", flush=True)
try:
    with paceline.Cluster(1, progress="quiet") as cluster:
        for n, batch in enumerate(cluster.collect(rollouts, batch_size=1)):
            if n == 3:
                print("running", flush=True)
finally:
    print("left", flush=True)
"""
    program = script(tmp_path, text)
    assert program.stdout is not None
    assert program.stdout.readline() == "running\n"
    children = descendants(program.pid)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=10)
    assert out.splitlines() == ["[worker:0] put away", "left"]
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


@every_engine
def test_a_cluster_is_open_until_it_is_closed_and_closing_twice_is_fine(engine: str) -> None:
    cluster = quiet(2, engine)
    try:
        policy = cluster.variable("policy", np.zeros(2))
        assert cluster.resources()["variables"].keys() == {"policy"}
        assert len(cluster.collect(following, policy, batch_size=1).next(timeout=LIMIT)) == 1
        assert re.match(r"^<Cluster of 2 workers, ", repr(cluster))
    finally:
        cluster.close()
        cluster.close()


@every_engine
def test_an_error_in_the_body_comes_out_as_it_is(engine: str) -> None:
    def body() -> None:
        with quiet(1, engine) as cluster:
            policy = cluster.variable("policy", np.zeros(2))
            for _ in cluster.collect(following, policy, batch_size=1):
                raise LookupError("the user's own")

    with pytest.raises(LookupError, match=r"^the user's own$"):
        body()


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (0, r"^the number of workers of job 'worker' is a whole number, 1 or more, not 0$"),
        (-1, r"^the number of workers of job 'worker' is a whole number, 1 or more, not -1$"),
        (True, r"^the number of workers of job 'worker' is a whole number, 1 or more, not True$"),
        (2.0, r"^the number of workers of job 'worker' is a whole number, 1 or more, not 2\.0$"),
        ("4", r"^the number of workers of job 'worker' is a whole number, 1 or more, not '4'$"),
        (
            {"actor": 0},
            r"^the number of workers of job 'actor' is a whole number, 1 or more, not 0$",
        ),
        ({"chief": 1}, r"^the job 'chief' is not one of workers$"),
        ({"ps": 1}, r"^the job 'ps' is not one of workers$"),
        ({}, r"^a cluster has at least one worker$"),
    ],
)
def test_numbers_of_workers_that_cannot_be_are_refused(workers: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        paceline.Cluster(workers)


def test_other_options_that_cannot_be_are_refused_and_nothing_stays_open() -> None:
    with pytest.raises(UnknownName, match=r"^no engine 'treads'; there are \['processes', "):
        quiet(1, "treads")
    loud: Any = "loud"
    with pytest.raises(ValueError, match=r"^progress='loud'; there are 'auto', 'live', 'plain', "):
        paceline.Cluster(1, progress=loud)
    with pytest.raises(ValueError, match=r"expected non-negative integer"):
        quiet(1, seed=-1)


def test_what_will_not_fit_is_said_with_numbers() -> None:
    assert preflight(2, 1, 2, 1000) == []
    assert preflight(3, 1, 2, 1000) == [
        "3 workers with 1 thread each on 2 cores: they will take turns"
    ]
    assert preflight(60, 1, 60, 1000) == [
        "60 workers need about 1024 file descriptors, 1000 are allowed: raise the limit (ulimit -n)"
    ]
    assert preflight(60, 1, 60, 1024) == []


def count(upto: int) -> Iterator[int]:
    yield from range(upto)


@every_engine
def test_functions_get_data_as_well_as_handles(engine: str) -> None:
    with quiet(1, engine) as cluster:
        assert cluster.collect(count, 3, batch_size=3).next().data.tolist() == [0, 1, 2]
