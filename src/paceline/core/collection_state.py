"""One collection: its queue, and the pace at which workers may start items.

`max_lag` bounds how many versions behind an item may be when it is handed over. Not starting work
is better than throwing it away, so a worker starts an item only while

    started < (k' + 1 + finished) * batch_size,    k' = floor(max_lag / a)

where `a` is the number of versions assigned between the trainer's last two asks, at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core import versions
from paceline.core.errors import Closed, ProtocolError, TooStale
from paceline.core.queue_state import Item, QueueState
from paceline.core.waiting import NOT_YET, NotYet

STALE_ROW = 10


class CollectionState:
    """What the trainer of one collection and its workers agree on.

    `current` gives the version that lag is measured against, `None` when nothing is stamped.
    """

    def __init__(
        self,
        queue: QueueState,
        batch_size: int,
        max_lag: int | None,
        current: Callable[[], int] | None,
    ) -> None:
        self.queue = queue
        self.batch_size = batch_size
        self.max_lag = max_lag
        self.started = 0
        self.finished = 0
        self.draining = False
        self.trainer_waits = False
        self.max_lag_seen = 0
        self._current = current
        self._outstanding: dict[object, int] = {}
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
        room = (self.depth + 1 + self.finished) * self.batch_size - self.started
        if self.queue.nbytes >= self.queue.capacity_bytes:
            room = 0
        if self.trainer_waits:
            room = max(room, self.batch_size - self.queue.size - self.running)
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

    def offer(self, worker: object, items: list[Item], abandoned: int) -> None:
        """Take in finished items; `abandoned` admissions ended without one.

        Raises:
            ProtocolError: more has ended than was admitted.
        """
        held = self._outstanding.get(worker, 0)
        if len(items) + abandoned > held:
            raise ProtocolError(
                f"offer to collection '{self.queue.name}': {len(items)} items and {abandoned}"
                f" abandoned ones, but {held} were admitted"
            )
        self._outstanding[worker] = held - len(items) - abandoned
        self.started -= abandoned
        self.queue.accept(items)
        if self.queue.closed:
            self._drop_rest()

    def next(self, *, retry: bool) -> tuple[list[Item], list[int]] | NotYet:
        """The items of the trainer's next batch, and their lags. `retry`: still the same ask.

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
        items = self.queue.dequeue(self.batch_size, self.batch_size)
        assert items is not NOT_YET
        self._drops_in_a_row = 0
        lags = [self._lag(item) or 0 for item in items] if self._current else []
        self.max_lag_seen = max(self.max_lag_seen, *lags, 0)
        return items, lags

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

    def _ask(self) -> None:
        # A batch that came back, or whose trainer died, has not been finished.
        self.finished = self.queue.taken // self.batch_size
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
        for item in self.queue.sift(self._fresh):
            self._drop([item], "epoch" if self._lag(item) is None else "stale")
            self._drops_in_a_row += 1
            self._last_drop = (
                f"{item.producer} made it with version {versions.count_of(item.head.version)},"
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

    def _drop(self, items: list[Item], reason: str) -> None:
        self.queue.drop(items, reason)
        self.started -= len(items)

    def _drop_rest(self) -> None:
        self._drop(self.queue.sift(lambda item: False), "closed")

    def _fresh(self, item: Item) -> bool:
        lag = self._lag(item)
        return lag is not None and (self.max_lag is None or lag <= self.max_lag)

    def _lag(self, item: Item) -> int | None:
        assert self._current is not None
        return versions.lag(self._current(), item.head.version)

    def stats(self) -> dict[str, Any]:
        """The counters, as plain data."""
        return self.queue.stats() | {
            "started": self.started,
            "finished": self.finished,
            "running": self.running,
            "workers_making": sum(count > 0 for count in self._outstanding.values()),
            "batch_size": self.batch_size,
            "depth": self.depth,
            "trainer_waits": self.trainer_waits,
            "max_lag_seen": self.max_lag_seen,
            "version": versions.count_of(self._current()) if self._current else None,
        }
