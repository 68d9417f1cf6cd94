"""Calls to the workers of one job, and the futures of what they answer."""

from __future__ import annotations

import hashlib
import itertools
import reprlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline import functions
from paceline.core import errors
from paceline.core import tree as trees
from paceline.core.call_state import Call, CallState
from paceline.core.errors import PacelineError, TaskFailed, TimedOut, WorkerFailed
from paceline.core.numbers import times
from paceline.core.stats import CallStats
from paceline.core.waiting import NOT_YET
from paceline.variables import Variable
from paceline.worker.line import KEPT, Answer, Ask, Load

_shown = reprlib.Repr()
_shown.maxother = _shown.maxstring = 80


class Function(NamedTuple):
    """A function and its resources, as they travel. The same bytes are the same function.

    `variables` are the keys of those that are among the resources.
    """

    name: str
    key: bytes
    payload: bytes
    variables: tuple[str, ...] = ()


def packed(fn: Any, resources: tuple[Any, ...]) -> Function:
    """Make a function ready to travel.

    Raises:
        FunctionError: it cannot; the message names what it captured.
    """
    try:
        payload = functions.dump((fn, resources))
    except errors.FunctionError:
        functions.dump(fn)  # by itself, so that an error speaks of it
        raise
    return Function(
        functions.name_of(fn),
        hashlib.blake2b(payload, digest_size=16).digest(),
        payload,
        variables(resources),
    )


