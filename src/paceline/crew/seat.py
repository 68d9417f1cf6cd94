"""A worker's place, and what whoever gives it work may ask of those who look after it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.core.budget import Budget
from paceline.core.errors import Closed, PacelineError
from paceline.crew.recording import Recording, where
from paceline.engines.base import Task
from paceline.worker.line import Collect, Held


@dataclass(slots=True, eq=False)
class Seat:
    """A worker's place: its task stays the same when its process is another one.

    `due` is when it is to be started again, `kill_at` when it is to be replaced unless it has
    answered. `seed` and `record` are those of its newest process.
    """

    job: str
    index: int
    budget: Budget
    task: Task | None = None
    work: Collect | None = None
    seed: int = 0
    record: Recording | None = None
    starts: int = 0
    began: float = 0.0
    up: bool = False
    loaded: dict[bytes, None] = field(default_factory=dict)
    failed_at_once: int = 0
    due: float | None = None
    kill_at: float | None = None
    expected_end: bool = False
    returned: bool = False

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.job}:{self.index}"

    @property
    def free(self) -> bool:
        """Whether no collection has it."""
        return self.work is None or self.returned

    @property
    def in_lockstep(self) -> bool:
        """Whether nobody can take its place in what it makes."""
        return self.work is not None and self.work.schedule == "lockstep"

    @property
    def hopeless(self) -> bool:
        """Whether it is dead and will not be started again by itself."""
        return self.task is None and self.due is None

    def where(self, *, calls: bool) -> str:
        """How far the function got that it runs, or a call, in brackets; empty without one."""
        if self.record is None or (self.free and not calls):
            return ""
        if not self.record.near:
            return f" (seed {self.seed})"
        stamps = None if self.work is None else self.work.version_of
        return f" ({where(self.seed, self.record.seen(), stamps, items=not calls)})"

    def send(self, message: object) -> None:
        """Tell its worker something, if there is one."""
        # A task that has just ended is restarted, and then gets its work.
        with suppress(Closed):
            if self.task is not None:
                self.task.send(message)


class Care(ABC):
    """Looks after the seats. Whoever gives them work holds `lock` while doing so.

    Where workers share the caller's thread, several threads take turns at driving them: a loop that
    does holds `turn`, and takes it before `lock`.
    """

    seats: Sequence[Seat]
    lock: threading.RLock
    turn: threading.RLock

    @property
    @abstractmethod
    def concurrent(self) -> bool:
        """Whether workers run beside the caller."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Whether the caller is on the thread that looks after the seats."""

    @abstractmethod
    def drive(self) -> bool:
        """Where workers share the caller's thread: let each go on a step; whether any did."""

    @abstractmethod
    def look(self) -> None:
        """Have what is due looked at again, soon and elsewhere."""

    @abstractmethod
    def check(self, what: str) -> None:
        """Raise why nothing can be asked of the workers any more, if so."""

    @abstractmethod
    def start(self, seat: Seat) -> None:
        """Start a worker that is dead."""

    @abstractmethod
    def replace(self, seat: Seat) -> None:
        """End a worker's process and start another: nobody knows what is left in this one."""

    @abstractmethod
    def report(self, seat: Seat, how: str, held: Sequence[Held] = ()) -> str:
        """Have what a seat's worker ran kept for a replay; a line that says where, or nothing."""

    @abstractmethod
    def within_budget(self, seat: Seat, error: str) -> bool:
        """Whether a seat may have another process; else its work has failed."""

    @abstractmethod
    def fail(self, seat: Seat, error: PacelineError) -> None:
        """A seat's worker cannot run: whoever waits for it hears that."""

    def of(self, job: str) -> list[Seat]:
        """The seats of a job, in the order of their workers."""
        return [seat for seat in self.seats if seat.job == job]
