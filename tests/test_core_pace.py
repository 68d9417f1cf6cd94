"""The pace against a ledger kept apart: other writers, late receipts, deaths on both sides."""

from __future__ import annotations

import heapq
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from items import run

from paceline.core import versions
from paceline.core.collection_state import STALE_ROW, CollectionState
from paceline.core.errors import Closed, ProtocolError, TooStale
from paceline.core.queue_state import QueueState
from paceline.core.waiting import NOT_YET

FIRST = versions.first(7) + 1
WORKERS = st.sampled_from("abc")
BATCHES = 12


class Desk:
    """A collection, the version that its variable has, and its trainer's and workers' moves."""

    def __init__(
        self, batch_size: int, max_lag: int | None, depth: int = 9, nbytes: int = 1 << 30
    ) -> None:
        self.version = FIRST
        queue = QueueState("c", (depth + 1) * batch_size, nbytes)
        self.state = CollectionState(queue, batch_size, max_lag, lambda: self.version)

    def offer(self, worker: str, stamps: list[int], abandoned: int = 0) -> None:
        items = [run(0, stamp=stamp, producer=f"worker:{worker}") for stamp in stamps]
        self.state.offer(worker, items, abandoned)

    def made(self, stamp: int, worker: str = "a") -> None:
        """One item from its admission on."""
        assert self.state.admit(worker, 1) == 1
        self.offer(worker, [stamp])

    def ask(self, *, retry: bool = False) -> list[int] | None:
        """The lags of the next batch, which the trainer receipts at once."""
        found = self.state.next(retry=retry)
        if found is NOT_YET:
            return None
        runs, lags = found
        self.state.queue.receipt(self.state.queue.hand_out(runs, "trainer"), "trainer")
        return lags

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.state.queue.counters.dropped)


