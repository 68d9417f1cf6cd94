"""What a cluster asks of those who work for it, whoever started them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from paceline.collection import Collection
from paceline.core import messages as m
from paceline.core.account import Account, Times
from paceline.core.errors import SchemaError
from paceline.core.numbers import whole
from paceline.core.stats import (
    CallStats,
    CollectionStats,
    Place,
    QueueStats,
    Stats,
    frozen,
    of_account,
    of_worker,
    together,
)  # fmt: skip
from paceline.engines.wishes import MIRROR
from paceline.plans import Plan
from paceline.session import Session

F = TypeVar("F", bound=Callable[..., Any])

OnChange: TypeAlias = Callable[[Collection[Any]], None]


class Calls(Protocol):
    """Calls of one function that were asked for."""

    @property
    def futures(self) -> list[Future[Any]]: ...

    def results(self) -> list[Any]:
        """What they return, once they have; the first error is raised, unless all are wanted."""


class Staff(ABC):
    """The tasks of one cluster, and this process's session on it."""

    session: Session

    is_chief: bool = True
    """Whether this process is the one that trains."""

    concurrent: bool = True
    """Whether workers run beside the caller."""

    def led(self, variable: F) -> F:
        """`Session.variable` for the program: where all tasks run it, the chief's value counts."""
        return variable

    @property
    def watched(self) -> bool:
        """Whether there are others here to be looked at."""
        return self.concurrent and self.is_chief

    @abstractmethod
    def collect(
        self, plan: Plan, number: int, job: str | None, on_change: OnChange
    ) -> Collection[Any]:
        """Have the workers of a job make items; `on_change` hears of the collection from then on.

        `number` counts the calls of this kind in the program, from 1.

        Raises:
            FunctionError: the plan's function cannot be sent to a worker.
            Refused: the job has calls that wait or run.
        """

    @abstractmethod
    def call(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[Any],
        resources: tuple[Any, ...],
        job: str | None,
        *,
        timeout: float | None,
        retries: int,
        all_of_them: bool = False,
    ) -> Calls:
        """Have `fn` called for each input, by whichever worker of a job is free."""

    @abstractmethod
    def run(self, fn: Callable[..., Any], resources: tuple[Any, ...], job: str | None) -> list[Any]:
        """Have `fn` called once in every worker of a job; what it returns, in their order."""

    @abstractmethod
    def stats(self) -> Stats:
        """All counters and times as they are now."""

    def at(self, worker: str) -> str:
        """How far a worker got and what it runs now, as the end of a message, if that is known."""
        return ""

    def processes(self) -> dict[str, int]:
        """The processes that were started here and live, by their tasks."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the session, and every process and thread that was started here."""

    def failing(self, error: BaseException) -> None:  # noqa: B027 - most need not know
        """An error ended the cluster's `with` block; closing is the next step."""

    def snapshot(
        self, mine: Account, places: Sequence[Place], calls: Mapping[str, CallStats]
    ) -> Stats:
        """What the servers say now, and what is known here: of this process, and of workers."""
        contents = [content for _, content in self.session.lines.asked(m.Stats())]
        content, now = together(contents), time.monotonic()
        current = {
            name: state["version"]
            for name, state in content["collections"].items()
            if state["version"] is not None
        }
        servers = {
            f"ps:{index}": of_account(Times(*each["server"]))
            for index, each in enumerate(contents)
            if each["server"] is not None
        }
        chief = of_account(mine.times())
        return Stats(
            wall=chief.wall,
            chief=chief,
            server=next(iter(servers.values()), None),
            workers=tuple(
                of_worker(place, content["members"].get(place.name), current, now)
                for place in places
            ),
            collections=frozen(content["collections"], CollectionStats),
            queues=frozen(content["queues"], QueueStats),
            variables=MappingProxyType(content["variables"]),
            calls=MappingProxyType(dict(calls)),
            servers=MappingProxyType(servers),
        )


def checked_job(job: str, jobs: list[str]) -> str:
    """`job`, if it is one of `jobs`; else SchemaError."""
    if job not in jobs:
        raise SchemaError(f"no workers of job {job!r}; there are {jobs}")
    return job


def jobs_of(workers: int | dict[str, int]) -> dict[str, int]:
    """How many workers each job has.

    Raises:
        SchemaError: none, or that is no job of workers.
    """
    jobs = workers if isinstance(workers, dict) else {"worker": workers}
    for job in jobs:
        if job in ("chief", "ps", MIRROR):
            raise SchemaError(f"the job {job!r} is not one of workers")
    if not jobs:
        raise SchemaError("a cluster has at least one worker")
    return {job: whole(n, f"the number of workers of job {job!r}") for job, n in jobs.items()}
