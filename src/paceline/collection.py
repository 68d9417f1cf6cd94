"""Collecting: workers make items with the newest parameters, the trainer gets them in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from paceline.batches import Batch, assembled
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.account import BATCH
from paceline.core.clock import checked_timeout
from paceline.core.closing import Closing
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    TimedOut,
    UnknownName,
    WasReset,
    WouldBlock,
)
from paceline.core.names import parts
from paceline.handles import lasting
from paceline.lines import Lines
from paceline.pending import limited
from paceline.worker.line import Collect

D = TypeVar("D")

NEWEST = 100
"""Values of a logged metric whose mean is shown."""


class Workers(Protocol):
    """What a collection needs of a crew."""

    @property
    def concurrent(self) -> bool: ...

    @property
    def turn(self) -> threading.RLock: ...

    def give(
        self,
        job: str,
        work: Collect,
        on_fail: Callable[[PacelineError], None],
        on_returned: Callable[[], None],
    ) -> None: ...

    def take_back(self, collection: str) -> None: ...

    def drive(self) -> bool: ...


class Tally:
    """What a collection has handed over so far, for the progress line and the logs."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.batches = 0
        self.items = 0
        self.steps = 0.0
        self.waited = 0.0
        self.waiting_since: float | None = None
        self.newest_at = self.began
        self.lag = 0
        self.metrics: dict[str, deque[float]] = {}

    def add(self, batch: Batch[Any]) -> None:
        """Count a batch."""
        self.newest_at = time.monotonic()
        self.batches += 1
        self.items += len(batch)
        self.lag = int(batch.lag.max()) if batch.lag.size else 0
        for name, values in batch.metrics.items():
            if name == "steps":
                self.steps += float(values.sum())
            else:
                self.metrics.setdefault(name, deque(maxlen=NEWEST)).extend(values.tolist())

    def means(self) -> dict[str, float]:
        """The mean of the newest values of each metric."""
        # Copied in one step each: another thread may ask while batches are added.
        metrics = {name: list(values) for name, values in list(self.metrics.items())}
        return {name: float(np.mean(values)) for name, values in metrics.items() if values}

    @property
    def waited_now(self) -> float:
        """Seconds that the trainer has waited for batches, the present wait included."""
        since = self.waiting_since
        return self.waited + (0.0 if since is None else time.monotonic() - since)


