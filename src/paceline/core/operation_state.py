"""Calls of operations: who waits for which, which of them start next, and what became of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.waiting import NOT_YET, NotYet, Stored


class How(NamedTuple):
    """How an operation is run.

    With `threads` it has as many of its own, else it shares one with all that have none. With
    `batch`, up to so many calls are made in one, and the first waits at most `wait` seconds for
    more.
    """

    threads: int | None = None
    batch: int | None = None
    wait: float = 0.0


class OperationState:
    """One operation, and its counters: calls = done + failed + dropped + waiting + running.

    `callers` are the living ones that have called it; `busy` says of how many calls each waits for
    an answer.
    """

    def __init__(self, name: str, how: How) -> None:
        self.name = name
        self.how = how
        self.counters: Counter[str] = Counter()
        self.callers: set[object] = set()
        self.busy: Counter[object] = Counter()

    @property
    def definition(self) -> dict[str, Any]:
        """How it is run, as plain data."""
        return self.how._asdict()

    def stats(self) -> dict[str, Any]:
        """The counters, and how it is run."""
        names = ("calls", "done", "failed", "dropped", "waiting", "running")
        return {**{name: self.counters[name] for name in names}, **self.definition}

    def lost(self, caller: object) -> None:
        """A caller is gone, and will not call again; its calls have been given up."""
        self.callers.discard(caller)


@dataclass(slots=True, eq=False)
class Call:
    """One call; `given_up` when nobody wants its result any more."""

    operation: OperationState
    caller: object
    tree: Stored | None
    layout: bytes
    since: float
    within: tuple[str, ...] = ()
    number: int = 0
    running: bool = False
    given_up: bool = False
    outcome: Any = field(default=NOT_YET)


class LaneState:
    """Threads and the calls that are to run on them, in the order of arrival."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.threads = threads
        self.running = 0
        self.waiting: list[Call] = []
        self._begun: list[Call] = []

    @property
    def calls(self) -> list[Call]:
        """Those that run and those that wait."""
        return [*self._begun, *self.waiting]

    def add(self, call: Call) -> None:
        """A call has come."""
        operation = call.operation
        operation.counters.update(("calls", "waiting"))
        operation.callers.add(call.caller)
        operation.busy[call.caller] += 1
        self.waiting.append(call)

    def take(self, now: float) -> list[Call] | NotYet:
        """The calls that are to start now, in one: one of them, or a batch of one structure.

        A batch is due when it is full, when its first call has waited long enough for others, or
        when there is nobody left who could call. The oldest that is due is next.
        """
        if self.running == self.threads:
            return NOT_YET
        for group in self._groups():
            if self._due(group) <= now:
                started = {id(call) for call in group}
                self.waiting = [call for call in self.waiting if id(call) not in started]
                self.running += 1
                self._begun += group
                for call in group:
                    call.running = True
                    _count(call, "waiting", "running")
                return group
        return NOT_YET

    def next_due(self) -> float | None:
        """When `take` will have something to say of itself; `None` when never."""
        if self.running == self.threads:
            return None
        return min((self._due(group) for group in self._groups()), default=None)

    def finish(self, calls: list[Call], outcomes: list[Any]) -> None:
        """What was taken together has run; each call has an outcome, an error or a result."""
        self.running -= 1
        self._begun = [call for call in self._begun if call not in calls]
        for call, outcome in zip(calls, outcomes, strict=True):
            if call.given_up:
                _count(call, "running", "dropped")
            else:
                call.outcome = outcome
                failed = isinstance(outcome, Exception)
                _count(call, "running", "failed" if failed else "done")
                _answered(call)

    def give_up(self, call: Call) -> None:
        """Nobody wants a call's result any more; one that waits never starts."""
        if call.given_up or call.outcome is not NOT_YET:
            return
        call.given_up = True
        _answered(call)
        if not call.running:
            self.waiting.remove(call)
            _count(call, "waiting", "dropped")

    def ahead(self, call: Call) -> int:
        """How many calls are to start before that one."""
        return self.waiting.index(call)

    def _groups(self) -> list[list[Call]]:
        """What would run in one, oldest first."""
        groups: list[list[Call]] = []
        open_ones: dict[tuple[int, bytes], list[Call]] = {}
        for call in self.waiting:
            most = call.operation.how.batch or 1
            key = (id(call.operation), call.layout)
            group = open_ones.get(key)
            if group is None or len(group) == most:
                group = open_ones[key] = []
                groups.append(group)
            group.append(call)
        return groups

    def _due(self, group: list[Call]) -> float:
        operation, first = group[0].operation, group[0].since
        if operation.how.batch in (None, len(group)):
            return first
        everybody = all(operation.busy[caller] for caller in operation.callers)
        return first if everybody else first + operation.how.wait


def _count(call: Call, before: str, after: str) -> None:
    call.operation.counters[before] -= 1
    call.operation.counters[after] += 1


def _answered(call: Call) -> None:
    busy = call.operation.busy
    busy[call.caller] -= 1
    if busy[call.caller] <= 0:
        del busy[call.caller]
