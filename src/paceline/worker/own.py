"""A worker's part in works where nobody launched it: its own program has the functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.calling import keywords
from paceline.core import messages as m
from paceline.core.account import BUSY
from paceline.core.black_box import SIZE, Seen, seen
from paceline.core.errors import Closed, PacelineError, TimedOut, WasReset
from paceline.core.spec import Task
from paceline.engines.base import Link
from paceline.session import Session
from paceline.worker.collector import Collector, entered, goes_on, let_go
from paceline.worker.handle import Worker
from paceline.worker.line import Collect, Setup

LOOK = 0.1
"""Seconds between the questions whether the work is over."""


class Own(Worker):
    """What a function learns of the worker that it runs in, in one work; `is_over` says when."""

    def __init__(self, session: Session, seed: int, is_over: Callable[[], bool]) -> None:
        task = Task.parse(session.task)
        # Nobody but this process reads it, once the function has failed.
        self._noted = bytearray(SIZE)
        setup = Setup(None, b"", task.job, task.number, seed, box=self._noted)
        super().__init__(setup, session, _Nobody(is_over))

    def seen(self) -> Seen:
        """What it has noted."""
        return seen(bytes(self._noted))

    def let_go(self) -> None:
        """Be free again: what this session waits for has no more to do with the work."""
        let_go(self.session)
        self.turn_to(BUSY)


class _Nobody(Link):
    """In place of a launcher's line: it says nothing, and hangs up when the work is over."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._looked = -LOOK

    def send(self, message: object) -> None:
        """Nobody hears it."""

    def receive(self, timeout: float | None = None) -> object:
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._looked = now
            if self._is_over():
                raise EOFError
        raise TimedOut("nobody launched this worker")


def yielded(worker: Own, job: Collect, fn: Any, resources: tuple[Any, ...]) -> None:
    """Run a generator function and offer what it yields, until it or the collection has ended.

    Raises:
        Exception: the function's own.
    """
    worker.begin(job.collection)
    line = worker.session.lines.home("collection", job.collection, make=False)
    collector: Collector | None = None
    try:
        entered(worker.session, job.collection)
        collector = Collector(worker, job, line, fn, resources, waits=True)
        for _ in collector.steps():
            pass
    except Closed as e:
        # The collection has ended; a queue of the user's that was closed ends the function too.
        if isinstance(e, WasReset) and goes_on(line, job.collection):
            raise
    except Exception as e:
        if collector is not None:
            e.add_note(f"({collector.where()})")
        raise
    with suppress(PacelineError):
        # No more items of this worker.
        line.call(m.Drain(job.collection))


def once(worker: Own, fn: Callable[..., Any], resources: tuple[Any, ...]) -> Any:
    """What the function returns."""
    worker.begin(0)
    return fn(*resources, **keywords(fn, worker))