class Collection(Closing, Generic[D]):
    """Batches of what the workers' generators yield. Made by `Cluster.collect`.

    Iterate it, or call `next`. Leaving the loop, or `close`, stops the workers' generators.
    """

    def __init__(
        self,
        lines: Lines,
        workers: Workers,
        key: str,
        on_change: Callable[[Collection[Any]], None],
    ) -> None:
        self.name = parts(key).name
        self._key = key
        self.tally = Tally()
        self._lines = lines
        # Chosen when it was opened.
        self._connection = lines.home("collection", key, make=False)
        self._workers = workers
        self._on_change = on_change
        self._error: PacelineError | None = None
        self._asked = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Collection '{self.name}', {self.tally.batches} batches>"

    def __iter__(self) -> Iterator[Batch[D]]:
        """Batches until the workers' functions have returned; ends with the cluster."""
        try:
            while True:
                try:
                    batch = self.next(timeout=None)
                except Closed as e:
                    if self._error is not None or isinstance(e, WasReset):
                        raise
                    return
                yield batch
        finally:
            self.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the loop over it left."""
        return self._closed

    @limited
    def next(self, *, timeout: float | None = 60.0) -> Batch[D]:
        """The next batch; asking for it says that the one before is done with.

        Raises:
            TimedOut: there was none within `timeout` seconds; nothing is lost, ask again.
            WorkerFailed: a worker cannot run; the message has its own traceback.
            TooStale: item after item was older than `max_lag` allows.
            Closed: the collection was closed, or every worker's function has returned.
            WasReset: somebody reset the container that it is in.
        """
        limit = checked_timeout(timeout)
        self._check()
        batch = self._next(limit)
        self._on_change(self)
        return batch

    @lasting
    def _next(self, timeout: float | None) -> Batch[D]:
        line = self._connection
        with line.interrupts:
            return self._taken(line, timeout)

    def _taken(self, line: Connection, limit: float | None) -> Batch[D]:
        began = self.tally.waiting_since = time.monotonic()
        try:
            with line.conduct.spent_on(BATCH):
                items, buffers = self._ask(line, limit)
        except (Closed, Disconnected, UnknownName):
            self._check()
            raise
        finally:
            self.tally.waiting_since = None
            self.tally.waited += time.monotonic() - began
        try:
            batch: Batch[D] = assembled(items, buffers)
            line.interrupts.check()
        except BaseException:
            line.tell(self._back(items))
            raise
        del buffers
        line.tell(m.Delivered(self._key, items.delivery))
        self.tally.add(batch)
        return batch

    @lasting
    def stats(self) -> dict[str, Any]:
        """Its counters: accepted = delivered + dropped (by reason) + stored, always."""
        content: dict[str, Any] = self._connection.call(m.CollectionStats(self._key)).content
        return content

    def close(self) -> None:
        """Stop the workers' generators at their next step. What is left is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._connection.forked:
            return
        self._workers.take_back(self._key)
        end(self._lines, self._key)
        self._on_change(self)

    def fail(self, error: PacelineError) -> None:
        """End the collection with an error, which whoever asks next gets."""
        if self._error is None:
            self._error = error
        end(self._lines, self._key)

    def drain(self) -> None:
        """There will be no more items than there are."""
        with suppress(Disconnected, WasReset):  # whoever asks next hears of that
            self._connection.call(m.Drain(self._key))

    def _asks(self) -> Connection:
        return self._connection

    def _move(self, timeout: float | None) -> bool:
        """Go over to its server after that was started again, where it has been opened anew."""
        line = self._connection.succeeded(timeout)
        self._check()
        if line is None:
            return False
        self._connection, self._asked = line, False
        return True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise Closed(f"collection '{self.name}' is closed")

    def _ask(self, line: Connection, limit: float | None) -> tuple[m.Items, Any]:
        if not self._workers.concurrent:
            return self._ask_driving(line, limit)
        return self._ask_once(line, limit)

    def _ask_once(self, line: Connection, limit: float | None) -> tuple[m.Items, Any]:
        request = m.Next(self._key, self._asked, limit)
        self._asked = True
        found = line.exchange(request, timeout=limit, undo=self._back)
        self._asked = False
        return found

    def _ask_driving(self, line: Connection, limit: float | None) -> tuple[m.Items, Any]:
        """Where everything shares this thread: make the workers go on until there is a batch."""
        deadline = None if limit is None else time.monotonic() + limit
        with self._workers.turn:
            while True:
                try:
                    return self._ask_once(line, 0)
                except TimedOut as e:
                    if deadline is not None and time.monotonic() >= deadline:
                        raise
                    missing = str(e)
                # Out of the handler: what a worker's function raises is not an error of this one.
                if not line.interrupts.during(self._workers.drive):
                    raise WouldBlock(f"{missing}; no worker can go on")
                self._check()

    def _back(self, items: m.Items) -> m.Delivered:
        return m.Delivered(self._key, items.delivery, True)


def end(lines: Lines, key: str) -> None:
    """End a collection on its server, and the waits of its workers on all."""
    with suppress(Disconnected, TimedOut, WasReset):  # it has ended before
        home = lines.home("collection", key, make=False)
        home.call(m.EndCollection(key))
        # Its workers may wait elsewhere.
        for line in lines.all:
            if line is not home:
                line.call(m.EndCollection(key))


class Elsewhere(Collection[Any]):
    """A collection as those see it who are not its trainer: at its end, and with no batches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tally = Tally()
        self._error = None
        self._closed = True

    def __iter__(self) -> Iterator[Batch[Any]]:
        return iter(())

    def next(self, *, timeout: float | None = 60.0) -> Batch[Any]:
        checked_timeout(timeout)
        raise Closed(f"collection '{self.name}' is over, and its batches went to the chief")

    def stats(self) -> dict[str, Any]:
        raise Closed(f"collection '{self.name}' is over; the chief has its counters")
