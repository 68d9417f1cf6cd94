"""What a cluster says of itself: one immutable snapshot of all counters and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from paceline.core import account, versions
from paceline.core.account import ADMISSION, BATCH, BUSY, IDLE, QUEUE, STARTING, VARIABLE
from paceline.core.messages import NO_VERSION
from paceline.core.names import label, shown
from paceline.core.numbers import times
from paceline.core.schedule import ScheduleName

# What a request that waits at the server stands for, by what it waits for there.
_WAITS = {"start": ADMISSION, "batch": BATCH, "items": QUEUE, "room": QUEUE, "queue": QUEUE}


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a process's time went, in seconds; the sum of `seconds` is `wall`.

    The causes: `busy` (a worker in its function, the chief in the program, the server at work),
    `starting`, `idle` (nothing to do), `admission` (a worker may not start an item yet), `batch`
    (the chief waits for one), `calls` (it waits for results of calls), `variable` and `queue` (a
    wait in a read or in a queue), `requests` (round trips that wait for nothing), `server` (other
    waits there) and `handing over` (a worker copies and sends items).
    """

    wall: float
    seconds: Mapping[str, float]

    def share(self, *causes: str) -> float:
        """What part of the time went to these causes, 0 to 1."""
        return sum(self.seconds.get(cause, 0.0) for cause in causes) / max(self.wall, 1e-9)

    def __str__(self) -> str:
        parts = sorted(self.seconds.items(), key=lambda pair: -pair[1])
        shares = [f"{cause} {self.share(cause):.0%}" for cause, _ in parts]
        shown = [share for share in shares if not share.endswith(" 0%")]
        return f"{self.wall:.1f} s: {', '.join(shown)}"


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker as it is now; `spent` and `items` count since it was last started.

    `version` is the count of the version that its newest item was made with, `behind` how many
    versions have been assigned since; both are `None` without a stamped item. `silent` is for how
    long it has not told where its time goes, in seconds; `waits` is what it waits for at a server.
    `busy` is whether it has a function to run, `requests` how often it has asked servers something.
    """

    name: str
    alive: bool
    starts: int
    collection: str | None
    items: int
    version: int | None
    behind: int | None
    silent: float
    waits: str | None
    spent: Spent
    busy: bool = False
    requests: int = 0


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue's counters: accepted = delivered + dropped + stored, always."""

    accepted: int
    delivered: int
    dropped: Mapping[str, int]
    stored: int
    capacity: int
    bytes: int
    capacity_bytes: int
    closed: bool

    @property
    def conserved(self) -> bool:
        """Whether everything that was accepted is accounted for."""
        return self.accepted == self.delivered + sum(self.dropped.values()) + self.stored


@dataclass(frozen=True, slots=True)
class CollectionStats(QueueStats):
    """A collection's counters; of `started` admitted items `running` are not handed in.

    `version` is the count of the version that lag is measured against; `None` without stamps.
    """

    batch_size: int
    started: int
    running: int
    finished: int
    depth: int
    workers_making: int
    workers_waiting: int
    trainer_waits: bool
    max_lag_seen: int
    version: int | None
    schedule: ScheduleName = "lag"


Q = TypeVar("Q", bound=QueueStats)


