"""Workers that make items for collections."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.core.errors import Closed, PacelineError, Refused, WorkerFailed
from paceline.core.names import quoted
from paceline.crew.seat import Care, Seat
from paceline.worker.line import Collect, Ended, StopJob, Warned

_log = logging.getLogger("paceline")

NEEDS_ALL = "a run in lockstep goes on with all its workers as they began, or ends"


class Collecting:
    """Gives workers a collection's function, again when they are started again."""

    def __init__(self, care: Care, calls: Callable[[str], int]) -> None:
        self._care = care
        self._calls = calls
        self._on_fail: dict[str, Callable[[PacelineError], None]] = {}
        self._on_returned: dict[str, Callable[[], None]] = {}
        self._warned: set[str] = set()

    @property
    def concurrent(self) -> bool:
        """Whether workers run beside the caller."""
        return self._care.concurrent

    @property
    def turn(self) -> threading.RLock:
        """Held by whoever drives the workers, from looking for a batch to having it."""
        return self._care.turn

    def drive(self) -> bool:
        """Where workers share the caller's thread: let each go on a step; whether any did."""
        return self._care.drive()

    def give(
        self,
        job: str,
        work: Collect,
        on_fail: Callable[[PacelineError], None],
        on_returned: Callable[[], None],
    ) -> None:
        """Have every worker of `job` run `work`, restarted workers included.

        `on_fail` hears of a worker that cannot run; `on_returned`, that all have returned.

        Raises:
            Refused: the job has calls that wait or run.
        """
        with self._care.lock:
            calls = self._calls(job)
            if calls:
                raise Refused(
                    f"collection {quoted(work.collection)}: job {job!r} has {calls} calls that"
                    " wait or run; let them end first, or give each a job of its own, as in"
                    " workers={'actor': 8, 'eval': 1}"
                )
            self._end_others(job, work.collection)
            self._on_fail[work.collection] = on_fail
            self._warned.discard(work.collection)
            self._on_returned[work.collection] = on_returned
            for seat in self._care.of(job):
                seat.work, seat.returned, seat.failed_at_once = work, False, 0
                if seat.hopeless:
                    self._care.start(seat)
                else:
                    seat.send(work)
            if work.schedule == "lockstep":
                self._check_seeds(job, work.collection)

    def take_back(self, collection: str) -> None:
        """The work of that collection is over."""
        with self._care.lock:
            self._on_fail.pop(collection, None)
            self._on_returned.pop(collection, None)
            for seat in self._making(collection):
                seat.work = None
                seat.send(StopJob(collection))

    def ended(self, seat: Seat, event: Ended) -> None:
        """A worker's function has ended."""
        if seat.work is None or event.collection != seat.work.collection:
            return
        if event.error is None:
            seat.returned = True
            if all(other.returned for other in self._making(event.collection)):
                self._on_returned.get(event.collection, _nothing)()
            return
        error = event.error + self._care.report(seat, event.error, event.held)
        seat.failed_at_once = seat.failed_at_once + 1 if event.items == 0 else 0
        if event.hopeless or seat.failed_at_once == 2:
            self._care.fail(seat, WorkerFailed(f"{seat.name} cannot run:\n{error}"))
        elif seat.in_lockstep:
            self._care.fail(seat, WorkerFailed(f"{seat.name} failed; {NEEDS_ALL}:\n{error}"))
        elif self._care.within_budget(seat, error):
            _log.warning("%s failed, its function is started again:\n%s", seat.name, error)
            self._care.replace(seat)

    def failed(self, seat: Seat, error: PacelineError) -> None:
        """A seat's worker cannot run."""
        if seat.work is None:
            _log.error("%s", error)
        elif seat.work.collection in self._on_fail:
            self._on_fail[seat.work.collection](error)

    def warned(self, event: Warned) -> None:
        """A worker has something to say to the user; the others would say the same."""
        if event.collection not in self._warned:
            self._warned.add(event.collection)
            _log.warning("collection %s: %s", quoted(event.collection), event.text)

    def end(self, error: PacelineError) -> None:
        """Nobody looks after the workers any more."""
        for on_fail in list(self._on_fail.values()):
            on_fail(error)

    def _check_seeds(self, job: str, collection: str) -> None:
        again = [seat.name for seat in self._care.of(job) if seat.starts > 1 or seat.due]
        if again:
            _log.warning(
                "collection %s: %s had to be started again before, so their seeds, and with them"
                " this run in lockstep, differ from those of a new cluster",
                quoted(collection),
                ", ".join(again),
            )

    def _making(self, collection: str) -> list[Seat]:
        works = [(seat, seat.work) for seat in self._care.seats]
        return [seat for seat, work in works if work is not None and work.collection == collection]

    def _end_others(self, job: str, collection: str) -> None:
        """A worker runs one function at a time: what its job still runs ends with an error."""
        busy = [seat for seat in self._care.of(job) if not seat.returned]
        for other in {seat.work.collection for seat in busy if seat.work is not None}:
            for seat in busy:
                seat.send(StopJob(other))
            self._on_fail[other](
                Closed(
                    f"collection {quoted(other)} ended when {quoted(collection)} began: both are"
                    f" made by job {job!r}; side by side they need a job each, as in"
                    " workers={'actor': 8, 'eval': 1}"
                )
            )


def _nothing() -> None:
    """Nobody is told."""
