"""A cluster launched from the main program: a server, workers, and the chief's session."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self

from paceline.checkpoints import Checkpoint, CheckpointError
from paceline.collection import Collection
from paceline.core.account import BUSY, STARTING
from paceline.core.clock import checked_timeout
from paceline.core.closing import Closing
from paceline.core.errors import PacelineError
from paceline.core.numbers import whole
from paceline.core.schedule import ScheduleName
from paceline.core.spec import Spec
from paceline.core.stats import Stats
from paceline.engines.wishes import Ray
from paceline.keeping import Keeper
from paceline.lines import account
from paceline.plans import FIRST_VARIABLE, planned
from paceline.post_mortems import AUTO
from paceline.progress import Mode
from paceline.progress import progress as display
from paceline.resources import CAPACITY_BYTES
from paceline.session import Session
from paceline.staff.base import Calls, Staff, jobs_of
from paceline.staff.by_hand import ByHand, check_by_hand
from paceline.staff.launched import Launched
from paceline.variables import Variable
from paceline.watch import Watch

_log = logging.getLogger("paceline")

RETRIES = 2
"""How often a call is made again whose worker died, or took too long."""


class Cluster(Closing):
    """Workers, a server for what they share, and this process as the chief. A context manager.

    Args:
        workers: how many, or how many of each job: `{"actor": 8, "eval": 1}`. Or a `ClusterSpec`
            whose tasks somebody starts by hand, or a session on one, which is closed with the
            cluster: then `seed`, `post_mortem` and `progress` are all there is to say.
        ps: how many servers, `ps:0`, `ps:1`, ..., each in a process of its own; without processes
            one stands for all. 0 has one in a thread of this process: a request takes thousands of
            microseconds while the program computes.
        engine: `processes`, `threads` of this process, `serial` for everything in this one thread,
            in a fixed order; or actors of a Ray cluster: `ray`, or a `Ray` that says more.
        seed: of the run; each worker's own seed comes from it. By default another one each time.
        restarts: how often within a minute a worker, or a server, that died is started again.
        worker_threads: threads for BLAS, OpenMP and XLA in each worker.
        worker_devices: accelerators that workers see, as in `CUDA_VISIBLE_DEVICES`.
        transport: how processes reach the server: `unix`, with shared memory, or `tcp`, at
            127.0.0.1; where everything is in one process there is nothing to reach.
        checkpoint: a folder, made if there is none, for one cluster at a time. What its newest good
            checkpoint has is brought back before workers start. It is saved there as the cluster
            goes on, and when it ends without an error or by Ctrl-C. A server that dies is started
            again with what was saved.
        save_every: seconds from one checkpoint to the next; `None` saves at the end, and soon after
            a variable was made.
        keep: how many checkpoints stay.
        post_mortem: a folder for files about workers that fail, which `paceline replay` runs alone;
            20 stay. `auto` is in the temporary directory (64 MB a file), `None` writes none.
        progress: `live`, `plain`, `quiet`, or `auto`: live on a terminal, plain lines elsewhere.

    Everything of the chief's session is here too: `variable`, `queue`, `counter`, `resources`, ...

    Raises:
        CheckpointError: there are checkpoints and none of them is good.
        SchemaError, UnknownName: an argument is out of bounds, or there is no such thing.
    """

    restored: Checkpoint | None = None
    """The checkpoint that the cluster began with."""

    _closed, _failed, _step = False, False, 0
    _staff: Staff

    def __init__(
        self,
        workers: int | dict[str, int] | Spec | Session = 1,
        *,
        ps: int = 1,
        engine: str | Ray = "processes",
        seed: int | None = None,
        restarts: int = 3,
        worker_threads: int = 1,
        worker_devices: str = "",
        transport: Literal["unix", "tcp"] = "unix",
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: float | None = 600.0,
        keep: int = 5,
        post_mortem: str | os.PathLike[str] | None = AUTO,
        progress: Mode = "auto",
    ) -> None:
        jobs = {} if isinstance(workers, Spec | Session) else jobs_of(workers)
        said = ps, engine, restarts, worker_threads, worker_devices, transport, checkpoint
        if not jobs:
            check_by_hand(*said)
        self._keeper = None if checkpoint is None else Keeper(checkpoint, save_every, keep)
        self.seed = secrets.randbits(63) if seed is None else seed
        spent = account(STARTING)
        self._names = itertools.count(1)
        self._collections: list[Collection[Any]] = []
        self._progress = display(progress, ticks=engine != "serial")
        if isinstance(workers, Spec | Session):
            self._staff = ByHand(workers, spent, seed=self.seed, post_mortem=post_mortem)
        else:
            self._staff = Launched(
                jobs,
                engine,
                transport,
                whole(ps, "ps", 0),
                spent,
                seed=self.seed,
                restarts=restarts,
                threads=worker_threads,
                devices=worker_devices,
                keeper=self._keeper,
                post_mortem=post_mortem,
            )
        self.session = self._staff.session
        self._watch = Watch(self.stats, self._staff.at, beside=self._staff.watched)
        spent.enter(BUSY)
        if self._keeper is not None:
            self.restored, self._step = self._keeper.restored, self._keeper.step
            self._keeper.start(self._steps, beside=engine != "serial")
        self._lend(self.session)

    def _lend(self, mine: Session) -> None:
        self.variable, self.resources = self._staff.led(mine.variable), mine.resources
        self.queue, self.accumulator = mine.queue, mine.accumulator
        self.counter, self.barrier, self.reader = mine.counter, mine.barrier, mine.reader
        self.container, self.reset = mine.container, mine.reset

    @classmethod
    def from_environment(
        cls,
        *,
        seed: int | None = None,
        progress: Mode = "auto",
        post_mortem: str | os.PathLike[str] | None = AUTO,
        **options: Any,
    ) -> Self:
        """A cluster of tasks that were started by hand; this process is one of them.

        All tasks run the same program. In the chief's it goes on as with workers that were
        launched. In a worker's `collect` and `run` call the function in this process, return when
        the chief has ended its collection or its run, and give nothing: the loop over the
        collection has no batches. The environment is that of `paceline run`, TF_CONFIG or Slurm;
        the options are those of `Session`.

        Raises:
            SchemaError: the environment tells of no cluster, or not of one chief and workers.
            TimedOut, Refused: as `Session`.
        """
        session = Session.from_environment(**options)
        try:
            return cls(session, seed=seed, progress=progress, post_mortem=post_mortem)
        except BaseException as e:
            session.__exit__(type(e), e, None)
            raise

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief; only in a cluster by hand it may be a worker."""
        return self._staff.is_chief

    def __repr__(self) -> str:
        return f"<Cluster of {self._staff!r}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("cluster", "cluster")

    def collect(
        self,
        fn: Callable[..., Any],
        *resources: Any,
        batch_size: int,
        max_lag: int | None = 1,
        version_of: Variable[Any] | str | None = FIRST_VARIABLE,
        schedule: ScheduleName = "lag",
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
            schedule: `lag`, as `max_lag` says; or `lockstep`: a batch is a round that begins when
                it is asked for, item `j` of batch `b` is made by worker `(b * batch_size + j) % N`,
                and reads in it give the versions of that moment. A run with a seed is then the same
                on every engine, as long as its functions draw from `worker.seed` only. `max_lag`
                has no say in it, nothing is dropped, and a worker's death ends it.
            job: whose workers, where there are several; by default the first that do not collect.
            capacity, capacity_bytes: bounds of the collection's queue.

        Raises:
            FunctionError: `fn` cannot be sent to a worker; the message names what it captured.
            SchemaError: a number is out of bounds; the message says which.
            Refused: the job has calls that wait or run.
        """
        plan = planned(
            fn,
            resources,
            batch_size=batch_size,
            max_lag=max_lag,
            version_of=version_of,
            schedule=schedule,
            capacity=capacity,
            capacity_bytes=capacity_bytes,
        )
        return self._staff.collect(plan, next(self._names), job, self._hear)

    def map(
        self,
        fn: Callable[..., Any],
        inputs: Iterable[Any],
        *resources: Any,
        task_timeout: float | None = None,
        retries: int = RETRIES,
        return_exceptions: bool = False,
        job: str | None = None,
    ) -> list[Any]:
        """Call `fn(input, *resources)` in the workers, once for each input; results in that order.

        A worker that is free gets the next input, so slow ones hold nobody up. The first error is
        raised, and the other calls are given up. With `engine="serial"` the calls are made here,
        one after the other.

        Args:
            fn: is given a keyword `worker` if it has a parameter of that name. What it returns is
                data: named tuples arrive as tuples, dataclasses as dicts, tensors as arrays.
            inputs: any that can be pickled; all are taken at once.
            resources: handles (variables, queues, the session) or data.
            task_timeout: seconds that one call may take from when its function begins. A worker
                process is then ended; a thread cannot be, and is waited for by whatever is next.
            retries: how often a call is made again whose worker died under it or that took too
                long. What `fn` raises is not tried again.
            return_exceptions: whether a call that fails has its error in the list, and the others
                go on. What ends the cluster is raised all the same.
            job: whose workers, where there are several jobs; by default the first that does not
                collect.

        Raises:
            TaskFailed: `fn` raised; the message has the input and the traceback, `input` the input.
            WorkerFailed: an input killed its worker `retries + 1` times, or no worker can run.
            TimedOut: a call took longer than `task_timeout`, `retries + 1` times.
            SchemaError: a result may not travel; the message has the leaf's path.
            FunctionError: `fn` or an input cannot be sent; nothing has been called.
            Refused: the workers of that job collect.
            Closed, Disconnected: the cluster has ended.
        """
        calls = self._call(
            fn, list(inputs), resources, task_timeout, retries, job, return_exceptions
        )
        return calls.results()

    def submit(
        self,
        fn: Callable[..., Any],
        value: Any,
        *resources: Any,
        task_timeout: float | None = None,
        retries: int = RETRIES,
        job: str | None = None,
    ) -> Future[Any]:
        """Have `fn(value, *resources)` called by a worker that is free; the future of its result.

        The same as `map` for one input; what is raised there is the future's exception here. It can
        be cancelled until a worker has it. Callbacks run on a thread of the cluster's.
        """
        return self._call(fn, [value], resources, task_timeout, retries, job).futures[0]

    def run(self, fn: Callable[..., Any], *resources: Any, job: str | None = None) -> list[Any]:
        """Call `fn(*resources)` once in every worker at the same time; results in worker order.

        The classical loop: `fn` trains, asynchronously or in step, on shared variables and queues.
        Where a worker dies, `fn` is called again in its successor, within its budget (`restarts`).
        The first error is raised at once; the others' `worker.should_stop()` says so, and after two
        seconds their processes are replaced. With `engine="serial"` one worker follows the other,
        so they cannot wait for each other.

        Raises:
            TaskFailed: `fn` raised; the message has the worker and the traceback.
            WorkerFailed: a worker died more often than its budget allows.
            SchemaError, FunctionError, Refused, Closed, Disconnected: as `map`.
        """
        if isinstance(self._staff, Launched):
            self._watch.start()
        return self._staff.run(fn, resources, job)

    def _call(
        self,
        fn: Callable[..., Any],
        inputs: list[Any],
        resources: tuple[Any, ...],
        task_timeout: float | None,
        retries: int,
        job: str | None,
        all_of_them: bool = False,
    ) -> Calls:
        limit = checked_timeout(task_timeout, "task_timeout")
        retries = whole(retries, "retries", 0)
        self._watch.start()
        return self._staff.call(
            fn, inputs, resources, job, timeout=limit, retries=retries, all_of_them=all_of_them
        )

    def stats(self) -> Stats:
        """All counters and times as they are now; printed, it is a page that says who does what.

        Raises:
            Disconnected: the server is gone.
        """
        return self._staff.stats()

    def processes(self) -> dict[str, int]:
        """The numbers of the processes that it started and that live, by task: `worker:0`."""
        return self._staff.processes()

    def save(self) -> Path:
        """Write a checkpoint now, while training goes on; its folder.

        Its step is the number of batches handed over, those before it was resumed included.

        Raises:
            CheckpointError: it cannot be written, or there is no folder; what was saved stays.
            Closed, Disconnected: the cluster has ended.
        """
        if self._keeper is None:
            raise CheckpointError(
                "save: say in which folder: Cluster(..., checkpoint=), or session.save(folder)"
            )
        return self._keeper.save()

    def close(self) -> None:
        """End every process and thread of the cluster, within seconds. Idempotent.

        With a checkpoint's folder it is saved first, unless an error ended the `with` block.

        Raises:
            CheckpointError: the last checkpoint cannot be written; everything has ended.
        """
        closed, self._closed = self._closed, True
        if closed or self.session.connection.forked:
            # What a forked process has is a copy; the cluster is its parent's.
            return
        try:
            self._watch.close()
            try:
                if self._keeper is not None:
                    self._keeper.close(save=not self._failed)
            finally:
                self._progress.close()
                for collection in self._collections:
                    collection.close()
        except CheckpointError:
            raise
        except PacelineError as e:
            _log.warning("while closing: %s", str(e))
        finally:
            # They hold this cluster: a ring outlives its end until somebody looks for rings.
            self._collections = []
            self._staff.close()

    def _failing(self, error: BaseException) -> None:
        self._failed = not isinstance(error, KeyboardInterrupt | SystemExit)
        self._staff.failing(error)

    def _steps(self) -> int:
        """Batches handed over, those before it was resumed included."""
        return self._step + sum(each.tally.batches for each in self._collections)

    def _hear(self, collection: Collection[Any]) -> None:
        """A collection was opened or closed, or has handed over a batch."""
        if collection not in self._collections and not collection.closed:
            self._step += sum(c.tally.batches for c in self._collections if c.closed)
            self._collections = [*(c for c in self._collections if not c.closed), collection]
            self._watch.start()
        self._progress.update(collection)
        if self._keeper is not None:
            self._keeper.look()
