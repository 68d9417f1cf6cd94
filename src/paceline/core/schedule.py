"""What the trainer of one collection and its workers agree on, whoever may start an item when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from paceline.core import versions
from paceline.core.errors import Closed, ProtocolError
from paceline.core.facts import CollectionFacts
from paceline.core.queue_items import Run, items_in
from paceline.core.queue_state import QueueState
from paceline.core.round import Round
from paceline.core.waiting import NOT_YET, NotYet

ScheduleName: TypeAlias = Literal["lag", "lockstep"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


class Schedule(ABC):
    """One collection: its queue, and the items that its workers were admitted to make.

    `current` gives the version that lag is measured against, `None` when nothing is stamped.
    """

    kind: ScheduleName

    round: Round | None = None
    """What its workers read, where that is not simply what is current."""

    def __init__(
        self, queue: QueueState, batch_size: int, current: Callable[[], int] | None
    ) -> None:
        self.queue = queue
        self.batch_size = batch_size
        self.started = 0
        self.finished = 0
        self.trainer_waits = False
        self.max_lag_seen = 0
        self._current = current
        # Of what was handed out, what it did not hand out itself.
        self._taken_before = 0
        self._outstanding: dict[object, int] = {}

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many batches ahead workers may start."""

    @abstractmethod
    def next(self, *, retry: bool) -> tuple[list[Run], list[int]] | NotYet:
        """The trainer's next batch, and the lag of each run. `retry`: still the same ask.

        Raises:
            Closed: the collection has ended, or what is missing will never be handed in.
        """

    @abstractmethod
    def drain(self, peer: object) -> None:
        """There will be no more items: of this worker, or, if it is the trainer, of any."""

    @abstractmethod
    def _room(self, worker: object) -> int:
        """How many items `worker` may start now."""

    def _fits(self, facts: CollectionFacts) -> bool:
        """Whether it can hand over what one that was noted so had on its way."""
        return False

    @property
    def owing(self) -> list[str]:
        """The workers that the trainer waits for, where nobody else can make what is missing."""
        return []

    @property
    def over(self) -> bool:
        """Whether it has ended and nobody holds anything of it."""
        return self.queue.closed and self.queue.stored == self.queue.size and self.running == 0

    @property
    def running(self) -> int:
        """Items admitted and not yet handed in."""
        return sum(self._outstanding.values())

    def admit(self, worker: object, want: int) -> int | NotYet:
        """How many items `worker` may start now, up to `want`.

        Raises:
            Closed: the collection has ended.
        """
        self.check_open()
        room = self._room(worker)
        if room <= 0:
            return NOT_YET
        granted = min(want, room)
        self.started += granted
        self._outstanding[worker] = self._outstanding.get(worker, 0) + granted
        return granted

    def check_open(self) -> None:
        """Raise `Closed` if the collection has ended."""
        if self.queue.closed:
            raise self.ended()

    def ended(self) -> Closed:
        """What those are told who still make items for it."""
        return Closed(f"collection '{self.queue.name}' has ended")

    def offer(self, worker: object, runs: list[Run], abandoned: int) -> None:
        """Take in finished items; `abandoned` admissions ended without one.

        Raises:
            ProtocolError: more has ended than was admitted.
        """
        held, count = self._outstanding.get(worker, 0), items_in(runs)
        if count + abandoned > held:
            raise ProtocolError(
                f"offer to collection '{self.queue.name}': {count} items and {abandoned}"
                f" abandoned ones, but {held} were admitted"
            )
        self._outstanding[worker] = held - count - abandoned
        self.started -= abandoned
        self.queue.accept(runs)
        if self.queue.closed:
            self._drop_rest()

    def revive(self, facts: CollectionFacts, runs: list[Run]) -> None:
        """Begin with what one of its name had on its way, which belongs to no session now.

        Counters go on. What does not fit, or is of another epoch, is dropped with that reason.
        """
        self.queue.go_on(facts.delivered, facts.dropped, runs)
        self._taken_before = facts.delivered
        self.started += items_in(runs)
        fits = self._fits(facts)
        self._drop(self.queue.sift(lambda run: fits and self._of_now(run)), "epoch")

    def give_up(self) -> None:
        """The trainer's wait ended without a batch; its next ask is the same one."""
        self.trainer_waits = False

    def lost(self, peer: object) -> None:
        """A worker or the trainer is gone; what it had started never ends in an item."""
        self.started -= self._outstanding.pop(peer, 0)
        self.queue.lost(peer)
        if self.queue.closed:
            self._drop_rest()

    def end(self) -> None:
        """Refuse everything from now on; what is stored is dropped."""
        self.queue.close(cancel=True)
        self._drop_rest()

    @property
    def _handed_over(self) -> int:
        """Batches that the trainer has, or has had."""
        return (self.queue.taken - self._taken_before) // self.batch_size

    def _of_now(self, run: Run) -> bool:
        return self._current is None or self._lag(run) is not None

    def _drop(self, runs: list[Run], reason: str) -> None:
        self.queue.drop(runs, reason)
        self.started -= items_in(runs)

    def _drop_rest(self) -> None:
        self._drop(self.queue.sift(lambda run: False), "closed")

    def _lags(self, runs: list[Run]) -> list[int]:
        lags = [self._lag(run) or 0 for run in runs] if self._current else []
        self.max_lag_seen = max(self.max_lag_seen, *lags, 0)
        return lags

    def _lag(self, run: Run) -> int | None:
        assert self._current is not None
        return versions.lag(self._current(), run.version)

    def stats(self) -> dict[str, Any]:
        """The counters, as plain data."""
        return self.queue.stats() | {
            "started": self.started,
            "finished": self.finished,
            "running": self.running,
            "workers_making": sum(count > 0 for count in self._outstanding.values()),
            "schedule": self.kind,
            "batch_size": self.batch_size,
            "depth": self.depth,
            "trainer_waits": self.trainer_waits,
            "max_lag_seen": self.max_lag_seen,
            "version": versions.count_of(self._current()) if self._current else None,
        }
