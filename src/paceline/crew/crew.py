"""The workers of a cluster: started, looked after, restarted within a budget."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.budget import WINDOW, Budget
from paceline.core.errors import Closed, Disconnected, PacelineError, WorkerFailed
from paceline.core.numbers import times, worker_seed
from paceline.core.stats import Place
from paceline.crew.calling import Calling
from paceline.crew.collecting import NEEDS_ALL, Collecting
from paceline.crew.recording import Recording
from paceline.crew.reporting import Failure, Reporting
from paceline.crew.seat import Care, Seat
from paceline.engines.base import Engine, Exit, Listener, Stream, Task, TaskSpec, hygiene, show
from paceline.post_mortems import Folder
from paceline.worker.life import run
from paceline.worker.line import Ended, Held, Setup, Started, Warned

_log = logging.getLogger("paceline")


class Crew(Listener, Care):
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
        launch: int = 0,
        post_mortem: Folder | None = None,
    ) -> None:
        self.seats = [
            Seat(job, index, Budget(restarts))
            for job, count in jobs.items()
            for index in range(count)
        ]
        self.calling = Calling(self, list(jobs), kills=engine.kills)
        self.collecting = Collecting(self, self.calling.open)
        self.reporting = Reporting(post_mortem, beside=engine.concurrent)
        self._engine = engine
        self._setup = setup
        self._seed = seed
        self._launch = launch
        self._threads = threads
        self._devices = devices
        self._by_task: dict[Task, Seat] = {}
        self._events: deque[tuple[float, Task, object]] = deque()
        self.lock = threading.RLock()
        self.turn = threading.RLock()
        self.bury: Callable[[str, int], None] | None = None
        """Has servers know of a worker's death where they would wait for it to call again."""
        # The engine's thread only notes and wakes; it never waits for the lock.
        self._wake = threading.Event()
        self._process = os.getpid()
        self._lost_output = False
        self._ended: PacelineError | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start every worker; return without waiting for them."""
        for seat in self.seats:
            self._start(seat)
        if self.concurrent:
            self._thread = threading.Thread(
                target=self._supervise, name="paceline-crew", daemon=True
            )
            self._thread.start()

    def drive(self) -> bool:
        worked = self._engine.drive()
        noted = bool(self._events)
        self._catch_up()
        return worked or noted

    @property
    def concurrent(self) -> bool:
        return self._engine.concurrent

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def count(self, job: str) -> int:
        """How many workers a job has."""
        return sum(seat.job == job for seat in self.seats)

    def alive(self, job: str | None = None) -> int:
        """How many workers are alive."""
        with self.lock:
            return sum(
                seat.task is not None and seat.task.alive
                for seat in self.seats
                if job is None or seat.job == job
            )

    def processes(self) -> dict[str, int]:
        """The processes of the workers that live, where they have some of their own."""
        with self.lock:
            tasks = [(seat.name, seat.task) for seat in self.seats if seat.task is not None]
            return {name: task.pid for name, task in tasks if task.alive and task.pid is not None}

    def places(self) -> list[Place]:
        """What each worker is at, as far as it can be seen from here."""
        with self.lock:
            return [
                Place(
                    name=seat.name,
                    alive=seat.task is not None and seat.task.alive,
                    starts=seat.starts,
                    began=seat.began,
                    collection=None if seat.work is None else seat.work.collection,
                    occupied=not seat.free or self.calling.has(seat),
                )
                for seat in self.seats
            ]

    def server_ended(self, how: str) -> None:
        """Without their server, workers are of no use."""
        self._stand_down(Disconnected(how))

    def close(self) -> None:
        """Restart nobody from now on. The engine ends the workers. Idempotent."""
        self._stand_down(Closed("the cluster is closed"))
        if self._thread is not None and not self.is_here:
            self._thread.join()
        self._end_calls()
        self.reporting.close()
        for seat in self.seats:
            if seat.record is not None:
                seat.record.close()
            if seat.task is not None and not seat.up:
                # It is on its way to a server that is about to end, and has begun nothing.
                seat.task.kill()

    def last_words(self) -> None:
        """Show what workers had to say before their end, when all of them have ended."""
        with self.lock:
            while self._events:
                _, _, event = self._events.popleft()
                if isinstance(event, Warned):
                    self.collecting.warned(event)

    # What those ask for who give the workers work

    def look(self) -> None:
        self._wake.set()

    def check(self, what: str) -> None:
        if os.getpid() != self._process:
            raise Disconnected(
                f"{what}: this cluster belongs to process {self._process}; a forked process"
                " launches one of its own"
            )
        if self._ended is not None:
            raise type(self._ended)(f"{what}: {self._ended}")

    def start(self, seat: Seat) -> None:
        try:
            self._start(seat)
        except PacelineError as e:
            self.fail(seat, WorkerFailed(f"{seat.name} cannot be started: {e}"))

    def replace(self, seat: Seat) -> None:
        seat.expected_end, seat.up = True, False
        if seat.task is not None:
            seat.task.kill()

    def report(self, seat: Seat, how: str, held: Sequence[Held] = ()) -> str:
        asked, work, record = self.calling.of(seat), seat.work, seat.record
        if record is None or (asked is None and (work is None or seat.returned)):
            return ""
        found = record.seen()
        if asked is not None:
            name, variables = asked.function.name, asked.function.variables
            function, given = asked.function.payload, asked.input
            shown = None if given is None else str(asked)
        else:
            assert work is not None
            name, variables = work.name, work.variables
            function, given, shown = work.payload, None, None
        return self.reporting.report(
            Failure(
                seat.name,
                seat.seed,
                how,
                found,
                record.output,
                hygiene(TaskSpec("", run, threads=self._threads, devices=self._devices)),
                name,
                function,
                given,
                shown,
                found.items if asked is None else None,
                variables,
                held,
            )
        )

    def at(self, worker: str) -> str:
        """How far a worker got, and its stacks, as the end of a message."""
        with self.lock:
            seat = next(each for each in self.seats if each.name == worker)
            task, where = seat.task, seat.where(calls=self.calling.has(seat))
        # It may take a moment: not under the lock.
        stacks = None if task is None else task.stacks()
        return where + (f"; it is alive, and at:\n{stacks}" if stacks else "; it is alive")

    def within_budget(self, seat: Seat, error: str) -> bool:
        if seat.budget.allow(time.monotonic()):
            return True
        text = (
            f"{seat.name} failed {times(seat.budget.used + 1)} within {WINDOW:.0f} s, its budget is"
            f" restarts={seat.budget.restarts}; the last time:\n{error}"
        )
        self.fail(seat, WorkerFailed(text))
        self._engine.forget(seat.name)
        return False

    def fail(self, seat: Seat, error: PacelineError) -> None:
        self.collecting.failed(seat, error)
        self.calling.failed(seat, error)

    # What the engine's thread tells

    def received(self, task: Task, message: object, /) -> None:
        self._note(task, message)

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        seat = self._by_task.get(task)
        if seat is not None and seat.record is not None and stream == "stderr":
            seat.record.printed(line)
        try:
            show(task, line, stream)
        except (OSError, ValueError) as e:  # a broken pipe, a full disk; it is closed
            if not self._lost_output:
                self._lost_output = True
                _log.warning("what workers print cannot be shown, and is lost: %s", e)

    def ended(self, task: Task, how: Exit, /) -> None:
        self._note(task, how)

    def _note(self, task: Task, event: object) -> None:
        self._events.append((time.monotonic(), task, event))
        self._wake.set()

    # What is done about it

    def _supervise(self) -> None:
        limit: float | None = None
        while self._ended is None:
            self._wake.wait(limit)
            self._wake.clear()
            try:
                limit = self._catch_up()
            except BaseException as e:
                # Nobody would look after the workers any more: whoever asks next must hear of it.
                _log.exception("the supervision of the workers failed")
                error = WorkerFailed(f"the supervision of the workers failed: {e!r}")
                self.collecting.end(error)
                self._stand_down(error)
        self._end_calls()

    def _stand_down(self, why: PacelineError) -> None:
        self._ended = self._ended or why
        self._wake.set()

    def _end_calls(self) -> None:
        assert self._ended is not None
        with self.lock:
            self.calling.end(self._ended)
        self._settle()

    def _settle(self) -> None:
        """Give futures what they are to have; what users hang on them ends no thread of ours."""
        while True:
            try:
                return self.calling.settle()
            except BaseException:
                if not self.is_here:
                    raise
                _log.exception("a callback of a future failed")

    def _catch_up(self) -> float | None:
        """Handle what was noted and start who is due; seconds until somebody will be."""
        with self.lock:
            while self._events and self._ended is None:
                self._handle(*self._events.popleft())
            now = time.monotonic()
            dues = self.calling.catch_up(now)
            for seat in self.seats:
                if seat.due is not None and seat.due <= now and self._ended is None:
                    self.start(seat)
            dues += [seat.due for seat in self.seats if seat.due is not None]
        self._settle()
        return max(0.0, min(dues) - now) if dues else None

    def _start(self, seat: Seat) -> None:
        seat.due, seat.up, seat.loaded = None, False, {}
        seat.seed = self._seed_of(seat)
        setup = self._setup(seat.job, seat.index, seat.seed)
        if seat.record is not None:
            seat.record.close()
        try:
            seat.record = Recording(shared=setup.alone, near=self._engine.near)
        except OSError as e:
            seat.record = None
            raise WorkerFailed(f"start {seat.name!r}: {e}") from e
        spec = TaskSpec(
            seat.name,
            run,
            threads=self._threads,
            devices=self._devices,
            inherit=seat.record.inherit,
        )
        seat.task = self._engine.start(spec, self)
        self._by_task[seat.task] = seat
        seat.send(replace(setup, box=seat.record.place, keeps=self.reporting.keeps))
        seat.starts, seat.began = seat.starts + 1, time.monotonic()
        if seat.work is not None and not seat.returned:
            seat.send(seat.work)

    def _seed_of(self, seat: Seat) -> int:
        # What is resumed makes no item a second time.
        again = [self._launch] if self._launch else []
        return worker_seed(self._seed, (seat.job, seat.index), seat.starts, *again)

    def _handle(self, now: float, task: Task, event: object) -> None:
        seat = self._by_task[task]
        if isinstance(event, Exit):
            del self._by_task[task]
            self._died(seat, event)
        elif isinstance(event, Ended):
            self.collecting.ended(seat, event)
        elif isinstance(event, Started):
            seat.up = True
        elif isinstance(event, Warned):
            self.collecting.warned(event)
        else:
            self.calling.handle(seat, event, now)

    def _died(self, seat: Seat, how: Exit) -> None:
        # In one thread Ctrl-C is the chief's, and no fault of the function that it ended.
        expected = seat.expected_end or (how.signal == "SIGINT" and not self.concurrent)
        seat.expected_end = False
        seat.task, seat.up, seat.kill_at = None, False, None
        words = how.error or (seat.record.last_words if seat.record is not None else "")
        detail = f"\n{words.rstrip()}" if words else ""
        what = f"{seat.name} {how.told}{seat.where(calls=self.calling.has(seat))}"
        if not expected:
            detail += self.report(seat, f"{what}{detail}")
        if self.bury is not None:
            self.bury(seat.job, seat.index)
        if how.hopeless:
            self.fail(seat, WorkerFailed(f"{what}{detail}"))
        elif self.calling.died(seat, what, detail) or expected:
            seat.due = time.monotonic() + self._back_off(seat)
        elif seat.returned and not self.calling.open(seat.job):
            # It has nothing to do; the next work has it started again.
            return
        elif seat.in_lockstep:
            self.fail(seat, WorkerFailed(f"{what}; {NEEDS_ALL}{detail}"))
        elif self.within_budget(seat, f"{what}{detail}"):
            seat.due = time.monotonic() + self._back_off(seat)
            _log.warning("%s; it is restarted%s", what, detail)

    def _back_off(self, seat: Seat) -> float:
        return seat.budget.back_off if self.concurrent else 0.0
