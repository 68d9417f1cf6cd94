"""The workers of a cluster: started, given their work, restarted within a budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from paceline.core.errors import Closed, PacelineError, WorkerFailed
from paceline.engines.base import Engine, Exit, Listener, Stream, Task, TaskSpec, show
from paceline.worker.life import run
from paceline.worker.line import Collect, Ended, Setup, Started, StopJob

_log = logging.getLogger("paceline")

WINDOW = 60.0
"""Seconds in which a worker may be restarted `restarts` times."""

BACK_OFF = 0.1
MOST_BACK_OFF = 5.0


@dataclass(slots=True, eq=False)
class Seat:
    """A worker's place: its task stays the same when its process is another one."""

    job: str
    index: int
    task: Task | None = None
    work: Collect | None = None
    starts: int = 0
    up: bool = False
    restarted_at: deque[float] = field(default_factory=deque)
    failed_at_once: int = 0
    due: float | None = None
    expected_end: bool = False
    returned: bool = False

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.job}:{self.index}"


class Crew(Listener):
    """Supervises the workers of one cluster.

    What happens is noted by the engine's thread and handled by the crew's own, or, where everything
    runs in one thread, whenever the trainer waits.
    """

    def __init__(
        self,
        engine: Engine,
        setup: Callable[[str, int, int], Setup],
        jobs: dict[str, int],
        *,
        seed: int,
        restarts: int,
        threads: int,
        devices: str,
    ) -> None:
        self.seats = [Seat(job, index) for job, count in jobs.items() for index in range(count)]
        self._engine = engine
        self._setup = setup
        self._seed = seed
        self._restarts = restarts
        self._threads = threads
        self._devices = devices
        self._by_task: dict[Task, Seat] = {}
        self._events: deque[tuple[Task, object]] = deque()
        self._lock = threading.RLock()
        # The engine's thread only notes and wakes; it never waits for the lock.
        self._wake = threading.Event()
        self._closing = False
        self._on_fail: dict[str, Callable[[PacelineError], None]] = {}
        self._on_returned: dict[str, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start every worker; return without waiting for them."""
        for seat in self.seats:
            self._start(seat)
        if self._engine.concurrent:
            self._thread = threading.Thread(
                target=self._supervise, name="paceline-crew", daemon=True
            )
            self._thread.start()

    def give(
        self,
        job: str,
        work: Collect,
        on_fail: Callable[[PacelineError], None],
        on_returned: Callable[[], None],
    ) -> None:
        """Have every worker of `job` run `work`, restarted workers included.

        `on_fail` hears of a worker that cannot run; `on_returned`, that all have returned.
        """
        with self._lock:
            self._end_others(job, work.collection)
            self._on_fail[work.collection] = on_fail
            self._on_returned[work.collection] = on_returned
            for seat in self.seats:
                if seat.job == job:
                    seat.work, seat.returned, seat.failed_at_once = work, False, 0
                    if seat.task is None and seat.due is None:
                        self._start(seat)
                    else:
                        self._send(seat, work)

    def _end_others(self, job: str, collection: str) -> None:
        """A worker runs one function at a time: what its job still runs ends with an error."""
        busy = [seat for seat in self.seats if seat.job == job and not seat.returned]
        for other in {seat.work.collection for seat in busy if seat.work is not None}:
            for seat in busy:
                self._send(seat, StopJob(other))
            self._on_fail[other](
                Closed(
                    f"collection '{other}' ended when '{collection}' began: both are made by job"
                    f" {job!r}; side by side they need a job each, as in"
                    " workers={'actor': 8, 'eval': 1}"
                )
            )

    def take_back(self, collection: str) -> None:
        """The work of that collection is over."""
        with self._lock:
            self._on_fail.pop(collection, None)
            self._on_returned.pop(collection, None)
            for seat in self.seats:
                if seat.work is not None and seat.work.collection == collection:
                    seat.work = None
                    self._send(seat, StopJob(collection))

    def drive(self) -> bool:
        """Where workers share the caller's thread: let each go on a step; whether any did."""
        worked = self._engine.drive()
        noted = bool(self._events)
        self._catch_up()
        return worked or noted

    @property
    def concurrent(self) -> bool:
        """Whether workers run beside the caller."""
        return self._engine.concurrent

    def count(self, job: str) -> int:
        """How many workers a job has."""
        return sum(seat.job == job for seat in self.seats)

    def alive(self, job: str | None = None) -> int:
        """How many workers are alive."""
        with self._lock:
            return sum(
                seat.task is not None and seat.task.alive
                for seat in self.seats
                if job is None or seat.job == job
            )

    def stand_down(self) -> None:
        """Restart nobody from now on."""
        self._closing = True
        self._wake.set()

    def close(self) -> None:
        """Stand down. The engine ends the workers. Idempotent."""
        self.stand_down()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for seat in self.seats:
            if seat.task is not None and not seat.up:
                # It is on its way to a server that is about to end, and has begun nothing.
                seat.task.kill()

    # What the engine's thread tells

    def received(self, task: Task, message: object, /) -> None:
        self._note(task, message)

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        show(task, line, stream)

    def ended(self, task: Task, how: Exit, /) -> None:
        self._note(task, how)

    def _note(self, task: Task, event: object) -> None:
        self._events.append((task, event))
        self._wake.set()

    # What is done about it

    def _supervise(self) -> None:
        limit: float | None = None
        while not self._closing:
            self._wake.wait(limit)
            self._wake.clear()
            try:
                limit = self._catch_up()
            except Exception as e:
                # Nobody would look after the workers any more: whoever asks next must hear of it.
                _log.exception("the supervision of the workers failed")
                for on_fail in list(self._on_fail.values()):
                    on_fail(WorkerFailed(f"the supervision of the workers failed: {e!r}"))
                return

    def _catch_up(self) -> float | None:
        """Handle what was noted and start who is due; seconds until somebody will be."""
        with self._lock:
            while self._events and not self._closing:
                self._handle(*self._events.popleft())
            now = time.monotonic()
            for seat in self.seats:
                if seat.due is not None and seat.due <= now and not self._closing:
                    self._restart(seat)
            dues = [seat.due for seat in self.seats if seat.due is not None]
        return max(0.0, min(dues) - now) if dues else None

    def _restart(self, seat: Seat) -> None:
        try:
            self._start(seat)
        except PacelineError as e:
            self._fail(seat, f"{seat.name} cannot be started again: {e}")

    def _start(self, seat: Seat) -> None:
        seat.due, seat.up = None, False
        spec = TaskSpec(seat.name, run, threads=self._threads, devices=self._devices)
        seat.task = self._engine.start(spec, self)
        self._by_task[seat.task] = seat
        self._send(seat, self._setup(seat.job, seat.index, self._seed_of(seat)))
        seat.starts += 1
        if seat.work is not None and not seat.returned:
            self._send(seat, seat.work)

    def _seed_of(self, seat: Seat) -> int:
        job = int.from_bytes(seat.job.encode(), "little")
        words = np.random.SeedSequence([self._seed, job, seat.index, seat.starts])
        return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _send(self, seat: Seat, message: object) -> None:
        # A task that has just ended is restarted, and then gets its work.
        with suppress(Closed):
            if seat.task is not None:
                seat.task.send(message)

    def _handle(self, task: Task, event: object) -> None:
        seat = self._by_task[task]
        if isinstance(event, Exit):
            del self._by_task[task]
            self._died(seat, event)
        elif isinstance(event, Ended) and seat.work is not None:
            if event.collection == seat.work.collection:
                self._function_ended(seat, event)
        elif isinstance(event, Started):
            seat.up = True

    def _function_ended(self, seat: Seat, event: Ended) -> None:
        if event.error is None:
            self._returned(seat, event.collection)
            return
        seat.failed_at_once = seat.failed_at_once + 1 if event.items == 0 else 0
        if event.hopeless or seat.failed_at_once == 2:
            self._fail(seat, f"{seat.name} cannot run:\n{event.error}")
            return
        if self._within_budget(seat, event.error):
            _log.warning("%s failed, its function is started again:\n%s", seat.name, event.error)
            # A fresh process: nobody knows what the error left behind in this one.
            seat.expected_end = True
            if seat.task is not None:
                seat.task.kill()

    def _died(self, seat: Seat, how: Exit) -> None:
        seat.task = None
        if seat.expected_end:
            seat.expected_end = False
            seat.due = time.monotonic() + self._back_off(seat)
            return
        detail = f"\n{how.error.rstrip()}" if how.error else ""
        what = f"{seat.name} {how.told}"
        if seat.returned:
            # It has nothing to do; the next work has it started again.
            return
        if self._within_budget(seat, f"{what}{detail}"):
            seat.due = time.monotonic() + self._back_off(seat)
            _log.warning("%s; it is restarted%s", what, detail)

    def _within_budget(self, seat: Seat, error: str) -> bool:
        now = time.monotonic()
        while seat.restarted_at and now - seat.restarted_at[0] > WINDOW:
            seat.restarted_at.popleft()
        if len(seat.restarted_at) >= self._restarts:
            self._fail(
                seat,
                f"{seat.name} failed {len(seat.restarted_at) + 1} times within {WINDOW:.0f} s, its"
                f" budget is restarts={self._restarts}; the last time:\n{error}",
            )
            return False
        seat.restarted_at.append(now)
        return True

    def _back_off(self, seat: Seat) -> float:
        if not self._engine.concurrent:
            return 0.0
        return min(MOST_BACK_OFF, BACK_OFF * 2.0 ** (len(seat.restarted_at) - 1))

    def _fail(self, seat: Seat, text: str) -> None:
        error = WorkerFailed(text)
        if seat.work is None:
            _log.error("%s", text)
        elif seat.work.collection in self._on_fail:
            self._on_fail[seat.work.collection](error)

    def _returned(self, seat: Seat, collection: str) -> None:
        seat.returned = True
        mine = [s for s in self.seats if s.work is not None and s.work.collection == collection]
        if all(s.returned for s in mine) and collection in self._on_returned:
            self._on_returned[collection]()
