"""Tasks that somebody started by hand, all with one program; this process is one of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar, cast, final

from paceline import functions
from paceline.calling import told
from paceline.collection import Collection, Elsewhere
from paceline.core import messages as m
from paceline.core.account import CALLS, Account
from paceline.core.attendance import Attendance
from paceline.core.clock import checked_timeout
from paceline.core.cluster_state import CHIEFS
from paceline.core.errors import (
    Closed,
    PacelineError,
    Refused,
    SchemaError,
    TimedOut,
    Unsupported,
)  # fmt: skip
from paceline.core.names import quoted
from paceline.core.numbers import worker_seed
from paceline.core.program_state import ANY_LIFE
from paceline.core.spec import Spec, Task
from paceline.core.stats import Place, Stats
from paceline.crew.reporting import leaving
from paceline.packing import copied, memory, pack
from paceline.pending import within
from paceline.plans import Plan
from paceline.post_mortems import Folder
from paceline.reach import Waiting
from paceline.session import Session
from paceline.staff.base import Calls, F, OnChange, Staff, checked_job
from paceline.worker.line import Collect
from paceline.worker.own import Own, once, yielded

T = TypeVar("T")

_log = logging.getLogger("paceline")

_HOSTING = (1, "processes", 3, 1, "", "unix", None)
"""What is said of a cluster's tasks by default."""

_BY_HAND = "by hand only seed, post_mortem and progress can be said (session.save, Supervisor save)"

LOOK = 2.0
"""Seconds after which the chief looks again who is missing."""


