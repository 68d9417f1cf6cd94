"""Workers and a server that this process starts, looks after, and ends."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast, final

from paceline import blas, functions
from paceline.collection import Collection, end
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.account import CALLS, Account
from paceline.core.budget import Budget
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    TimedOut,
    UnknownName,
)
from paceline.core.names import label
from paceline.core.numbers import times
from paceline.core.stats import Stats
from paceline.crew.calls import Asked, packed, variables
from paceline.crew.collecting import NEEDS_ALL
from paceline.crew.crew import Crew
from paceline.crew.reporting import newest
from paceline.engines.wishes import Ray
from paceline.handles import lasting
from paceline.hosting.base import Wanted, hosting
from paceline.keeping import Keeper
from paceline.plans import Plan
from paceline.post_mortems import Folder
from paceline.revival import Revival
from paceline.session import Session
from paceline.staff.base import Calls, OnChange, Staff, checked_job
from paceline.worker.line import Collect

_log = logging.getLogger("paceline")

Heard = TypeVar("Heard", bound=Callable[..., object])


def _weakly(heard: Heard) -> Heard:
    """The same, held by nobody: what is held in a ring outlives its end until somebody looks."""
    method = weakref.WeakMethod(heard)

    def hear(*what: Any) -> None:
        found = method()
        if found is not None:
            found(*what)

    return cast(Heard, hear)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A collection, and what it was opened with."""

    made: Collection[Any]
    plan: Plan
    key: str
    turns: list[str] | None


