"""Ctrl-C at every line of a call: the session goes on, and nothing is lost or done by half."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hands import cluster, served

import paceline
from paceline import Session
from paceline.pending import _given
from paceline.queues import Queue
from paceline.testing import Serving

PACKAGE = os.path.dirname(paceline.__file__)
LARGE = 100_000
SECRET = b"a secret of sixteen bytes"


def interrupted(line: int, call: Callable[[], Any]) -> bool:
    """Make a call with Ctrl-C at its `line`-th line in the package; whether it came so far."""
    left = line

    def local(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return local

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert left <= 0
        return True
    finally:
        sys.settrace(None)
    return left <= 0


def at_every_line(call: Callable[[], Any], then: Callable[[], Any]) -> None:
    line = 1
    while interrupted(line, call):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert _given.due is None, "it left the time that it was given behind"
        then()
        line += 1
    assert line > 20


@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("name", ["assign", "assign_add", "read", "tags"])
def test_a_variable_is_as_before_or_as_after(server: Serving, name: str, size: int) -> None:
    variable = server.session().variable("v", np.zeros(size))
    calls: dict[str, Callable[[], Any]] = {
        "assign": lambda: variable.assign(np.ones(size)),
        "assign_add": lambda: variable.assign_add(np.ones(size)),
        "read": lambda: variable.read(),
        "tags": lambda: variable.tags(),
    }
    variable.assign(np.zeros(size))

    def check() -> None:
        tree = variable.read().tree
        assert (tree == tree[0]).all()
        assert tree[0] in (0, 1)
        del tree
        variable.assign(np.zeros(size))

    at_every_line(calls[name], check)


def held(queue: Queue[Any]) -> int:
    found = queue.stats()
    assert found["accepted"] == found["delivered"] + found["stored"]
    return int(found["stored"])


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_item_is_enqueued_or_not(server: Serving, size: int) -> None:
    queue = server.session().queue("q", 4)

    def check() -> None:
        for _ in range(held(queue)):
            assert (queue.dequeue(timeout=0) == 1).all()

    at_every_line(lambda: queue.enqueue(np.ones(size)), check)


def test_what_a_run_takes_from_several_servers_is_taken_from_all_or_none(
    tmp_path: Path,
) -> None:
    spec = cluster(tmp_path, "unix", ps=2, worker=1)
    with served(spec, secret=SECRET), Session(spec, secret=SECRET) as session:
        queues = [session.queue("0", 2)]
        with session.device("ps:1"):
            queues.append(session.queue("1", 2))
        for queue in queues:
            queue.enqueue(np.ones(1))

        def check() -> None:
            stored = [held(queue) for queue in queues]
            assert stored in ([1, 1], [0, 0])
            for queue, count in zip(queues, stored, strict=True):
                if not count:
                    queue.enqueue(np.ones(1))

        at_every_line(lambda: session.run([each.dequeueing() for each in queues], timeout=0), check)
        check()


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_item_is_taken_or_can_be_taken_again(server: Serving, size: int) -> None:
    queue = server.session().queue("q", 4)
    queue.enqueue(np.ones(size))

    def check() -> None:
        for _ in range(held(queue)):
            assert (queue.dequeue(timeout=0) == 1).all()
        queue.enqueue(np.ones(size))

    def take() -> None:
        queue.dequeue(timeout=0)

    at_every_line(take, check)
