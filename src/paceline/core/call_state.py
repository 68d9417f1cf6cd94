"""The calls of one job: who runs which, and what becomes of those whose worker dies.

A call is one input for a function. A worker has at most one, its *lease*; whatever becomes of the
worker, a call has one outcome: a result, an error, or that it was cancelled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.waiting import NOT_YET, NotYet


@dataclass(slots=True, eq=False)
class Call:
    """One call. `only` is the worker that alone may run it.

    It is begun at most `retries + 1` times; without a limit of its own, for as long as whoever
    watches the workers has it again. `timeout` is what one run of it may take, in seconds.
    """

    number: int
    retries: int | None = 0
    timeout: float | None = None
    only: int | None = None
    begun: int = 0
    deadline: float | None = None

    @property
    def again(self) -> bool:
        """Whether it may be begun once more."""
        return self.retries is None or self.begun <= self.retries


class Overdue(NamedTuple):
    """A lease that ended by its time limit. The worker is to be ended: it may never come back."""

    worker: int
    call: Call


class CallState:
    """Calls wait in the order they were made; those that lost their worker go first."""

    def __init__(self) -> None:
        self._waiting: deque[Call] = deque()
        self._leases: dict[int, Call] = {}
        # Calls that were taken from a worker that still runs them.
        self._spent: dict[int, int] = {}
        self.retried = 0

    @property
    def waiting(self) -> int:
        """Calls that no worker has."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Calls that a worker has."""
        return len(self._leases)

    def has(self, worker: int) -> bool:
        """Whether a worker runs a call, one that was given up included."""
        return worker in self._leases or worker in self._spent

    def leased(self, worker: int) -> Call | None:
        """The call that a worker has."""
        return self._leases.get(worker)

    def add(self, call: Call) -> None:
        """Take in a call."""
        self._waiting.append(call)

    def take(self, worker: int) -> Call | NotYet:
        """Lease the next call to a worker that has none."""
        if self.has(worker):
            return NOT_YET
        for call in self._waiting:
            if call.only is None or call.only == worker:
                self._waiting.remove(call)
                call.begun += 1
                call.deadline = None
                self._leases[worker] = call
                return call
        return NOT_YET

    def began(self, worker: int, number: int, now: float) -> None:
        """The worker runs the function from now on: the call's time limit counts from here."""
        call = self._leases.get(worker)
        if call is not None and call.number == number and call.timeout is not None:
            call.deadline = now + call.timeout

    def finish(self, worker: int, number: int) -> Call | None:
        """The worker has an answer; the call that it is for, unless that has had its outcome."""
        call = self._leases.get(worker)
        if call is not None and call.number == number:
            return self._leases.pop(worker)
        if self._spent.get(worker) == number:
            del self._spent[worker]
        return None

    def lost(self, worker: int) -> Call | None:
        """The worker is dead; the call that it had, to be given to `again` or failed."""
        self._spent.pop(worker, None)
        return self._leases.pop(worker, None)

    def again(self, call: Call) -> None:
        """Put a call that lost its worker before those that wait."""
        self.retried += 1
        self._waiting.appendleft(call)

    def due(self, now: float) -> list[int]:
        """The workers whose leases' time is up."""
        return [
            worker
            for worker, call in self._leases.items()
            if call.deadline is not None and call.deadline <= now
        ]

    def overdue(self, now: float) -> list[Overdue]:
        """End the leases whose time is up."""
        found = [Overdue(worker, self._leases[worker]) for worker in self.due(now)]
        for worker, call in found:
            del self._leases[worker]
            self._spent[worker] = call.number
        return found

    def next_deadline(self) -> float | None:
        """When `overdue` will have something to say; `None` when never."""
        deadlines = [c.deadline for c in self._leases.values() if c.deadline is not None]
        return min(deadlines, default=None)

    def cancel(self, call: Call) -> int | None:
        """Give a call up. The worker that runs it, if one does: what it answers is ignored."""
        if call in self._waiting:
            self._waiting.remove(call)
        for worker, leased in self._leases.items():
            if leased is call:
                del self._leases[worker]
                self._spent[worker] = call.number
                return worker
        return None

    def drop(self, only: int | None = None) -> list[Call]:
        """Take out the calls that wait: all, or those that one worker alone may run."""
        out = [call for call in self._waiting if only is None or call.only == only]
        gone = set(out)
        self._waiting = deque(call for call in self._waiting if call not in gone)
        return out

    def end(self) -> list[Call]:
        """Take out every call: no worker will run any."""
        out = [*self._leases.values(), *self._waiting]
        self._waiting.clear()
        self._leases.clear()
        self._spent.clear()
        return out
