"""Tasks that somebody started by hand, all with one program; this process is one of them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, cast, final

import numpy as np

from paceline import functions
from paceline.batches import Batch
from paceline.calling import told
from paceline.collection import Collection, Tally
from paceline.core import messages as m
from paceline.core.account import CALLS, Account
from paceline.core.clock import checked_timeout
from paceline.core.cluster_state import CHIEFS
from paceline.core.errors import (
    Closed,
    PacelineError,
    SchemaError,
    TimedOut,
    Unsupported,
)  # fmt: skip
from paceline.core.program_state import ANY_LIFE
from paceline.core.spec import Task
from paceline.core.stats import Place, Stats
from paceline.packing import copied, memory, pack
from paceline.plans import Plan
from paceline.session import Session
from paceline.staff.base import Calls, F, OnChange, Staff
from paceline.worker.line import Collect
from paceline.worker.own import Own, once, yielded

_log = logging.getLogger("paceline")

LOOK = 2.0
"""Seconds after which the chief looks again who is missing."""


@final
class ByHand(Staff):
    """The other tasks were started as this one was: the chief leads, workers run what it began.

    Raises:
        SchemaError: the session has no spec, or its task has no part in such a cluster.
    """

    def __init__(self, session: Session, account: Account, *, seed: int) -> None:
        self.session = session
        try:
            self._tasks = _acting(session)
        except SchemaError:
            session.close()
            raise
        session.lines.conduct.account = account
        self._account = account
        self._seed = seed
        self._numbers = itertools.count(1)
        self._life = ANY_LIFE
        self._hands = _Hands(session)
        self._missing: list[str] = []
        self._error: BaseException | None = None
        self._task = Task.parse(session.task)
        self.is_chief = self._task.job in CHIEFS

    def __repr__(self) -> str:
        return f"tasks started by hand, seen from {self.session.task}"

    def led(self, variable: F) -> F:
        if self.is_chief:
            return variable

        def found(name: str, *value: Any, **options: Any) -> Any:
            options.pop("overwrite", None)
            there = variable(name, timeout=options.get("timeout", 60.0))
            # One's own value is not taken, but shows whether it is the same program's.
            return variable(name, *value, **options) if value or "value" in options else there

        return cast(F, found)

    def collect(
        self, plan: Plan, number: int, job: str | None, on_change: OnChange
    ) -> Collection[Any]:
        job = self._job(job)
        workers = self._of(job)
        name, work = plan.name(number), next(self._numbers)
        what = f"collect({functions.name_of(plan.fn)}, job={job!r}, schedule={plan.schedule!r})"
        key = self.session.key(name)
        if self.is_chief:
            turns = workers if plan.schedule == "lockstep" else None
            plan.home(self.session.lines, key).call(plan.opening(key, turns, workers))
            self._begin(work, what, key)
            self._hands.works[key] = work
            made: Collection[Any] = Collection(self.session.lines, self._hands, key, on_change)
            on_change(made)
            return made
        if self._task.job == job:
            job_of = Collect(key, b"", plan.stamps, plan.ahead(len(workers)), plan.schedule)
            self._take_part(work, what, lambda own: yielded(own, job_of, plan.fn, plan.resources))
        return _Elsewhere(name)

    def call(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[Any],
        resources: tuple[Any, ...],
        job: str | None,
        *,
        timeout: float | None,
        retries: int,
        all_of_them: bool = False,
    ) -> Calls:
        raise Unsupported(
            "map and submit send functions, and between tasks that were started by hand no code"
            " travels: give the inputs through a queue or a reader to a function that all workers"
            " `run`, or call an operation (Server.operation)"
        )

    def run(self, fn: Callable[..., Any], resources: tuple[Any, ...], job: str | None) -> list[Any]:
        job = self._job(job)
        work = next(self._numbers)
        what = f"run({functions.name_of(fn)}, job={job!r})"
        if self.is_chief:
            return self._lead(work, what, self._of(job))
        if self._task.job == job:
            self._take_part(work, what, lambda own: self._called(own, work, fn, resources))
        return []

    def stats(self) -> Stats:
        members = self.session.resources()["members"]
        self._say_who_is_missing(members)
        now = time.monotonic()
        going = next(reversed(self._hands.works), None)
        workers = [Task.parse(name) for name in self._tasks]
        places = [
            Place(str(task), str(task) in members, 1, now, going, going is not None)
            for task in workers
            if task.job not in CHIEFS
        ]
        return self.snapshot(self._account, places, {})

    def failing(self, error: BaseException) -> None:
        self._error = error

    def close(self) -> None:
        error = self._error
        # A session hears what ended its block, and tells the others.
        self.session.__exit__(None if error is None else type(error), error, None)

    # The chief's part

    def _begin(self, work: int, what: str, collection: str = "") -> None:
        self._look()
        request = m.BeginWork(work, what, collection)
        self._life, left = self.session.connection.call(request).content
        for name in left:
            # Those who make items for a chief that died would make them for ever.
            for line in self.session.lines.all:
                line.call(m.EndCollection(name))

    def _lead(self, work: int, what: str, workers: list[str]) -> list[Any]:
        self._begin(work, what)
        try:
            with self._account.spent_on(CALLS):
                return [self._result(work, name) for name in workers]
        finally:
            self._hands.end(work)

    def _result(self, work: int, task: str) -> Any:
        line = self.session.connection
        while True:
            try:
                found, buffers = line.exchange(m.TakeResult(work, task, LOOK), timeout=LOOK)
            except TimedOut:
                self._look()
                continue
            result = copied(found.layout, found.values, memory(buffers)) if found.layout else None
            del buffers
            line.give_back()
            return result

    def _look(self) -> None:
        self._say_who_is_missing(self.session.resources()["members"])

    def _say_who_is_missing(self, members: list[str]) -> None:
        missing = [name for name in self._tasks if name not in members]
        if not self.is_chief or missing == self._missing:
            return
        self._missing = missing
        if missing:
            _log.warning("%s: missing: %s", self.session.task, ", ".join(missing))
        else:
            _log.warning("%s: everybody is here", self.session.task)

    # A worker's part

    def _take_part(self, work: int, what: str, do: Callable[[Own], None]) -> None:
        """Do a work once the chief has begun it, and wait until it has ended it."""
        over, time_of = self._asked(work, what)
        if over:
            return
        if time_of:
            own = Own(self.session, self._seed_of(time_of), lambda: self._is_over(work, what))
            try:
                do(own)
            finally:
                own.let_go()
        with suppress(_Ended):
            self._asked(work, what, until_over=True)

    def _asked(self, work: int, what: str, *, until_over: bool = False) -> tuple[bool, int]:
        request = m.TakePart(work, what, self._life, until_over, None)
        try:
            line = self.session.connection
            self._life, over, time_of = line.call(request, timeout=None).content
        except Closed as e:
            self._stopped(e, ends=until_over)
        return over, time_of

    def _is_over(self, work: int, what: str) -> bool:
        """Whether nobody wants that work any more."""
        try:
            if not self.session.should_stop():
                self.session.connection.call(m.TakePart(work, what, self._life, True, 0.0))
        except TimedOut:
            return False
        except PacelineError:
            return True
        return True

    def _stopped(self, error: Closed, *, ends: bool) -> NoReturn:
        """The chief has left: that ends a work, or is an error, as it is when the chief failed."""
        stopped = self.session.stopped()
        if stopped is None:
            raise error
        if ends and not stopped.failed:
            raise _Ended from None
        raise Closed(f"the cluster is done: {stopped.reason}") from error

    def _called(
        self, own: Own, work: int, fn: Callable[..., Any], resources: tuple[Any, ...]
    ) -> None:
        line = self.session.connection
        try:
            result = once(own, fn, resources)
        except Exception as e:
            # What it waited for may have ended with the work.
            if isinstance(e, Closed) and own.should_stop():
                return
            with suppress(PacelineError):
                line.call(m.EndPart(work, self._life, told(e), None))
            raise
        try:
            head, block = pack(line.arena, result, f"what {functions.name_of(fn)} returned")
        except SchemaError:
            line.call(m.EndPart(work, self._life, "", None))
            return
        line.call(m.EndPart(work, self._life, "", head), [block])

    def _seed_of(self, time_of: int) -> int:
        job = int.from_bytes(self._task.job.encode(), "little")
        words = np.random.SeedSequence([self._seed, job, self._task.number, time_of])
        return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))

    # Who is who

    def _job(self, job: str | None) -> str:
        jobs = list(dict.fromkeys(Task.parse(name).job for name in self._tasks))
        jobs = [each for each in jobs if each not in CHIEFS]
        if job is None:
            return jobs[0]
        if job not in jobs:
            raise SchemaError(f"no workers of job {job!r}; there are {jobs}")
        return job

    def _of(self, job: str) -> list[str]:
        return [name for name in self._tasks if Task.parse(name).job == job]


class _Ended(Exception):
    """The chief has left, and with it a work has ended."""


class _Hands:
    """What a collection asks of a crew, where nobody can be told anything but over the server."""

    concurrent = True

    def __init__(self, session: Session) -> None:
        self.turn = threading.RLock()
        self.works: dict[str, int] = {}
        self._session = session

    def end(self, work: int) -> None:
        """A work has ended."""
        with suppress(PacelineError):  # the workers hear of a lost server by themselves
            self._session.connection.call(m.EndWork(work))

    def give(self, *work: object) -> NoReturn:
        """Workers take their work by themselves."""
        raise Unsupported("nobody can be given work")

    def take_back(self, collection: str) -> None:
        """A work has ended; those who make items hear of it from their collection."""
        work = self.works.pop(collection, None)
        if work is not None:
            self.end(work)

    def drive(self) -> bool:
        """Nobody waits for this thread."""
        return False


class _Elsewhere(Collection[Any]):
    """A collection as those see it who are not its trainer: at its end, and with no batches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tally = Tally()
        self._error = None
        self._closed = True

    def __iter__(self) -> Iterator[Batch[Any]]:
        return iter(())

    def next(self, *, timeout: float | None = 60.0) -> Batch[Any]:
        checked_timeout(timeout)
        raise Closed(f"collection '{self.name}' is over, and its batches went to the chief")

    def stats(self) -> dict[str, Any]:
        raise Closed(f"collection '{self.name}' is over; the chief has its counters")


def _acting(session: Session) -> list[str]:
    """The chief and the workers of a session's cluster.

    Raises:
        SchemaError: there is no such cluster, or the session's task is none of them.
    """
    spec = session.spec
    if spec is None:
        raise SchemaError(
            "a cluster by hand needs to know all tasks: open the session on a ClusterSpec, not on"
            f" {session.connection.address}"
        )
    servers = spec.servers()
    tasks = [task for task in spec.tasks() if task not in servers]
    chiefs = [task for task in tasks if task.job in CHIEFS]
    if len(chiefs) != 1 or len(tasks) < 2:
        raise SchemaError(
            f"a cluster by hand has one chief (a task of the job {' or '.join(CHIEFS)}) and"
            f" workers; here are {', '.join(map(str, tasks)) or 'servers only'}"
        )
    names = [str(task) for task in tasks]
    if session.task not in names:
        raise SchemaError(f"{session.task} has no part in the program of {', '.join(names)}")
    return names