class Ledger(RuleBasedStateMachine):
    """What promise 7 says, word by word, beside the state that has to keep it."""

    @initialize(
        batch_size=st.integers(1, 4), max_lag=st.none() | st.integers(0, 4), depth=st.integers(0, 5)
    )
    def begin(self, batch_size: int, max_lag: int | None, depth: int) -> None:
        self.desk = Desk(batch_size, max_lag, depth)
        self.state = self.desk.state
        self.batch_size, self.max_lag, self.deepest = batch_size, max_lag, depth
        self.admissions = self.vain = 0
        self.running: dict[str, int] = dict.fromkeys("abc", 0)
        self.known: set[str] = set()
        self.asks: list[int] = []
        self.finished = self.delivered = self.drops = self.row = 0
        self.waits = self.same_ask = False
        self.delivery: int | None = None

    def _bound(self) -> int:
        assigned = max(1, self.asks[-1] - self.asks[-2]) if len(self.asks) > 1 else 1
        depth = self.deepest
        if self.max_lag is not None:
            depth = min(depth, self.max_lag // assigned)
        return (depth + 1 + self.finished) * self.batch_size

    def _dropped(self) -> int:
        """How many more were dropped since the last look."""
        before, self.drops = self.drops, sum(self.desk.dropped.values())
        return self.drops - before

    @rule(worker=WORKERS, want=st.integers(1, 3))
    def worker_asks_to_start(self, worker: str, want: int) -> None:
        started = self.admissions - self.vain - self.drops
        room = self._bound() - started
        if self.waits:
            missing = self.batch_size - self.state.queue.size - sum(self.running.values())
            room = max(room, missing)
        granted = self.state.admit(worker, want)
        assert (granted is NOT_YET) == (room <= 0)
        if granted is not NOT_YET:
            # More than one only where each of the others can still have one.
            spare = room - 1 - len(self.known - {worker})
            assert granted == 1 + max(0, min(want - 1, spare))
            self.known.add(worker)
            self.admissions += granted
            self.running[worker] += granted

    @rule(worker=WORKERS, made=st.integers(0, 3), vain=st.integers(0, 2), age=st.integers(0, 6))
    def worker_hands_in(self, worker: str, made: int, vain: int, age: int) -> None:
        made = min(made, self.running[worker])
        vain = min(vain, self.running[worker] - made)
        self.desk.offer(worker, [max(FIRST, self.desk.version - age)] * made, vain)
        self.known.add(worker)
        self.running[worker] -= made + vain
        self.vain += vain

    @rule(worker=WORKERS)
    def worker_dies(self, worker: str) -> None:
        self.state.lost(worker)
        self.known.discard(worker)
        self.vain += self.running[worker]
        self.running[worker] = 0

    @precondition(lambda self: self.delivery is None)
    @rule()
    def trainer_asks(self) -> None:
        if not self.same_ask:
            self.asks.append(self.desk.version)
            self.finished = self.delivered // self.batch_size
        try:
            found = self.state.next(retry=self.same_ask)
        except TooStale:
            self.row += self._dropped()
            assert self.row >= STALE_ROW * self.batch_size
            assert self.state.queue.size < self.batch_size
            self.row, self.waits, self.same_ask = 0, False, True
            return
        self.row += self._dropped()
        self.waits = self.same_ask = found is NOT_YET
        if found is NOT_YET:
            assert self.state.queue.size < self.batch_size
            assert self.row < STALE_ROW * self.batch_size
            return
        items, lags = found
        assert len(items) == len(lags) == self.batch_size
        for one, lag in zip(items, lags, strict=True):
            assert lag == self.desk.version - one.head.version
            assert self.max_lag is None or lag <= self.max_lag
        self.delivery = self.state.queue.hand_out(items, "trainer")
        self.row = 0

    @precondition(lambda self: self.delivery is not None)
    @rule(returned=st.booleans())
    def trainer_receipts(self, returned: bool) -> None:
        assert self.delivery is not None
        self.state.queue.receipt(self.delivery, "trainer", returned=returned)
        self.delivery = None
        self.delivered += 0 if returned else self.batch_size

    @rule()
    def trainer_dies_and_another_comes(self) -> None:
        self.state.lost("trainer")
        self.delivery = None

    @precondition(lambda self: self.waits)
    @rule()
    def the_trainers_wait_ends(self) -> None:
        self.state.give_up()
        self.waits = False

    @rule(times=st.sampled_from([1, 1, 3]))
    def somebody_assigns(self, times: int) -> None:
        self.desk.version += times

    @invariant()
    def the_ledgers_agree(self) -> None:
        if not hasattr(self, "state"):
            return
        queue = self.state.queue
        assert self.state.started == self.admissions - self.vain - self.drops
        assert self.state.running == sum(self.running.values())
        assert self.state.finished == self.finished
        assert queue.counters.accepted == self.delivered + self.drops + queue.stored
        assert queue.stored + self.state.running <= queue.capacity
        assert self.max_lag is not None or not self.drops

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        if not hasattr(self, "state") or not self.waits:
            return
        if self.state.queue.size == self.state.running == 0:
            granted = self.state.admit("a", 1)
            assert granted == 1
            self.known.add("a")
            self.admissions += 1
            self.running["a"] += 1


TestLedger = Ledger.TestCase
TestLedger.settings = settings(deadline=None, max_examples=100, stateful_step_count=50)


def simulate(
    batch_size: int, max_lag: int | None, assigns: int, durations: list[list[int]]
) -> tuple[Desk, list[int]]:
    """Run a trainer and workers by the tick; worker `w` takes `durations[w]` in turn for an item.

    The trainer takes two ticks for a batch, then assigns so often. The lags handed over.
    """
    desk = Desk(batch_size, max_lag)
    order = count()
    busy: list[tuple[int, int, int, int]] = []
    turns = [0] * len(durations)
    lags: list[int] = []
    now = handed = 0
    free_at, retry = 0, False
    while handed < BATCHES:
        while busy and busy[0][0] <= now:
            _, _, worker, stamp = heapq.heappop(busy)
            desk.offer(str(worker), [stamp])
        if free_at <= now:
            if free_at and not retry:
                desk.version += assigns
            got = desk.ask(retry=retry)
            retry = got is None
            if got is not None:
                lags += got
                handed += 1
                free_at = now + 2
        idle = set(range(len(durations))) - {worker for _, _, worker, _ in busy}
        for worker in sorted(idle):
            if desk.state.admit(str(worker), 1) is not NOT_YET:
                takes = durations[worker][turns[worker] % len(durations[worker])]
                turns[worker] += 1
                heapq.heappush(busy, (now + takes, next(order), worker, desk.version))
        assert busy or free_at > now, "nobody has anything left to do"
        now += 1
    return desk, lags


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6), st.integers(1, 9))
def test_with_one_assign_per_batch_items_in_order_are_never_wasted(
    batch_size: int, max_lag: int, workers: int, takes: int
) -> None:
    desk, lags = simulate(batch_size, max_lag, 1, [[takes]] * workers)
    assert desk.dropped == {}
    assert max(lags) <= max_lag
    assert desk.state.max_lag_seen == max(lags)