def variables(resources: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys of the variables among some resources."""
    return tuple(each.key for each in resources if isinstance(each, Variable))


@dataclass(slots=True, eq=False)
class Asked:
    """A call, what it is made of, and who waits for it."""

    call: Call
    function: Function
    input: bytes | None
    future: Future[Any]

    def value(self) -> Any:
        """The input, as the function got it; handles as their names."""
        return None if self.input is None else functions.load(self.input, lambda name: name)

    def __str__(self) -> str:
        if self.input is None:
            return self.function.name
        try:
            shown = " ".join(_shown.repr(self.value()).split())
        except Exception as e:  # of the user's: loading it and its repr run the input's own code
            shown = f"<an input that cannot be shown: {type(e).__name__}>"
        return f"{self.function.name}({shown})"


class Calls:
    """Not safe for threads by itself, but for `settle`: what futures run is the user's."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._state = CallState()
        self._asked: dict[int, Asked] = {}
        self._numbers = itertools.count(1)
        self._done = self._failed = 0
        self._settled: deque[tuple[Future[Any], Any, PacelineError | None]] = deque()

    def stats(self) -> CallStats:
        """How they are now, and how many there were."""
        state = self._state
        return CallStats(state.waiting, state.running, self._done, self._failed, state.retried)

    @property
    def waiting(self) -> int:
        """Calls that no worker has."""
        return self._state.waiting

    def has(self, worker: int) -> bool:
        """Whether a worker runs one."""
        return self._state.has(worker)

    def of(self, worker: int) -> Asked | None:
        """What a worker runs."""
        call = self._state.leased(worker)
        return None if call is None else self._asked.get(call.number)

    @property
    def open(self) -> int:
        """Calls that wait or run."""
        return self._state.waiting + self._state.running

    def add(
        self,
        function: Function,
        payload: bytes | None,
        *,
        timeout: float | None = None,
        retries: int | None = 0,
        only: int | None = None,
    ) -> Asked:
        """Take in a call."""
        call = Call(next(self._numbers), retries, timeout, only)
        asked = self._asked[call.number] = Asked(call, function, payload, Future())
        self._state.add(call)
        return asked

    def next(self, worker: int, loaded: dict[bytes, None]) -> list[object]:
        """What to tell a worker that has nothing to do; `loaded` are the functions that it has."""
        while (call := self._state.take(worker)) is not NOT_YET:
            asked = self._asked[call.number]
            if call.begun == 1 and not asked.future.set_running_or_notify_cancel():
                self._state.finish(worker, call.number)
                del self._asked[call.number]
                continue
            key, messages = asked.function.key, list[object]()
            if key not in loaded:
                loaded[key] = None
                while len(loaded) > KEPT:
                    del loaded[next(iter(loaded))]
                messages.append(Load(key, asked.function.payload))
            timed = call.timeout is not None
            return [*messages, Ask(call.number, key, asked.input, timed)]
        return []

    def began(self, worker: int, number: int, now: float) -> None:
        """A worker runs a timed call's function from now on."""
        self._state.began(worker, number, now)

    def answered(self, worker: int, answer: Answer, now: float) -> None:
        """A worker has answered. What comes after the time limit was too late."""
        call = self._state.finish(worker, answer.number)
        if call is None:
            return
        if call.deadline is not None and now > call.deadline:
            self._timed_out(call, worker)
        elif answer.error is not None:
            self._fail(call, _raised(answer.error, self._asked[call.number], self._named(worker)))
        else:
            asked = self._asked.pop(call.number)
            result = trees.unflatten(answer.layout, answer.values, answer.content)
            self._settled.append((asked.future, result, None))
            self._done += 1

    def died(self, worker: int, how: str) -> bool:
        """A worker is dead; whether it had a call that may have killed it.

        A call without a limit of its own is made again for as long as there is such a worker.
        """
        call = self._state.lost(worker)
        if call is None:
            return False
        if call.again:
            self._state.again(call)
        else:
            asked = self._asked[call.number]
            self._fail(
                call, WorkerFailed(f"{asked} killed its worker {times(call.begun)}; at last {how}")
            )
        return call.retries is not None

    def overdue(self, now: float, at: Callable[[int], str]) -> list[int]:
        """End the calls whose time is up; the workers that still run them.

        `at` says what a worker is at, as the end of a message.
        """
        told = {worker: at(worker) for worker in self._state.due(now) if not self._again(worker)}
        found = self._state.overdue(now)
        for worker, call in found:
            self._timed_out(call, worker, told.get(worker, ""))
        return [worker for worker, _ in found]

    def next_deadline(self) -> float | None:
        """When `overdue` will have something to do; `None` when never."""
        return self._state.next_deadline()

    def give_up(self, asked: Asked) -> int | None:
        """Nobody waits for a call any more; the worker that runs it, if one does."""
        if asked.call.number not in self._asked:
            return None
        worker = self._state.cancel(asked.call)
        if asked.future.cancel():
            del self._asked[asked.call.number]
        else:
            self._fail(asked.call, errors.Closed(f"{asked}: given up, as another call failed"))
        return worker

    def fail(self, error: PacelineError, *, call: Call | None = None) -> None:
        """End a call, or every one, with an error."""
        if call is None:
            self._state.end()
        for each in list(self._asked.values()) if call is None else [self._asked[call.number]]:
            self._fail(each.call, type(error)(f"{each}: {error}"))

    def fail_those_of(self, worker: int, error: PacelineError) -> None:
        """End the calls that wait for one worker alone."""
        for call in self._state.drop(worker):
            self.fail(error, call=call)

    def settle(self) -> None:
        """Give the futures what they are to have; runs what users have hung on them."""
        while self._settled:
            future, result, error = self._settled.popleft()
            if not future.running() and not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _again(self, worker: int) -> bool:
        call = self._state.leased(worker)
        return call is not None and call.again

    def _timed_out(self, call: Call, worker: int, at: str = "") -> None:
        if call.again:
            self._state.again(call)
            return
        often = "" if call.begun == 1 else f", {times(call.begun)}"
        asked = self._asked[call.number]
        text = f"{asked} took more than task_timeout={call.timeout} s in {self._named(worker)}"
        self._fail(call, TimedOut(text + often + at))

    def _fail(self, call: Call, error: PacelineError) -> None:
        asked = self._asked.pop(call.number)
        if asked.input is not None:
            with suppress(Exception):  # the input's own, as it is loaded
                error.input = asked.value()
        self._settled.append((asked.future, None, error))
        self._failed += 1

    def _named(self, worker: int) -> str:
        return f"{self.job}:{worker}"


def _raised(error: tuple[str, str], asked: Asked, worker: str) -> PacelineError:
    code, text = error
    if code == "SchemaError":
        return errors.SchemaError(f"the result of {asked}: {text}")
    kind = errors.WouldBlock if code == "WouldBlock" else TaskFailed
    return kind(f"{asked} raised in {worker}:\n{text}")
