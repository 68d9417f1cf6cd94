"""What the tests of clusters share: functions to collect from, scripts, a look at processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline

LIMIT = 30.0
"""Seconds for anything that a loaded machine may take its time over."""

every_engine = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
slow_beside = pytest.param("processes", marks=pytest.mark.slow)
"""Processes, where other tests show the same of them in less time."""

beside = pytest.mark.parametrize("engine", ["threads", "processes"])


def quiet(
    workers: Any = 2, engine: str | paceline.Ray = "processes", **options: Any
) -> paceline.Cluster:
    options.setdefault("post_mortem", None)
    return paceline.Cluster(workers, engine=engine, progress="quiet", **options)


def following(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    """Items that say who made them, and with what."""
    while True:
        snapshot = policy.read()
        yield {"version": snapshot.version, "pid": os.getpid(), "index": worker.index}


def gated(gate: str) -> Iterator[Any]:
    """One item, and the next once there is a file of that name."""
    yield 0
    until(lambda: os.path.exists(gate))
    yield from range(1, 100)


def accounted(stats: dict[str, Any]) -> bool:
    """Whether nothing that was accepted is lost."""
    ended = stats["delivered"] + sum(stats["dropped"].values()) + stats["stored"]
    return bool(stats["accepted"] == ended)


def until(condition: Callable[[], Any], within: float = LIMIT) -> Any:
    """Look until it holds; what it then is."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {within} s"
        os.sched_yield()
    return found


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def descendants(pid: int) -> set[int]:
    """The processes that it started, and those that they started."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended meanwhile
            for child in map(int, task.read_text().split()):
                found |= {child} | descendants(child)
    return found


def named(task: str, launcher: int) -> int:
    """The process of a task of that launcher."""
    for child in descendants(launcher):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if task in words and str(launcher) in words:
            return child
    raise AssertionError(f"{task} does not run")


def script(
    folder: Path, text: str, *options: str, words: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start a program of its own, with options of the interpreter and words for itself."""
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, *options, str(path), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(program: subprocess.Popen[str], text: str | None = None) -> str:
    """What a program printed, when it has ended well."""
    out, err = program.communicate(text, timeout=LIMIT)
    assert program.returncode == 0, err
    return out