@given(
    st.integers(1, 4),
    st.none() | st.integers(0, 3),
    st.sampled_from([0, 1, 3]),
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_every_batch_comes_however_often_the_trainer_assigns(
    batch_size: int, max_lag: int | None, assigns: int, durations: list[list[int]]
) -> None:
    desk, lags = simulate(batch_size, max_lag, assigns, durations)
    assert len(lags) == BATCHES * batch_size
    if max_lag is None or assigns == 0:
        assert desk.dropped == {}
    else:
        assert max(lags) <= max_lag


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_a_lag_of_none_at_all_is_strictly_on_policy(
    batch_size: int, workers: int, takes: int
) -> None:
    desk, lags = simulate(batch_size, 0, 1, [[takes]] * workers)
    assert set(lags) == {0}
    assert desk.state.started == desk.state.queue.counters.delivered


def test_what_a_dead_worker_had_queued_still_counts_and_what_it_had_begun_does_not() -> None:
    desk = Desk(2, 0)
    assert desk.state.admit("a", 2) == 2
    desk.offer("a", [FIRST])
    desk.state.lost("a")
    assert desk.state.started == 1
    assert desk.state.admit("b", 5) == 1
    assert desk.state.admit("b", 1) is NOT_YET


def test_an_admission_that_ended_without_an_item_lets_another_start() -> None:
    desk = Desk(1, 0)
    assert desk.state.admit("a", 1) == 1
    assert desk.state.admit("b", 1) is NOT_YET
    desk.offer("a", [], abandoned=1)
    assert desk.state.admit("b", 1) == 1


def test_only_what_was_admitted_can_be_handed_in() -> None:
    desk = Desk(2, 1)
    assert desk.state.admit("a", 1) == 1
    said = r"^offer to collection 'c': 1 items and 1 abandoned ones, but 1 were admitted$"
    with pytest.raises(ProtocolError, match=said):
        desk.offer("a", [FIRST], abandoned=1)
    with pytest.raises(ProtocolError, match=r"but 0 were admitted$"):
        desk.offer("b", [FIRST])
    assert (desk.state.started, desk.state.running, desk.state.queue.stored) == (1, 1, 0)


def test_a_batch_that_came_back_is_not_finished() -> None:
    desk = Desk(1, 0)
    desk.made(FIRST)
    found = desk.state.next(retry=False)
    assert found is not NOT_YET
    desk.state.queue.hand_out(found[0], "trainer")
    desk.state.lost("trainer")
    assert desk.ask() == [0]
    assert desk.state.finished == 0
    assert desk.state.admit("a", 1) is NOT_YET
    assert desk.ask() is None
    assert desk.state.finished == 1
    assert desk.state.admit("a", 9) == 1


def test_bytes_hold_workers_back_until_the_trainer_needs_them() -> None:
    desk = Desk(2, 1, nbytes=1)
    desk.made(FIRST)
    assert desk.state.admit("a", 1) is NOT_YET
    assert desk.ask() is None
    assert desk.state.admit("a", 9) == 1


def test_fresh_items_that_wait_do_not_hide_that_all_others_are_too_old() -> None:
    desk = Desk(2, 0)
    desk.version += 1
    desk.made(desk.version, "fresh")
    said = r"^collection 'c': 20 items in a row .*; the last: worker:late made it with version 1,"
    assert desk.ask() is None
    for _ in range(STALE_ROW * 2 - 1):
        desk.made(FIRST, "late")
        assert desk.ask(retry=True) is None
    desk.made(FIRST, "late")
    with pytest.raises(TooStale, match=said):
        desk.ask(retry=True)
    assert not desk.state.trainer_waits
    assert desk.dropped == {"stale": 20}


def test_items_that_others_make_too_old_one_by_one_are_said_too() -> None:
    desk = Desk(2, 0)
    assert desk.ask() is None
    for _ in range(STALE_ROW * 2):
        desk.made(desk.version)
        assert desk.ask(retry=True) is None
        desk.version += 1
    with pytest.raises(TooStale, match=r"^collection 'c': 20 items in a row were more than"):
        desk.ask(retry=True)
    desk.made(desk.version)
    assert desk.ask(retry=True) is None


def test_a_batch_in_between_ends_the_row_of_drops() -> None:
    desk = Desk(1, 0)
    desk.version += 1
    assert desk.ask() is None
    for _ in range(3):
        for _ in range(STALE_ROW - 1):
            desk.made(FIRST)
            assert desk.ask(retry=True) is None
        desk.made(desk.version)
        assert desk.ask(retry=True) == [0]
        assert desk.ask() is None


@pytest.mark.parametrize("max_lag", [None, 0, 3])
def test_items_of_an_older_epoch_are_dropped_whatever_the_lag_allowed(max_lag: int | None) -> None:
    desk = Desk(1, max_lag)
    desk.made(FIRST)
    desk.version = versions.first(8) + 1
    assert desk.ask() is None
    assert desk.dropped == {"epoch": 1}


def test_without_a_variable_nothing_is_stamped_and_nothing_dropped() -> None:
    state = CollectionState(QueueState("c", 4, 1 << 30), 2, 0, None)
    assert state.admit("a", 9) == 4
    state.offer("a", [run(0, 1, producer="worker:0")], 0)
    found = state.next(retry=False)
    assert found is not NOT_YET
    assert found[1] == []
    assert state.stats()["version"] is None


def test_what_comes_back_after_the_end_is_dropped_and_given_to_nobody() -> None:
    desk = Desk(1, 0)
    desk.made(FIRST)
    found = desk.state.next(retry=False)
    assert found is not NOT_YET
    delivery = desk.state.queue.hand_out(found[0], "trainer")
    desk.state.end()
    over = [desk.state.over]
    desk.state.queue.receipt(delivery, "trainer", returned=True)
    assert [*over, desk.state.over] == [False, True]
    with pytest.raises(Closed, match=r"^collection 'c' has ended$"):
        desk.state.next(retry=True)
    assert (desk.dropped, desk.state.started) == ({"closed": 1}, 0)


def test_a_trainer_lost_after_the_end_leaves_nothing_stored() -> None:
    desk = Desk(1, 0)
    desk.made(FIRST)
    found = desk.state.next(retry=False)
    assert found is not NOT_YET
    desk.state.queue.hand_out(found[0], "trainer")
    desk.state.end()
    desk.state.lost("trainer")
    assert (desk.state.over, desk.state.queue.stored, desk.dropped) == (True, 0, {"closed": 1})