@final
class Launched(Staff):
    """Everything is started here: where it lives is the hosting's, the workers are the crew's."""

    _is_up = False

    def __init__(
        self,
        jobs: dict[str, int],
        engine: str | Ray,
        transport: str,
        servers: int,
        account: Account,
        *,
        seed: int,
        restarts: int,
        threads: int,
        devices: str,
        keeper: Keeper | None = None,
        post_mortem: Any = None,
    ) -> None:
        self._account = account
        least, lasts = 0 if keeper is None else keeper.least_epoch, keeper is not None
        self._hosting = hosting(Wanted(engine, transport, servers, least, lasts))
        self._keeper = keeper
        self._opened: list[_Opened] = []
        self._revival: Revival | None = None
        self._starting, self._ended = threading.Lock(), dict[str, tuple[str, bool]]()
        self.concurrent = self._hosting.engine.concurrent
        self._crew = Crew(
            self._hosting.engine,
            self._hosting.setup,
            jobs,
            seed=seed,
            restarts=restarts,
            threads=threads,
            devices=devices,
            launch=0 if keeper is None else keeper.launch,
            post_mortem=None if post_mortem is None else Folder(post_mortem),
        )
        try:
            self._begin(restarts)
        except BaseException:
            self.close()
            raise
        for warning in self._hosting.preflight(sum(jobs.values()), threads):
            _log.warning("%s", warning)

    def _begin(self, restarts: int) -> None:
        names = [seat.name for seat in self._crew.seats]
        self._hosting.start(_weakly(self._server_ended), names)
        if self._keeper is None:
            self._crew.begin()
        self.session = self._begun(restarts)
        self._crew.reporting.fetch = partial(newest, self.session)
        if not self._hosting.engine.near:
            self._crew.bury = self._bury
        if self._keeper is not None:
            # No worker sees what was not restored yet.
            self._revival = self._reviving(restarts)
            self._crew.begin()
        self._started()

    def _begun(self, restarts: int) -> Session:
        """The chief's session, on servers that have what was saved.

        With a checkpoint all of them are started anew when one ends before that.

        Raises:
            Disconnected: one ended; the message says which and how.
        """
        budget = Budget(restarts)
        while True:
            try:
                return self._restored()
            except (Disconnected, Closed, TimedOut) as e:
                found = self._hosting.ended()
                if not found:
                    raise
                (_, how), said = found[0], "it ended while the cluster was launched"
                if self._keeper is None or not self._hosting.lasts:
                    raise Disconnected(f"{how}: {said}") from e
                if not budget.allow(time.monotonic()):
                    raise Disconnected(
                        f"{how}: {said}, as servers did {times(budget.used + 1)}; the budget is"
                        f" restarts={restarts}"
                    ) from e
            _log.warning("%s, while the cluster was launched; all are started again", how)
            time.sleep(budget.back_off)
            self._hosting.anew(self._ended.clear)

    def _restored(self) -> Session:
        session = self._hosting.chief()
        try:
            session.lines.conduct.account = self._account
            if self._keeper is not None:
                self._keeper.restore(session)
            if self._hosting.lasts:
                session.lines.last()
        except BaseException:
            session.close()
            raise
        return session

    def _bury(self, job: str, index: int) -> None:
        """Let servers know that a worker is dead, to whom it may look like a pause."""
        for line in self.session.lines.all:
            with suppress(PacelineError):
                line.tell(m.Dead(job, index))

    def _started(self) -> None:
        """From now on each end of a server is seen to; also of those that have ended."""
        with self._starting:
            self._is_up = True
        for task, (how, hopeless) in self._ended.items():
            self._server_ended(task, how, hopeless)

    def _server_ended(self, task: str, how: str, hopeless: bool) -> None:
        """On the engine's thread, or the server's."""
        with self._starting:
            if not self._is_up:
                self._ended[task] = how, hopeless
                return
        if self._revival is not None and not hopeless:
            self._revival.ended(task, how)
        else:
            self._give_up(f"the server, {task}, {how}")

    def _give_up(self, why: str) -> None:
        """Nobody can go on without one of the servers."""
        error = Disconnected(why)
        self._hosting.give_up()
        self._crew.server_ended(why)
        if hasattr(self, "session"):
            self.session.lines.end(error)
            for line in self.session.lines.all:
                # That of the server itself breaks by itself, and knows more.
                if line.alive():
                    line.fail(error)

    def _reviving(self, restarts: int) -> Revival | None:
        if not self._hosting.lasts:
            return None
        start, restore = self._hosting.again, _weakly(self._bring_back)
        return Revival(start, restore, _weakly(self._give_up), restarts)

    def _bring_back(self) -> None:
        """Have servers that were started again go on where the newest checkpoint was."""
        assert self._keeper is not None
        opened = [each for each in self._opened if not each.made.closed]
        with self._hosting.restorer() as session:
            session.lines.know(self.session.lines)
            self._keeper.restore_lost(session)
            for each in opened:
                self._open_again(each, session)
            for line in session.lines.all:
                line.call(m.Restored())
            for each in opened:
                if each.made.closed:
                    # It could not say so to a server that was away.
                    end(session.lines, each.key)

    def _open_again(self, each: _Opened, session: Session) -> None:
        what = f"collection '{each.made.name}' was lost with its server"
        try:
            line = each.plan.home(session.lines, each.key)
            if label(each.key) in line.call(m.Resources()).content["collections"]:
                return
            if each.turns is not None:
                each.made.fail(Disconnected(f"{what}; {NEEDS_ALL}"))
                return
            line.call(each.plan.opening(each.key, None))
        except (UnknownName, TimedOut) as e:
            # The variable of its stamps was made after the last checkpoint.
            each.made.fail(Disconnected(f"{what}: {e}"))

    def __repr__(self) -> str:
        return f"{self._crew.alive()} workers, {self._hosting.engine}"

    def collect(
        self, plan: Plan, number: int, job: str | None, on_change: OnChange
    ) -> Collection[Any]:
        job = self._job(job)
        turns = self._turns(plan, job)
        payload = plan.payload()
        name = self._open(plan, number, turns)
        made: Collection[Any] = Collection(
            self.session.lines, self._crew.collecting, name, on_change
        )
        on_change(made)
        self._opened = [each for each in self._opened if not each.made.closed]
        self._opened.append(_Opened(made, plan, name, turns))
        ahead = plan.ahead(self._crew.count(job))
        work = Collect(
            name,
            payload,
            plan.stamps,
            ahead,
            plan.schedule,
            functions.name_of(plan.fn),
            variables(plan.resources),
        )
        try:
            self._crew.collecting.give(job, work, made.fail, made.drain)
        except PacelineError:
            made.close()
            raise
        return made

    @lasting
    def _open(self, plan: Plan, number: int, turns: list[str] | None) -> str:
        name = self.session.key(plan.name(number))
        plan.home(self.session.lines, name).call(plan.opening(name, turns))
        return name

    def _asks(self) -> list[Connection]:
        return self.session.lines.all

    def _move(self, timeout: float | None) -> bool:
        """Wait for servers that are started again."""
        return self.session.lines.recover(timeout)

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
        job = self._job(job)
        function, sent = packed(fn, resources), [functions.dump(each) for each in inputs]
        asked = self._crew.calling.call(
            job, function, sent, timeout=timeout, retries=retries, all_of_them=all_of_them
        )
        return _Calls(self, job, asked, all_of_them)

    def run(self, fn: Callable[..., Any], resources: tuple[Any, ...], job: str | None) -> list[Any]:
        job = self._job(job)
        inputs = [None] * self._crew.count(job)
        asked = self._crew.calling.call(
            job, packed(fn, resources), inputs, retries=None, pinned=True
        )
        return self.results(job, asked)

    def results(self, job: str, asked: list[Asked], all_of_them: bool = False) -> list[Any]:
        """What calls return, once they have."""
        with self._account.spent_on(CALLS):
            return self._crew.calling.results(job, asked, all_of_them=all_of_them)

    def stats(self) -> Stats:
        found = self.snapshot(self._account, self._crew.places(), self._crew.calling.stats())
        counts = {} if self._revival is None else dict(self._revival.counts)
        return replace(found, restarted=MappingProxyType(counts))

    def processes(self) -> dict[str, int]:
        return {**self._hosting.processes(), **self._crew.processes()}

    def close(self) -> None:
        # Interrupted in one step, it still takes the next ones.
        with self._crew.turn, ExitStack() as steps:
            if self._revival is not None:
                self._revival.stop()
                # What it waits for ends with the servers.
                steps.callback(self._revival.close)
            # They hold this cluster, as its own list does.
            steps.callback(self._opened.clear)
            steps.callback(self._crew.last_words)
            steps.callback(self._hosting.close)
            if hasattr(self, "session"):
                steps.callback(self.session.close)
            steps.callback(self._crew.close)

    def at(self, worker: str) -> str:
        return self._crew.at(worker)

    def _turns(self, plan: Plan, job: str) -> list[str] | None:
        """The workers in the order of their turns, where they take turns."""
        if plan.schedule == "lag":
            return None
        warning = blas.several("the chief", blas.threads())
        if warning is not None:
            _log.warning("%s", warning)
        return [seat.name for seat in self._crew.of(job)]

    def _job(self, job: str | None) -> str:
        """A job that there is; by default the first that does not collect, if there is one."""
        jobs = list(dict.fromkeys(seat.job for seat in self._crew.seats))
        if job is None:
            idle = (name for name in jobs if all(seat.free for seat in self._crew.of(name)))
            job = next(idle, jobs[0])
        return checked_job(job, jobs)


@final
class _Calls(Calls):
    def __init__(self, staff: Launched, job: str, asked: list[Asked], all_of_them: bool) -> None:
        self._staff = staff
        self._job = job
        self._asked = asked
        self._all_of_them = all_of_them

    @property
    def futures(self) -> list[Future[Any]]:
        return [each.future for each in self._asked]

    def results(self) -> list[Any]:
        return self._staff.results(self._job, self._asked, self._all_of_them)
