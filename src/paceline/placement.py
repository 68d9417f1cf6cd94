"""Which server is to be the home of what a session makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeAlias

from paceline.core.errors import SchemaError, UnknownName
from paceline.core.numbers import whole
from paceline.core.spec import Spec, Task
from paceline.core.spreading import greedy

Setter: TypeAlias = Callable[[str, str, int], str | None]
"""Takes the kind, the name and the bytes of what is made; returns a task, or None for no wish."""

Strategy: TypeAlias = Callable[[str, str, int], int]
"""Takes what a setter takes; returns the place of the server among those to choose from."""


class _Serving(Protocol):
    """A spec, or a session: something that knows which tasks run servers."""

    def servers(self) -> Sequence[Any]: ...


class RoundRobin:
    """One server after the other, in the order in which things are made."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._placed = 0

    def __call__(self, kind: str, name: str, nbytes: int) -> int:
        place = self._placed % self._count
        self._placed += 1
        return place


class Greedy:
    """The server with the least load so far; of equal ones the first.

    The load of a thing is its bytes, unless there is a function to say it.
    """

    def __init__(self, count: int, load: Callable[[str, str, int], float] | None = None) -> None:
        self.loads = [0.0] * count
        self._load = load

    def __call__(self, kind: str, name: str, nbytes: int) -> int:
        load: Any = nbytes if self._load is None else self._load(kind, name, nbytes)
        if not isinstance(load, Real) or not 0 <= float(load) < float("inf"):
            raise SchemaError(f"load: a load is a number, 0 or more, not {load!r} for '{name}'")
        place = self.loads.index(min(self.loads))
        self.loads[place] += float(load)
        return place


class ReplicaDeviceSetter:
    """Chooses among the tasks with a strategy; for what it has been asked already, the same again.

    Any number of threads and sessions may use one, and the strategy itself, for something else.
    """

    def __init__(self, tasks: Sequence[Task], strategy: Strategy) -> None:
        self._tasks = [str(task) for task in tasks]
        self._strategy = strategy
        self._chosen: dict[tuple[str, str], str] = {}
        self._asked: list[tuple[str, str]] = []
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<replica_device_setter over {self._tasks}: {len(self._chosen)} placed>"

    def __call__(self, kind: str, name: str, nbytes: int) -> str:
        with self._lock:
            found = self._chosen.get((kind, name))
            if found is None:
                found = self._chosen[kind, name] = self._next(kind, name, nbytes)
            return found

    def _next(self, kind: str, name: str, nbytes: int) -> str:
        if (kind, name) in self._asked:
            raise SchemaError(f"ps_strategy makes the {kind} '{name}' when asked where that goes")
        self._asked.append((kind, name))
        try:
            found = self._strategy(kind, name, nbytes)
        finally:
            self._asked.pop()
        place = whole(found, "ps_strategy: the place of a server", 0)
        if place >= len(self._tasks):
            raise UnknownName(
                f"ps_strategy put the {kind} '{name}' on server {place}; there are {self._tasks}"
            )
        return self._tasks[place]


def replica_device_setter(
    cluster: _Serving | Mapping[str, Any] | None = None,
    *,
    ps_strategy: str | Strategy = "round_robin",
    ps_tasks: int | None = None,
    ps_job: str | None = None,
    load: Callable[[str, str, int], float] | None = None,
) -> Setter | None:
    """What `session.device` takes to spread what is made over the cluster's servers.

    Processes that make the same things in the same order propose the same homes. If they do not,
    the first proposal for a name decides, as always. What a setter was asked for before it does not
    count again.

    Args:
        cluster: a spec (or the dict of one) or a session.
        ps_strategy: `"round_robin"` takes one server after the other, `"greedy"` the one with the
            fewest bytes so far. Or a function of the kind ("variable", "queue", ...), the name and
            the bytes of what is made, which returns the place of a server, from 0 on, among those
            of `ps_job`. Only what has a known size has bytes: a variable, and an accumulator that
            is made of `like=`; of everything else they are 0. It may make something itself in the
            same session, for whose home it is asked in turn.
        ps_tasks: use the first that many servers of the job; without a cluster, its tasks from 0.
        ps_job: the job of the servers; by default all that run servers, without a cluster `ps`.
        load: a function of the same three, for `"greedy"`: what to count in place of bytes.

    Returns:
        A setter: a function of kind, name and bytes that returns a task. `None`, which proposes
        nothing, with `ps_tasks=0` and for a session without several servers: a program for many
        servers then runs with one, or none.

    Raises:
        SchemaError: it is not said which servers there are, or an argument is not of its kind.
        UnknownName: no server has that job, or it has fewer than `ps_tasks`.
    """
    tasks = _tasks(cluster, ps_tasks, ps_job)
    if load is not None and ps_strategy != "greedy":
        raise SchemaError(f"load= is for ps_strategy='greedy', not {ps_strategy!r}")
    if load is not None and not callable(load):
        raise SchemaError(f"load= is a function of the kind, the name and the bytes, not {load!r}")
    strategy: Strategy
    if ps_strategy == "greedy":
        strategy = Greedy(len(tasks), load)
    elif ps_strategy == "round_robin":
        strategy = RoundRobin(len(tasks))
    elif callable(ps_strategy):
        strategy = ps_strategy
    else:
        raise SchemaError(
            f"ps_strategy is 'round_robin', 'greedy' or a function, not {ps_strategy!r}"
        )
    return ReplicaDeviceSetter(tasks, strategy) if tasks else None


def placed(
    name: str, sizes: Mapping[str, int], tasks: Sequence[str], device: str | Setter | None
) -> list[str]:
    """The task of each leaf of a variable: where a setter puts it, all at one, or evenly."""
    if isinstance(device, str):
        return [device] * len(sizes)
    if device is None:
        return greedy([*sizes.items()], tasks)
    wished = [device("variable", f"{name}.{leaf}", nbytes) for leaf, nbytes in sizes.items()]
    return [tasks[0] if task is None else task for task in wished]


def _tasks(
    cluster: _Serving | Mapping[str, Any] | None, count: int | None, job: str | None
) -> list[Task]:
    if count is not None:
        count = whole(count, "ps_tasks", 0)
    if job is not None and not isinstance(job, str):
        raise SchemaError(f"ps_job is the name of a job, such as 'ps', not {job!r}")
    if cluster is None:
        if count is None:
            raise SchemaError("replica_device_setter: give a cluster, a session or ps_tasks=")
        return [Task(job or "ps", number) for number in range(count)]
    known = Spec(cluster) if isinstance(cluster, Mapping) else cluster
    if isinstance(known, type) or not hasattr(known, "servers"):
        raise SchemaError(
            "replica_device_setter: a cluster is a spec, the dict of one, or a session, not"
            f" {known!r}"
        )
    found = [Task.parse(str(task)) for task in known.servers()]
    tasks = [task for task in found if job is None or task.job == job]
    if found and not tasks:
        raise UnknownName(f"no server of the job {job!r}; there are {[*map(str, found)]}")
    if count is None or not found:
        return tasks
    if count > len(tasks):
        raise UnknownName(f"ps_tasks={count}; there are {[*map(str, tasks)]}")
    return tasks[:count]
