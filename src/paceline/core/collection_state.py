"""The pace of a collection by lag: how far ahead of its trainer workers may start items.

`max_lag` bounds how many versions behind an item may be when it is handed over. Not starting work
is better than throwing it away, so a worker starts an item only while

    started < (k' + 1 + finished) * batch_size,    k' = floor(max_lag / a)

where `a` is the number of versions assigned between the trainer's last two asks, at least 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import final

from msgspec import structs

from paceline.core import versions
from paceline.core.errors import Closed, TooStale
from paceline.core.facts import CollectionFacts, Noted
from paceline.core.queue_items import Run, items_in
from paceline.core.queue_state import QueueState
from paceline.core.schedule import Schedule
from paceline.core.waiting import NOT_YET, NotYet

STALE_ROW = 10


def thinned(facts: CollectionFacts, runs: list[Run], now: int) -> tuple[CollectionFacts, list[Run]]:
    """What was noted of a collection that nobody has opened again, less what is too old `now`."""
    bound = facts.max_lag
    if bound is None:
        return facts, runs
    left = [run for run in runs if (versions.lag(now, run.version) or 0) <= bound]
    stale = items_in(runs) - items_in(left)
    dropped = dict(Counter(facts.dropped) + Counter(stale=stale))
    return structs.replace(facts, dropped=dropped), left


@final
class CollectionState(Schedule):
    """A collection paced by lag; `variable` is the key of what stamps its items."""

    kind = "lag"

    def __init__(
        self,
        queue: QueueState,
        batch_size: int,
        max_lag: int | None,
        current: Callable[[], int] | None,
        variable: str | None = None,
    ) -> None:
        super().__init__(queue, batch_size, current)
        self.max_lag = max_lag
        self.variable = variable
        self.draining = False
        self._version_at_ask: int | None = None
        self._assigned = 1
        self._drops_in_a_row = 0
        self._last_drop = ""

    @property
    def depth(self) -> int:
        """How many batches ahead workers may start: `k'`."""
        most = max(1, self.queue.capacity // self.batch_size) - 1
        if self.max_lag is None or self._current is None:
            return most
        return min(self.max_lag // self._assigned, most)

    def _room(self, worker: object) -> int:
        room = (self.depth + 1 + self.finished) * self.batch_size - self.started
        if self.queue.nbytes >= self.queue.capacity_bytes:
            room = 0
        if self.trainer_waits:
            room = max(room, self.batch_size - self.queue.size - self.running)
        # One for each of the others, who may ask next, before a second one for this one.
        others = len(self._outstanding.keys() - {worker})
        return min(room, 1 + max(0, room - 1 - others))

    def next(self, *, retry: bool) -> tuple[list[Run], list[int]] | NotYet:
        """The trainer's next batch, and the lag of each run. `retry`: still the same ask.

        Raises:
            Closed: the collection has ended, or no worker will hand in another item.
            TooStale: too many items in a row were too old.
        """
        if not retry:
            self._ask()
        self.trainer_waits = False
        if self.queue.closed:
            self._drop_rest()
            raise self.ended()
        self._sift()
        if self.queue.size < self.batch_size:
            self._check_hope()
            self.trainer_waits = True
            return NOT_YET
        runs = self.queue.dequeue(self.batch_size, self.batch_size)
        assert runs is not NOT_YET
        self._drops_in_a_row = 0
        return runs, self._lags(runs)

    def drain(self, peer: object) -> None:
        self.draining = True

    def noted(self) -> Noted:
        """What it has on its way, and what became of the rest: what nobody has for good counts."""
        return replace(self.queue.noted(), facts=self._facts())

    def _facts(self) -> CollectionFacts:
        queue, ended = self.queue, self.queue.counters
        return CollectionFacts(
            self.batch_size,
            self.max_lag,
            self.variable,
            queue.capacity,
            queue.capacity_bytes,
            ended.delivered,
            dict(ended.dropped),
        )

    def _fits(self, facts: CollectionFacts) -> bool:
        return facts.terms == self._facts().terms

    def _ask(self) -> None:
        # A batch that came back, or whose trainer died, has not been finished.
        self.finished = self._handed_over
        if self._current is None:
            return
        now = self._current()
        if self._version_at_ask is not None:
            self._assigned = max(1, versions.lag(now, self._version_at_ask) or 1)
        self._version_at_ask = now

    def _sift(self) -> None:
        """Drop what is too old, or of an older epoch."""
        if self._current is None:
            return
        for run in self.queue.sift(self._fresh):
            self._drop([run], "epoch" if self._lag(run) is None else "stale")
            self._drops_in_a_row += run.count
            self._last_drop = (
                f"{run.producer} made it with version {versions.count_of(run.version)},"
                f" now is {versions.count_of(self._current())}"
            )

    def _check_hope(self) -> None:
        if self._drops_in_a_row >= STALE_ROW * self.batch_size:
            dropped, self._drops_in_a_row = self._drops_in_a_row, 0
            raise TooStale(
                f"collection '{self.queue.name}': {dropped} items in a row were more than"
                f" max_lag={self.max_lag} versions old; the last: {self._last_drop}. Assign less"
                " often, make items shorter, or allow a larger max_lag"
            )
        if self.draining and self.running == 0:
            raise Closed(
                f"collection '{self.queue.name}': every worker's function has returned,"
                f" {self.queue.size} items are left, a batch is {self.batch_size}"
            )

    def _fresh(self, run: Run) -> bool:
        lag = self._lag(run)
        return lag is not None and (self.max_lag is None or lag <= self.max_lag)
