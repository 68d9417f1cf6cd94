"""Workers that are called: one input at a time, whoever is free."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.core.errors import Closed, Disconnected, PacelineError, Refused, WouldBlock
from paceline.core.names import quoted
from paceline.core.stats import CallStats
from paceline.crew.calls import Asked, Calls, Function
from paceline.crew.seat import Care, Seat
from paceline.worker.line import FILES, Answer, Began, StopJob

_log = logging.getLogger("paceline")

GRACE = 2.0
"""Seconds that a function has to end when nobody waits for what it returns."""


FUNCTIONS = 256
"""Of which it is known how many files there are about calls that raised."""


class Calling:
    """Hands calls to workers, and their answers to futures."""

    def __init__(self, care: Care, jobs: Sequence[str], *, kills: bool) -> None:
        self._care = care
        self._kills = kills
        self._files: dict[bytes, int] = {}
        self._calls = {job: Calls(job) for job in jobs}

    def open(self, job: str) -> int:
        """How many calls of a job wait or run."""
        return self._calls[job].open

    def has(self, seat: Seat) -> bool:
        """Whether a worker runs a call."""
        return self._calls[seat.job].has(seat.index)

    def of(self, seat: Seat) -> Asked | None:
        """What a worker runs."""
        return self._calls[seat.job].of(seat.index)

    def stats(self) -> dict[str, CallStats]:
        """How the calls of each job are."""
        with self._care.lock:
            return {job: calls.stats() for job, calls in self._calls.items()}

    def call(
        self,
        job: str,
        function: Function,
        inputs: Sequence[bytes | None],
        *,
        timeout: float | None = None,
        retries: int | None = 0,
        pinned: bool = False,
        all_of_them: bool = False,
    ) -> list[Asked]:
        """Have `function` called with each input, by whichever worker of `job` is free.

        `pinned`: the first by the first worker, the second by the second, and so on.

        Raises:
            Refused: the workers of that job collect.
            Closed, Disconnected: the cluster has ended.
        """
        self._care.check(function.name)
        asked: list[Asked] = []
        try:
            with self._care.lock:
                self._care.check(function.name)
                self._check_free(job, function)
                for n, each in enumerate(inputs):
                    only = n if pinned else None
                    asked.append(
                        self._calls[job].add(
                            function, each, timeout=timeout, retries=retries, only=only
                        )
                    )
                if asked:
                    self._start_again(job)
                self._put_to_work(job)
            if not self._care.concurrent:
                self._drive_until_done(asked, all_of_them)
        except BaseException:
            # Interrupted: nobody will ever hold these calls.
            self.give_up(job, asked)
            raise
        return asked

    def results(self, job: str, asked: Sequence[Asked], *, all_of_them: bool) -> list[Any]:
        """What the calls return, once they have; the first error is raised, unless it is wanted.

        Raises:
            WouldBlock: this is the thread that hands out what is waited for.
        """
        try:
            self._wait(asked, ALL_COMPLETED if all_of_them else FIRST_EXCEPTION)
            if all_of_them:
                return [_outcome(each.future) for each in asked]
            for each in asked:
                if each.future.done():
                    each.future.result()
            return [each.future.result() for each in asked]
        except BaseException:
            self.give_up(job, asked)
            raise

    def _wait(self, asked: Sequence[Asked], until: str) -> None:
        futures = [each.future for each in asked]
        if self._care.is_here and not all(future.done() for future in futures):
            raise WouldBlock(
                f"{asked[0]}: a callback of a future cannot wait for other calls, which end on its"
                " own thread; use submit there, or wait elsewhere"
            )
        wait(futures, return_when=until)

    def give_up(self, job: str, asked: Sequence[Asked]) -> None:
        """Nobody waits for these calls any more: what runs of them ends within seconds."""
        with self._care.lock:
            for each in asked:
                worker = self._calls[job].give_up(each)
                if worker is not None:
                    seat = self._care.of(job)[worker]
                    seat.send(StopJob(each.call.number))
                    seat.kill_at = time.monotonic() + GRACE
        self._care.look()

    def handle(self, seat: Seat, event: object, now: float) -> None:
        """Hear what a worker says of its call."""
        if isinstance(event, Answer):
            seat.kill_at = None
            self._calls[seat.job].answered(seat.index, self._reported(seat, event), now)
        elif isinstance(event, Began):
            self._calls[seat.job].began(seat.index, event.number, now)

    def _reported(self, seat: Seat, answer: Answer) -> Answer:
        """The same; where the function raised, it says which file is about that, if one is."""
        asked = self.of(seat)
        if asked is None or asked.call.number != answer.number or answer.error is None:
            return answer
        kind, text = answer.error
        files = self._files.setdefault(asked.function.key, FILES)
        if kind != "TaskFailed" or not files:
            return answer
        told = self._care.report(seat, f"{asked} raised in {seat.name}:\n{text}", answer.held)
        if told:
            self._files[asked.function.key] -= 1
            while len(self._files) > FUNCTIONS:
                del self._files[next(iter(self._files))]
        return replace(answer, error=(kind, text.rstrip() + told))

    def died(self, seat: Seat, what: str, detail: str) -> bool:
        """A worker is dead; whether that was an input's doing, which has been seen to."""
        calls = self._calls[seat.job]
        had = calls.died(seat.index, f"{what}{detail}")
        if had:
            _log.warning("%s; it is restarted%s", what, detail)
        return had

    def failed(self, seat: Seat, error: PacelineError) -> None:
        """A seat's worker cannot run: calls that need it, or that nobody is left for, fail."""
        calls = self._calls[seat.job]
        calls.fail_those_of(seat.index, error)
        if all(other.hopeless for other in self._care.of(seat.job)):
            calls.fail(error)

    def catch_up(self, now: float) -> list[float]:
        """End what took too long and hand out what waits; when there will be more to do."""
        for job, calls in self._calls.items():
            seats = self._care.of(job)
            overdue = calls.overdue(now, partial(self._at, seats))
            for seat in seats:
                late = seat.kill_at is not None and seat.kill_at <= now
                if late:
                    seat.kill_at = None
                if (late or seat.index in overdue) and self._kills:
                    self._care.replace(seat)
            self._put_to_work(job)
        found = [seat.kill_at for seat in self._care.seats]
        found += [calls.next_deadline() for calls in self._calls.values()]
        return [deadline for deadline in found if deadline is not None]

    def end(self, error: PacelineError) -> None:
        """End every call with an error."""
        for calls in self._calls.values():
            calls.fail(error)

    def settle(self) -> None:
        """Give futures what they are to have. Not under the lock: users hang things on them."""
        for calls in self._calls.values():
            calls.settle()

    def _at(self, seats: Sequence[Seat], worker: int) -> str:
        """What a worker is at that takes too long, as the end of a message."""
        seat = seats[worker]
        stacks = None if seat.task is None else seat.task.stacks()
        told = f"; it is at:\n{stacks}" if stacks else ""
        return told + self._care.report(seat, f"{seat.name} took too long{told}")

    def _check_free(self, job: str, function: Function) -> None:
        for seat in self._care.of(job):
            if not seat.free and seat.work is not None:
                raise Refused(
                    f"{function.name}: the workers of job {job!r} collect for"
                    f" {quoted(seat.work.collection)}; close that first, or give each a job of"
                    " its own, as in workers={'actor': 8, 'eval': 1}"
                )

    def _start_again(self, job: str) -> None:
        """Give workers that had nothing to do, or whose budget was spent, another chance."""
        for seat in self._care.of(job):
            if seat.free and seat.hopeless:
                self._care.start(seat)

    def _put_to_work(self, job: str) -> None:
        """Give workers that have nothing to do a call each."""
        calls = self._calls[job]
        if not calls.waiting:
            return
        for seat in self._care.of(job):
            if seat.free and seat.up:
                for message in calls.next(seat.index, seat.loaded):
                    seat.send(message)

    def _drive_until_done(self, asked: Sequence[Asked], all_of_them: bool) -> None:
        """Where everything shares this thread, calls are made as they are asked for.

        As elsewhere, none begins once another of them has failed, unless all are wanted.
        """
        for each in asked:
            with self._care.turn:
                while not each.future.done():
                    if not self._care.drive():
                        raise WouldBlock(f"{each}: no worker can go on")
            if each.future.cancelled() or (each.future.exception() and not all_of_them):
                return


def _outcome(future: Future[Any]) -> Any:
    """A result, or the error of a call that failed; what ended the cluster is raised."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, Closed | Disconnected) or not isinstance(error, PacelineError):
        raise error
    return error