@final
class ByHand(Staff):
    """The other tasks were started as this one was: the chief leads, workers run what it began.

    Raises:
        SchemaError: the session has no spec, or its task has no part in such a cluster.
    """

    def __init__(
        self, cluster: Spec | Session, account: Account, *, seed: int, post_mortem: Any
    ) -> None:
        self._folder = None if post_mortem is None else Folder(post_mortem)
        session = cluster if isinstance(cluster, Session) else Session(cluster)
        self.session = session
        try:
            self._tasks = _acting(session)
        except SchemaError:
            session.close()
            raise
        session.lines.conduct.account = account
        self._account = account
        self._seed = seed
        self._reached = 0
        self._life = ANY_LIFE
        self._hands = _Hands(session)
        self._collections: dict[str, tuple[str, Collection[Any]]] = {}
        self._error: BaseException | None = None
        self._task = Task.parse(session.task)
        self.is_chief = self._task.job in CHIEFS
        ended = session.resources()["ended"] if self.is_chief else {}
        self._attendance = Attendance(self._tasks, ended)

    def __repr__(self) -> str:
        return f"tasks started by hand, seen from {self.session.task}"

    def led(self, variable: F) -> F:
        if self.is_chief:
            return variable

        def found(name: str, *value: Any, **options: Any) -> Any:
            options.pop("overwrite", None)
            limit = checked_timeout(options.get("timeout", 60.0))
            there = self._waited(lambda timeout: variable(name, timeout=timeout), limit)
            # One's own value is not taken, but shows whether it is the same program's.
            return variable(name, *value, **options) if value or "value" in options else there

        return cast(F, found)

    def collect(
        self, plan: Plan, number: int, job: str | None, on_change: OnChange
    ) -> Collection[Any]:
        job = self._job(job)
        workers = self._of(job)
        name = plan.name(number)
        what, key = plan.definition(job), self.session.key(name)
        if not self.is_chief:
            work = Collect(key, b"", plan.stamps, plan.ahead(len(workers)), plan.schedule)
            do, folder = partial(yielded, job=work), self._folder
            self._take_part(job, what, leaving(folder, do, plan.fn, plan.resources, items=True))
            return Elsewhere(name)
        turns = workers if plan.schedule == "lockstep" else None
        plan.home(self.session.lines, key).call(plan.opening(key, turns, workers))
        self._end_other(job, key)
        self._hands.works[key] = self._begin(what, key)
        made: Collection[Any] = Collection(self.session.lines, self._hands, key, on_change)
        self._collections[job] = key, made
        on_change(made)
        return made

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
        what = f"run({functions.name_of(fn)}, job={job!r})"
        if self.is_chief:
            return self._lead(job, what)
        do = partial(self._called, what=what)
        self._take_part(job, what, leaving(self._folder, do, fn, resources, items=False))
        return []

    def stats(self) -> Stats:
        members = self._look()
        now = time.monotonic()
        places = []
        for job in self._jobs():
            key = self._collects(job)
            for name in self._of(job):
                starts = 1 + self._attendance.ended.get(name, 0)
                places.append(Place(name, name in members, starts, now, key, key is not None))
        return self.snapshot(self._account, places, {})

    def failing(self, error: BaseException) -> None:
        self._error = error

    def close(self) -> None:
        error = self._error
        if self.is_chief:
            with suppress(PacelineError):
                shared = within(LOOK, self.session.resources)
                self._say(self._attendance.failures(shared["ended"]))
        # A session hears what ended its block, and tells the others.
        self.session.__exit__(None if error is None else type(error), error, None)

    # The chief's part

    def _begin(self, what: str, collection: str = "") -> int:
        self._look(f" as {f'collection {quoted(collection)}' if collection else what} begins")
        request = m.BeginWork(self._reached + 1, what, collection)
        self._life, going = self.session.connection.call(request).content
        self._reached += 1
        for name in going:
            # Those who make items for a chief that died would make them for ever.
            for line in self.session.lines.all:
                line.call(m.EndCollection(name))
        return self._reached

    def _collects(self, job: str) -> str | None:
        """The collection that a job makes items for, if there is one."""
        key, _ = self._collections.get(job, ("", None))
        return key if key in self._hands.works else None

    def _end_other(self, job: str, collection: str) -> None:
        """A worker runs one function at a time: what its job still makes ends with an error."""
        if self._collects(job) is not None:
            key, made = self._collections[job]
            self._hands.take_back(key)
            made.fail(
                Closed(
                    f"collection {quoted(key)} ended when {quoted(collection)} began: both are"
                    f" made by job {job!r}; side by side they need a job each"
                )
            )

    def _lead(self, job: str, what: str) -> list[Any]:
        key = self._collects(job)
        if key is not None:
            raise Refused(
                f"{what}: the workers of job {job!r} collect for {quoted(key)}; close that first,"
                " or give each a job of its own"
            )
        work = self._begin(what)
        try:
            with self._account.spent_on(CALLS):
                return [self._result(work, name) for name in self._of(job)]
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

    def _look(self, when: str = "") -> list[str]:
        """The members; the chief says who has failed since, and who is missing."""
        shared = self.session.resources()
        members: list[str] = shared["members"]
        if self.is_chief:
            self._say(self._attendance.failures(shared["ended"]))
            self._say(self._attendance.missing(members, when))
        return members

    def _say(self, told: list[str]) -> None:
        for each in told:
            _log.warning("%s: %s", self.session.task, each)

    # A worker's part

    def _take_part(self, job: str, what: str, do: Callable[[Own], None]) -> None:
        """Do the next work from its begin to its end by the chief; another job's is passed."""
        self._reached += 1
        if self._task.job != job:
            return
        over, starts = self._waited(lambda limit: self._asked(what, limit), None)
        if over:
            return
        if starts:
            seed = worker_seed(self._seed, self._task, starts - 1)
            own = Own(self.session, seed, lambda: self._is_over(what))
            try:
                do(own)
            finally:
                own.let_go()
        self._asked(what, None, until_over=True)

    def _waited(self, ask: Callable[[float | None], T], limit: float | None) -> T:
        """What `ask` says within that time; when it takes long, it is said what it waits for."""
        task = self.session.task
        return Waiting(f"{task} waits", f"{task} goes on").having(ask, limit)

    def _asked(
        self, what: str, limit: float | None, *, until_over: bool = False
    ) -> tuple[bool, int]:
        """Wait until the chief has begun it: whether it is over, and which start this one is.

        A chief that has left has ended all.
        """
        request = m.TakePart(self._reached, what, self._life, until_over, limit)
        try:
            line = self.session.connection
            self._life, over, starts = line.call(request, timeout=limit).content
        except Closed as e:
            stopped = self.session.stopped()
            if stopped is None:
                raise
            if stopped.failed:
                raise Closed(f"the cluster is done: {stopped.reason}") from e
            return True, 0
        return over, starts

    def _is_over(self, what: str) -> bool:
        """Whether nobody wants that work any more."""
        request = m.TakePart(self._reached, what, self._life, True, 0.0)
        try:
            if not self.session.should_stop():
                self.session.connection.call(request)
        except TimedOut:
            return False
        except PacelineError:
            return True
        return True

    def _called(
        self, own: Own, what: str, fn: Callable[..., Any], resources: tuple[Any, ...]
    ) -> None:
        line, work = self.session.connection, self._reached
        try:
            result = once(own, fn, resources)
        except Exception as e:
            # What it waited for may have ended with the work.
            if isinstance(e, Closed) and self._is_over(what):
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

    # Who is who

    def _jobs(self) -> list[str]:
        jobs = dict.fromkeys(Task.parse(name).job for name in self._tasks)
        return [each for each in jobs if each not in CHIEFS]

    def _job(self, job: str | None) -> str:
        jobs = self._jobs()
        return checked_job(jobs[0] if job is None else job, jobs)

    def _of(self, job: str) -> list[str]:
        return [name for name in self._tasks if Task.parse(name).job == job]


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


def check_by_hand(*said: Any) -> None:
    """Refuse what only tasks that are launched can be told."""
    if said != _HOSTING:
        raise SchemaError(f"{_BY_HAND}, not what launches tasks: {said} are not {_HOSTING}")


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
        raise SchemaError(
            f"{session.task} has no part in the program of {', '.join(names)}; one of them is"
            " Session(spec, job=, index=)"
        )
    return names
