"""The Python stacks of a task, seen from outside, whatever it is at."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import until

from paceline.engines._child import STACKS
from paceline.engines.base import Engine, Link, Task, TaskSpec, engine
from paceline.testing.engines import Recorder

SECONDS = 1.0


def computes(link: Link) -> None:
    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            while not link_has(link):
                pass

    link.send("here")
    deeper(3)


def waits(link: Link) -> None:
    link.send("here")
    link.receive()


def sleeps(link: Link) -> None:
    link.send("here")
    began = time.monotonic()
    ctypes.PyDLL(None).sleep(int(SECONDS))  # holds the interpreter lock: no Python code runs
    link.send(time.monotonic() - began)


def link_has(link: Link) -> bool:
    try:
        link.receive(0)
    except Exception:
        return False
    return True


@pytest.fixture(params=["processes", "threads"])
def beside(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(request.param) as made:
        yield made


@pytest.fixture
def processes() -> Iterator[Engine]:
    with engine("processes") as made:
        yield made


def started(engine: Engine, target: object) -> tuple[Task, Recorder]:
    recorder = Recorder()
    task = engine.start(TaskSpec("worker:0", target), recorder)  # type: ignore[arg-type]
    recorder.wait("worker:0", "received")
    return task, recorder


def test_the_stack_of_a_task_that_computes_is_seen_and_it_goes_on(beside: Engine) -> None:
    task, recorder = started(beside, computes)
    lines = until(lambda: _with(task, "deeper")).splitlines()
    assert lines[0].endswith("(most recent call first):")
    assert sum(line.endswith("in deeper") for line in lines) == 4
    # What leads to the user's function is ours, and of no use.
    assert lines[-1].endswith("in computes")
    task.send("end")
    assert recorder.exit("worker:0").status == 0
    assert task.stacks() is None


def test_the_stack_of_a_task_that_waits_is_seen_and_it_waits_on(beside: Engine) -> None:
    task, recorder = started(beside, waits)
    stacks = until(lambda: _with(task, "in receive"))
    assert "in waits" in stacks
    task.send("end")
    assert recorder.exit("worker:0").status == 0


def test_native_code_that_holds_the_interpreter_lock_is_seen_and_not_cut_short(
    processes: Engine,
) -> None:
    task, recorder = started(processes, sleeps)
    assert until(lambda: _with(task, "in sleeps"))
    took = recorder.wait("worker:0", "received", 2)[1]
    assert isinstance(took, float)
    assert took >= SECONDS


def test_a_task_that_gave_the_signal_another_meaning_does_not_die_of_it(processes: Engine) -> None:
    def of_its_own(link: Link) -> None:
        signal.signal(STACKS, signal.SIG_DFL)
        # Not over the link: it may come while that is sending.
        signal.signal(signal.SIGUSR1, lambda number, frame: os.write(1, b"mine\n"))
        waits(link)

    task, recorder = started(processes, of_its_own)
    assert task.stacks() is None
    assert task.pid is not None
    os.kill(task.pid, signal.SIGUSR1)
    assert recorder.wait("worker:0", "stdout") == ["mine"]
    task.send("end")
    assert recorder.exit("worker:0").status == 0


def test_a_task_that_is_stopped_says_so(processes: Engine) -> None:
    task, recorder = started(processes, waits)
    assert task.pid is not None
    os.kill(task.pid, signal.SIGSTOP)
    until(lambda: "State:\tT" in Path(f"/proc/{task.pid}/status").read_text())
    assert str(task.stacks()).startswith("its process is stopped (T (stopped)); SIGCONT lets it")
    os.kill(task.pid, signal.SIGCONT)
    task.send("end")
    assert recorder.exit("worker:0").status == 0


def test_several_may_ask_at_once(processes: Engine) -> None:
    task, _ = started(processes, waits)
    found: list[str | None] = []
    asking = [threading.Thread(target=lambda: found.append(task.stacks())) for _ in range(3)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert [str(each).count("in waits") for each in found] == [1, 1, 1]


def _with(task: Task, words: str) -> str | None:
    found = task.stacks()
    return found if found is not None and words in found else None
