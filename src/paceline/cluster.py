"""A cluster launched from the main program: a server, workers, and the chief's session."""

from __future__ import annotations

import enum
import itertools
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

from paceline import functions
from paceline.collection import Collection
from paceline.core import messages as m
from paceline.core.closing import Closing
from paceline.core.errors import FunctionError, PacelineError, SchemaError
from paceline.core.numbers import whole
from paceline.crew import Crew
from paceline.hosting import hosting, limits, preflight
from paceline.progress import Mode
from paceline.progress import progress as display
from paceline.session import CAPACITY_BYTES
from paceline.variables import Variable
from paceline.worker.line import Collect

_log = logging.getLogger("paceline")


class _FirstVariable(enum.Enum):
    FIRST = "the first variable among the resources"

    def __repr__(self) -> str:
        return f"<{self.value}>"


_FIRST_VARIABLE: Any = _FirstVariable.FIRST

MOST_AHEAD = 8
"""Items that a worker may have admitted at a time, if they are quick."""


class Cluster(Closing):
    """Workers, a server for what they share, and this process as the chief. A context manager.

    Args:
        workers: how many, or how many of each job: `{"actor": 8, "eval": 1}`.
        engine: `processes`, `threads` of this process, or `serial` for everything in this one
            thread, in a fixed order.
        seed: of the run; each worker's own seed comes from it. By default another one each time.
        restarts: how often within a minute a worker that died is started again.
        worker_threads: threads for BLAS, OpenMP and XLA in each worker.
        worker_devices: accelerators that workers see, as in `CUDA_VISIBLE_DEVICES`.
        transport: how processes reach the server: `unix`, with shared memory, or `tcp`, at
            127.0.0.1; where everything is in one process there is nothing to reach.
        progress: `live`, `plain`, `quiet`, or `auto`: live on a terminal, plain lines elsewhere.

    Everything of the chief's session is here too: `variable`, `queue`, `resources`.
    """

    def __init__(
        self,
        workers: int | dict[str, int] = 1,
        *,
        engine: str = "processes",
        seed: int | None = None,
        restarts: int = 3,
        worker_threads: int = 1,
        worker_devices: str = "",
        transport: Literal["unix", "tcp"] = "unix",
        progress: Mode = "auto",
    ) -> None:
        jobs = _jobs(workers)
        self.seed = secrets.randbits(63) if seed is None else seed
        self._names = itertools.count(1)
        self._collections: list[Collection[Any]] = []
        self._closed = False
        self._progress = display(progress, ticks=engine != "serial")
        self._hosting = hosting(engine, transport)
        self._crew = Crew(
            self._hosting.engine,
            self._hosting.setup,
            jobs,
            seed=self.seed,
            restarts=restarts,
            threads=worker_threads,
            devices=worker_devices,
        )
        try:
            self._hosting.start(self._crew.stand_down)
            self._crew.start()
            self.session = self._hosting.chief()
        except BaseException:
            self._end()
            raise
        for warning in preflight(sum(jobs.values()), worker_threads, *limits()):
            _log.warning("%s", warning)
        self.variable = self.session.variable
        self.queue = self.session.queue
        self.resources = self.session.resources

    def __repr__(self) -> str:
        return f"<Cluster of {self._crew.alive()} workers, {self._hosting.engine}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("cluster", "cluster")

    def collect(
        self,
        fn: Callable[..., Any],
        *resources: Any,
        batch_size: int,
        max_lag: int | None = 1,
        version_of: Variable[Any] | str | None = _FIRST_VARIABLE,
        job: str | None = None,
        capacity: int | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> Collection[Any]:
        """Run the generator function `fn(*resources)` in every worker; collect what it yields.

        Args:
            fn: is given a keyword `worker` if it has a parameter of that name.
            resources: handles (variables, queues, the session) or data.
            batch_size: yields per batch.
            max_lag: no item that is more versions behind is handed over; workers are paced so that
                few are dropped. 0 is strictly on-policy, `None` never drops.
            version_of: the variable whose versions stamp the items; by default the first among the
                resources, `None` for no stamps.
            job: whose workers, where there are several jobs.
            capacity, capacity_bytes: bounds of the collection's queue.

        Raises:
            FunctionError: `fn` cannot be sent to a worker; the message names what it captured.
            SchemaError: a number is out of bounds; the message says which.
        """
        job = self._job(job)
        if max_lag is not None:
            max_lag = whole(max_lag, "max_lag", 0, ", or None")
        batch_size = whole(batch_size, "batch_size")
        ahead = 4 if max_lag is None else max_lag
        capacity = (ahead + 1) * batch_size if capacity is None else whole(capacity, "capacity")
        capacity_bytes = whole(capacity_bytes, "capacity_bytes")
        if capacity < batch_size:
            raise SchemaError(f"batch_size={batch_size} is outside of 1 to capacity={capacity}")
        stamps = _stamping(version_of, resources)
        try:
            payload = functions.dump((fn, resources))
        except FunctionError:
            functions.dump(fn)  # by itself, so that an error speaks of it
            raise
        name = f"{getattr(fn, '__name__', 'collect')}-{next(self._names)}"
        self.session.connection.call(
            m.OpenCollection(name, stamps, batch_size, max_lag, capacity, capacity_bytes)
        )
        made: Collection[Any] = Collection(self.session, self._crew, name, self._progress.update)
        self._collections = [*(c for c in self._collections if not c.closed), made]
        self._progress.update(made)
        ahead = max(1, min(MOST_AHEAD, batch_size // self._crew.count(job)))
        self._crew.give(job, Collect(name, payload, stamps, ahead), made.fail, made.drain)
        return made

    def close(self) -> None:
        """End every process and thread of the cluster, within seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.session.connection.forked:
            # What a forked process has is a copy; the cluster is its parent's.
            return
        try:
            self._progress.close()
            for collection in self._collections:
                collection.close()
        except PacelineError as e:
            _log.warning("while closing: %s", e)
        finally:
            self._end()

    def _end(self) -> None:
        # Interrupted in one step, it still takes the next ones.
        with ExitStack() as steps:
            steps.callback(self._hosting.close)
            if hasattr(self, "session"):
                steps.callback(self.session.close)
            steps.callback(self._crew.close)

    def _job(self, job: str | None) -> str:
        jobs = {seat.job: None for seat in self._crew.seats}
        if job is None:
            job = next(iter(jobs))
        if job not in jobs:
            raise SchemaError(f"no workers of job {job!r}; there are {list(jobs)}")
        return job


def _jobs(workers: int | dict[str, int]) -> dict[str, int]:
    jobs = workers if isinstance(workers, dict) else {"worker": workers}
    for job in jobs:
        if job in ("chief", "ps"):
            raise SchemaError(f"the job {job!r} is not one of workers")
    if not jobs:
        raise SchemaError("a cluster has at least one worker")
    return {job: whole(n, f"the number of workers of job {job!r}") for job, n in jobs.items()}


def _stamping(version_of: Any, resources: tuple[Any, ...]) -> str | None:
    if version_of is _FIRST_VARIABLE:
        return next((r.name for r in resources if isinstance(r, Variable)), None)
    if isinstance(version_of, Variable):
        version_of = version_of.name
    if version_of is not None:
        names = [r.name for r in resources if isinstance(r, Variable)]
        if version_of not in names:
            raise SchemaError(
                f"version_of={version_of!r} is not among the resources' variables {names}"
            )
    found: str | None = version_of
    return found
