"""The threads that operations run on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]
Work: TypeAlias = Callable[[], None]
Finish: TypeAlias = Callable[[Exception | None], None]


class Lanes:
    """Threads by the name of their lane, started when they are first needed.

    Jobs raise nothing. A lane with one thread runs all its jobs on the same.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, SimpleQueue[Job | None]] = {}
        self._threads: dict[str, list[threading.Thread]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def run(self, lane: str, threads: int, job: Job) -> None:
        """Run a job on one of a lane's `threads`, of which one must have nothing to do."""
        with self._lock:
            if self._closed:
                return
            jobs = self._jobs.setdefault(lane, SimpleQueue())
            started = self._threads.setdefault(lane, [])
            jobs.put(job)
            if len(started) < threads and jobs.qsize():
                name = f"paceline-operation-{lane or 'all'}"
                thread = threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
                started.append(thread)
                thread.start()

    def close(self, limit: float) -> list[str]:
        """End the threads as their jobs end, and wait that many seconds for it; whose have not."""
        with self._lock:
            self._closed = True
            for lane, threads in self._threads.items():
                for _ in threads:
                    self._jobs[lane].put(None)
        deadline = time.monotonic() + limit
        late = []
        for lane, threads in self._threads.items():
            for thread in threads:
                if thread is threading.current_thread():
                    # An operation ends its own server.
                    continue
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    late.append(lane)
        return late


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def here(lane: str, threads: int, work: Work, finish: Callable[[], None]) -> None:
    """Do the work of a lane without threads: here and now."""
    try:
        work()
    finally:
        finish()


def at_once(work: Work, finish: Finish) -> None:
    """Do work here and now."""
    error: Exception | None = None
    try:
        work()
    except Exception as e:
        error = e
    finish(error)
