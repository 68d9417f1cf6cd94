"""What holds a run up, told with numbers, and what to turn.

Looks at two snapshots some seconds apart. A share is the part of the time between them that went
to a cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.core.account import ADMISSION, BATCH
from paceline.core.schedule import ScheduleName
from paceline.core.stats import Spent, Stats, WorkerStats

MUCH = 0.5
"""Share of the time from which a wait is worth a warning."""

LITTLE = 0.1

_TOGETHER: dict[ScheduleName, str] = {
    "lag": "max_lag one higher lets them work at the same time",
    "lockstep": "in lockstep they always do, schedule='lag' lets them work at the same time",
}

BEHIND = 20
"""Versions that may be assigned while a worker keeps to an old one."""


class Finding(NamedTuple):
    """One thing to tell; `about` is the same for the same trouble."""

    about: tuple[str, str]
    text: str


def findings(before: Stats, now: Stats) -> Iterator[Finding]:
    """What is worth telling."""
    seconds = now.wall - before.wall
    earlier = {worker.name: worker for worker in before.workers}
    for worker in now.workers:
        if worker.name in earlier and worker.starts == earlier[worker.name].starts:
            yield from _on_worker(earlier[worker.name], worker)
    for name in now.collections:
        if name in before.collections and not now.collections[name].closed:
            makers = [
                (earlier[w.name].spent, w.spent)
                for w in now.workers
                if w.collection == name and w.name in earlier
                and w.starts == earlier[w.name].starts
            ]  # fmt: skip
            if makers:
                waiting = sum(_share(*pair, ADMISSION) for pair in makers) / len(makers)
                trainer = _share(before.chief, now.chief, BATCH)
                schedule = now.collections[name].schedule
                yield from _on_pace(name, seconds, trainer, waiting, len(makers), schedule)


def _on_worker(before: WorkerStats, now: WorkerStats) -> Iterator[Finding]:
    """A worker that does not take new versions: it does not ask, or its item takes long."""
    behind = now.behind
    if behind is None or behind < BEHIND or now.version != before.version:
        return
    made = now.items - before.items
    if made:
        yield Finding(
            ("version", now.name),
            f"{now.name} has made {made} items with version {now.version}, which is {behind}"
            " versions old: its function should read the variable (read or read_into) before each"
            " item",
        )
    elif now.waits is None:
        yield Finding(
            ("item", now.name),
            f"{now.name} has been at one item for {now.silent:.0f} s, with version {now.version};"
            f" {behind} versions were assigned since: shorter items, or a larger max_lag, waste"
            " less of its work",
        )


def _on_pace(
    name: str,
    seconds: float,
    trainer: float,
    workers: float,
    count: int,
    schedule: ScheduleName,
) -> Iterator[Finding]:
    """Who waits for whom."""
    waits = (
        f"collection '{name}': of the last {seconds:.0f} s the trainer waited {trainer:.0%} for"
        f" workers, {count} workers waited {workers:.0%} for the trainer"
    )
    if trainer >= MUCH and workers < LITTLE:
        yield Finding(
            ("pace", name),
            f"{waits}: the workers are the bottleneck; more workers (up to the cores there are), or"
            " less work per item, would help",
        )
    elif workers >= MUCH and trainer < LITTLE:
        yield Finding(
            ("pace", name),
            f"{waits}: the trainer is the bottleneck; fewer workers would do, or more training"
            " steps could use each batch; more workers would not help",
        )
    elif trainer + workers >= 2 * MUCH and min(trainer, workers) >= LITTLE:
        yield Finding(
            ("pace", name),
            f"{waits}: they take turns; {_TOGETHER[schedule]}",
        )


def _share(before: Spent, now: Spent, cause: str) -> float:
    spent = now.seconds.get(cause, 0.0) - before.seconds.get(cause, 0.0)
    return min(1.0, max(0.0, spent / max(1e-9, now.wall - before.wall)))