@dataclass(frozen=True, slots=True)
class CallStats:
    """The calls of a job by `map`, `submit` and `run`: now, and in all.

    `retried` is how often one was begun again; `failed` are those that ended with an error, also
    because they were given up or cancelled.
    """

    waiting: int
    running: int
    done: int
    failed: int
    retried: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A cluster at one moment. The counters of each server are of one step of it.

    `servers` has the times of all by task; `server` those of the first. Without processes both are
    empty. `restarted` says how often each server was started again after it had died: the counters
    of what is there are those since then, and what it held and lost before is unknown.
    """

    wall: float
    chief: Spent
    server: Spent | None
    workers: tuple[WorkerStats, ...]
    collections: Mapping[str, CollectionStats]
    queues: Mapping[str, QueueStats]
    variables: Mapping[str, int]
    calls: Mapping[str, CallStats]
    servers: Mapping[str, Spent] = field(default_factory=dict)
    restarted: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"chief     {self.chief}"]
        if len(self.servers) > 1:
            lines += [f"{task}      {spent}" for task, spent in self.servers.items()]
        elif self.server is not None:
            lines.append(f"server    {self.server}")
        lines += [
            f"{task}      was started again {times(count)}: its counters are those since then, what"
            " it lost before is unknown"
            for task, count in self.restarted.items()
        ]
        lines += [_line(worker) for worker in self.workers]
        for kind, of_kind in (("collection", self.collections), ("queue", self.queues)):
            for name, queue in of_kind.items():
                dropped = sum(queue.dropped.values())
                lines.append(
                    f"{kind} {name}: {queue.stored}/{queue.capacity} items stored,"
                    f" {queue.delivered} of {queue.accepted} delivered, {dropped} dropped"
                )
        lines += [f"variable {name}: version {count}" for name, count in self.variables.items()]
        for job, calls in self.calls.items():
            if calls != CallStats(0, 0, 0, 0, 0):
                lines.append(
                    f"calls of {job}: {calls.done} done, {calls.failed} failed,"
                    f" {calls.running} running, {calls.waiting} waiting, {calls.retried} retries"
                )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Place:
    """What the launcher knows of a worker. `occupied`: it has a function to run."""

    name: str
    alive: bool
    starts: int
    began: float
    collection: str | None
    occupied: bool


def of_account(times: account.Times, began: float | None = None) -> Spent:
    """A closed account; what came before it, from `began` on, was starting."""
    seconds = dict(times.seconds)
    start = times.began
    if began is not None and began < start:
        seconds[STARTING] = seconds.get(STARTING, 0.0) + start - began
        start = began
    return Spent(times.at - start, MappingProxyType(seconds))


def of_worker(
    place: Place, told: Mapping[str, Any] | None, current: Mapping[str, int], now: float
) -> WorkerStats:
    """Put together what the launcher and the server know of a worker."""
    told = told or {}
    stamp = told.get("version", NO_VERSION)
    version = None if stamp == NO_VERSION else versions.count_of(stamp)
    newest = current.get(label(place.collection or ""))
    waits = [(key[0], key[-1], seconds) for key, seconds in told.get("waits", ())]
    return WorkerStats(
        name=place.name,
        alive=place.alive,
        starts=place.starts,
        collection=None if place.collection is None else label(place.collection),
        items=told.get("items", 0),
        version=version,
        behind=None if version is None or newest is None else max(0, newest - version),
        silent=told.get("since", 0.0) if told.get("times") else now - place.began,
        waits=shown(f"{waits[0][0]} '{waits[0][1]}'") if waits else None,
        spent=_continued(place, told, waits, now),
        busy=place.occupied,
        requests=told.get("requests", 0),
    )


def together(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several servers of a cluster say of resources and members, as if it were one."""
    found: dict[str, Any] = {}
    for content in contents:
        for kind, those in content.items():
            if kind != "members" and isinstance(those, dict):
                found.setdefault(kind, {}).update(those)
    members: dict[str, Any] = {}
    for content in contents:
        for name, told in content["members"].items():
            members[name] = _both(members[name], told) if name in members else told
    return found | {"members": members}


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A member as two servers see it: what it told last, what it made, and all it waits for."""
    told = [each for each in (one, other) if each["times"]]
    newest = min(told, key=lambda each: float(each["since"]), default=one)
    making = max(one, other, key=lambda each: int(each["items"]))
    return {
        "times": newest["times"],
        "since": newest["since"],
        "waits": [*one["waits"], *other["waits"]],
        "requests": one["requests"] + other["requests"],
        "making": one["making"] or other["making"],
        "items": making["items"],
        "version": making["version"],
    }


def frozen(content: Mapping[str, Mapping[str, Any]], kind: type[Q]) -> Mapping[str, Q]:
    """The counters of queues or collections, by name."""
    names = [field.name for field in fields(kind)]
    made = {}
    for name, counters in content.items():
        given = {key: counters[key] for key in names}
        given["dropped"] = MappingProxyType(dict(given["dropped"]))
        made[name] = kind(**given)
    return MappingProxyType(made)


def _continued(
    place: Place, told: Mapping[str, Any], waits: list[tuple[str, str, float]], now: float
) -> Spent:
    """A worker's account up to now: what came after its last report is known from outside."""
    if not told.get("times"):
        # It has not told anything yet.
        return Spent(now - place.began, MappingProxyType({STARTING: now - place.began}))
    times = account.Times(*told["times"])
    since = told["since"]
    waited = min(since, waits[0][2]) if waits else 0.0
    times = account.continued(times, since - waited, BUSY if place.occupied else IDLE)
    if waits:
        times = account.continued(times, waited, _WAITS.get(waits[0][0], VARIABLE))
    return of_account(times, place.began)


def _line(worker: WorkerStats) -> str:
    state = "" if worker.alive else ", dead"
    if worker.starts > 1:
        state += f", started {worker.starts} times"
    if worker.version is not None:
        state += f", version {worker.version}"
    if worker.behind:
        state += f" ({worker.behind} behind)"
    waits = f", waits for {worker.waits}" if worker.waits else ""
    return f"{worker.name}  {worker.items} items{state}{waits}; {worker.spent}"
