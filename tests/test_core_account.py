"""Accounts of time: the causes' sum is the wall time, whatever happened."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.account import ADMISSION, BATCH, BUSY, IDLE, STARTING, Account, continued
from paceline.core.stats import CollectionStats, Place, Spent, Stats, WorkerStats, of_worker
from paceline.core.verdict import BEHIND, Finding, findings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_goes_to_the_cause_that_was_entered() -> None:
    clock = Clock()
    account = Account(BUSY, clock)
    clock.now = 103.0
    assert account.enter(IDLE) == BUSY
    clock.now = 104.0
    assert account.times() == (104.0, 100.0, IDLE, {BUSY: 3.0, IDLE: 1.0})


def test_a_block_gives_the_time_back_to_what_it_interrupted() -> None:
    clock = Clock()
    account = Account(BUSY, clock)
    with account.spent_on(BATCH):
        clock.now += 2.0
    clock.now += 1.0
    assert account.times().seconds == {BUSY: 1.0, BATCH: 2.0}


def test_other_threads_are_not_counted() -> None:
    clock = Clock()
    account = Account(BUSY, clock, mine=lambda: False)
    with account.spent_on(BATCH):
        clock.now += 2.0
    assert account.times().seconds == {BUSY: 2.0}


causes = st.sampled_from([BUSY, IDLE, BATCH, ADMISSION])


@given(st.lists(st.tuples(causes, st.floats(0, 1e4))), st.floats(0, 1e4), causes)
def test_the_sum_is_the_wall_time(spans: list[tuple[str, float]], later: float, cause: str) -> None:
    clock = Clock()
    account = Account(STARTING, clock)
    for each, seconds in spans:
        account.enter(each)
        clock.now += seconds
    times = continued(account.times(), later, cause)
    assert sum(times.seconds.values()) == pytest.approx(times.at - times.began)


def told(**changes: Any) -> dict[str, Any]:
    content = {
        "times": [110.0, 102.0, BUSY, {BUSY: 6.0, ADMISSION: 2.0}],
        "since": 5.0,
        "waits": [],
        "making": "play-1",
        "items": 7,
        "version": (9 << 31) + 12,
    }
    return content | changes


PLACE = Place("worker:0", True, 1, began=100.0, collection="play-1", occupied=True)


def test_what_came_before_the_account_was_starting() -> None:
    worker = of_worker(PLACE, told(since=0.0), {"play-1": 14}, now=110.0)
    assert worker.spent == Spent(10.0, {STARTING: 2.0, BUSY: 6.0, ADMISSION: 2.0})
    assert (worker.version, worker.behind, worker.items) == (12, 2, 7)


@pytest.mark.parametrize(
    ("waits", "occupied", "spent"),
    [
        ([], True, {BUSY: 11.0, ADMISSION: 2.0}),
        ([], False, {BUSY: 6.0, ADMISSION: 2.0, IDLE: 5.0}),
        ([[["start", "play-1"], 4.0]], True, {BUSY: 7.0, ADMISSION: 6.0}),
        ([[["start", "play-1"], 9.0]], True, {BUSY: 6.0, ADMISSION: 7.0}),
        ([[["items", "q"], 1.0]], True, {BUSY: 10.0, ADMISSION: 2.0, "queue": 1.0}),
        ([[["variable", "v"], 1.0]], True, {BUSY: 10.0, ADMISSION: 2.0, "variable": 1.0}),
    ],
)
def test_what_came_after_the_last_report_is_known_from_outside(
    waits: Any, occupied: bool, spent: dict[str, float]
) -> None:
    place = replace(PLACE, occupied=occupied)
    worker = of_worker(place, told(waits=waits), {}, now=115.0)
    assert {key: value for key, value in worker.spent.seconds.items() if value} == {
        STARTING: 2.0,
        **spent,
    }
    assert sum(worker.spent.seconds.values()) == pytest.approx(worker.spent.wall)


def test_a_worker_that_has_told_nothing_is_starting() -> None:
    worker = of_worker(PLACE, None, {}, now=103.0)
    assert worker.spent == Spent(3.0, {STARTING: 3.0})
    assert worker.version is worker.behind is None


COUNTERS = CollectionStats(
    accepted=10, delivered=4, dropped=MappingProxyType({"stale": 1}), stored=5, capacity=8,
    bytes=0, capacity_bytes=1, closed=False, batch_size=2, started=10, running=0, finished=2,
    depth=1, workers_making=1, workers_waiting=0, trainer_waits=False, max_lag_seen=1, version=50,
)  # fmt: skip


def run(
    wall: float, trainer: float, worker: float, *, version: int = 1, items: int = 1, starts: int = 1
) -> Stats:
    """A run of one worker, `wall` seconds old; seconds that trainer and worker have waited."""
    return Stats(
        wall=wall,
        chief=Spent(wall, {BUSY: wall - trainer, BATCH: trainer}),
        server=None,
        workers=(
            WorkerStats(
                "worker:0", True, starts, "play-1", items, version, 50 - version, 3.0, None,
                Spent(wall, {BUSY: wall - worker, ADMISSION: worker}),
            ),
        ),
        collections={"play-1": COUNTERS},
        queues={},
        variables={},
        calls={},
    )  # fmt: skip


def seen(before: Stats, now: Stats) -> list[Finding]:
    return list(findings(before, now))


@pytest.mark.parametrize(
    ("trainer", "worker", "verdict"),
    [
        (0.0, 0.0, None),
        (4.9, 0.0, None),
        (5.0, 0.0, "the workers are the bottleneck"),
        (5.0, 0.9, "the workers are the bottleneck"),
        (5.0, 1.0, None),
        (0.0, 5.0, "the trainer is the bottleneck"),
        (0.9, 5.0, "the trainer is the bottleneck"),
        (5.0, 5.0, "they take turns"),
        (2.0, 8.0, "they take turns"),
    ],
)
def test_who_waits_for_whom_is_told_with_the_shares(
    trainer: float, worker: float, verdict: str | None
) -> None:
    found = seen(run(20, 1, 1, version=49), run(30, 1 + trainer, 1 + worker, version=49, items=2))
    if verdict is None:
        assert found == []
    else:
        assert [each.about for each in found] == [("pace", "play-1")]
        assert verdict in found[0].text
        assert f"of the last 10 s the trainer waited {trainer / 10:.0%}" in found[0].text


@pytest.mark.parametrize(
    ("schedule", "advice"),
    [
        ("lag", r"they take turns; max_lag one higher lets them work at the same time$"),
        ("lockstep", r"they take turns; in lockstep they always do, schedule='lag' lets them work"),
    ],
)
def test_what_lets_them_work_at_the_same_time_is_told_by_schedule(
    schedule: Any, advice: str
) -> None:
    counters = {"play-1": replace(COUNTERS, schedule=schedule)}
    before, now = (
        replace(stats, collections=counters)
        for stats in (run(20, 1, 1, version=49), run(30, 6, 6, version=49, items=2))
    )
    [found] = seen(before, now)
    assert re.search(advice, found.text)


def test_a_worker_that_keeps_to_an_old_version_is_named() -> None:
    found = seen(run(20, 0, 0), run(30, 0, 0, items=5))
    assert [each.about for each in found] == [("version", "worker:0")]
    assert found[0].text.startswith(
        "worker:0 has made 4 items with version 1, which is 49 versions old: its function should"
    )


def test_a_worker_that_is_long_at_one_item_is_named() -> None:
    found = seen(run(20, 0, 0), run(30, 0, 0))
    assert found[0].text.startswith("worker:0 has been at one item for 3 s, with version 1; 49")


@pytest.mark.parametrize("behind", [BEHIND - 1, BEHIND])
def test_a_worker_may_be_some_versions_behind(behind: int) -> None:
    now = run(30, 0, 0, version=50 - behind, items=2)
    found = seen(run(20, 0, 0, version=50 - behind), now)
    assert bool(found) == (behind >= BEHIND)


def test_a_worker_that_was_started_again_in_between_is_not_judged() -> None:
    assert seen(run(20, 0, 0), run(30, 5, 5, items=5, starts=2)) == []


def test_a_snapshot_is_a_page_to_read() -> None:
    text = str(run(30, 15, 3))
    assert "chief     30.0 s: busy 50%, batch 50%" in text
    assert "worker:0  1 items, version 1 (49 behind); 30.0 s: busy 90%, admission 10%" in text
    assert "collection play-1: 5/8 items stored, 4 of 10 delivered, 1 dropped" in text
    assert COUNTERS.conserved
