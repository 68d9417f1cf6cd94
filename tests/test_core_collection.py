"""The pace of a collection: lag is bounded and nobody waits for ever, in any interleaving."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from items import run

from paceline.core import versions
from paceline.core.collection_state import STALE_ROW, CollectionState
from paceline.core.errors import Closed, TooStale
from paceline.core.facts import CollectionFacts
from paceline.core.queue_state import QueueState
from paceline.core.waiting import NOT_YET

EPOCH = versions.first(7)


class PaceMachine(RuleBasedStateMachine):
    """A trainer and three workers; workers die and come back at any moment."""

    @initialize(
        batch_size=st.integers(1, 4), max_lag=st.one_of(st.none(), st.integers(0, 4)),
        ahead=st.integers(1, 3),
    )  # fmt: skip
    def begin(self, batch_size: int, max_lag: int | None, ahead: int) -> None:
        self.version = EPOCH + 1
        depth = 2 if max_lag is None else max_lag
        queue = QueueState("c", (depth + 1) * batch_size, 1 << 30)
        self.state = CollectionState(queue, batch_size, max_lag, lambda: self.version)
        self.ahead, self.before = ahead, 0
        self.started: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        self.credits = dict.fromkeys("abc", 0)
        self.asked = False

    def _admit(self, worker: str) -> bool:
        granted = self.state.admit(worker, self.ahead)
        if granted is NOT_YET:
            return False
        self.credits[worker] += granted
        return True

    @rule(worker=st.sampled_from("abc"))
    def worker_starts(self, worker: str) -> None:
        if self.credits[worker] == 0 and not self._admit(worker):
            return
        self.credits[worker] -= 1
        self.started[worker].append(self.version)

    @rule(worker=st.sampled_from("abc"))
    def worker_finishes(self, worker: str) -> None:
        if self.started[worker]:
            stamp = self.started[worker].pop(0)
            self.state.offer(worker, [run(0, stamp=stamp, producer=worker)], 0)

    @rule(worker=st.sampled_from("abc"))
    def worker_dies(self, worker: str) -> None:
        self.state.lost(worker)
        self.started[worker], self.credits[worker] = [], 0

    @rule()
    def trainer_asks(self) -> None:
        try:
            found = self.state.next(retry=self.asked)
        except TooStale:
            self.asked = True
            return
        self.asked = found is NOT_YET
        if found is NOT_YET:
            return
        items, lags = found
        assert len(items) == len(lags) == self.state.batch_size
        for made, lag in zip(items, lags, strict=True):
            assert lag == self.version - made.version >= 0
            assert self.state.max_lag is None or lag <= self.state.max_lag
        self.state.queue.receipt(self.state.queue.hand_out(items, "trainer"), "trainer")

    @rule(times=st.integers(1, 3))
    def trainer_assigns(self, times: int) -> None:
        if not self.asked:
            self.version += times

    @rule(as_it_was=st.booleans(), held=st.booleans())
    def all_begins_again(self, as_it_was: bool, held: bool) -> None:
        """With what was noted in this moment: as it was, or where its stamps say nothing."""
        queue = self.state.queue
        with suppress(TooStale):
            if held and (found := self.state.next(retry=self.asked)) is not NOT_YET:
                queue.hand_out(found[0], "trainer")
        noted, stored, ended = self.state.noted(), queue.stored, queue.counters
        assert isinstance(noted.facts, CollectionFacts)
        items = [
            run(0, stamp=piece.head.version, producer=piece.about[0])
            for piece in noted.pieces()
            for _ in range(piece.head.count)
        ]
        assert len(items) == stored
        if not as_it_was:
            self.version = versions.first(versions.epoch_of(self.version) + 1) + 1
        queue = QueueState("c", queue.capacity, queue.capacity_bytes)
        self.state = CollectionState(
            queue, self.state.batch_size, self.state.max_lag, lambda: self.version
        )
        self.state.revive(noted.facts, items)
        gone = 0 if as_it_was else stored
        assert (queue.counters.accepted, queue.counters.delivered, queue.stored) == (
            ended.accepted, ended.delivered, stored - gone,
        )  # fmt: skip
        assert queue.counters.dropped["epoch"] == ended.dropped["epoch"] + gone
        assert (self.state.started, self.state.finished) == (stored - gone, 0)
        self.before, self.asked = ended.delivered, False
        self.started, self.credits = {"a": [], "b": [], "c": []}, dict.fromkeys("abc", 0)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "state"):
            return
        counters = self.state.queue.counters
        dropped = sum(counters.dropped.values())
        assert counters.accepted == counters.delivered + dropped + self.state.queue.stored
        running = sum(map(len, self.started.values())) + sum(self.credits.values())
        assert self.state.running == running
        assert self.state.started == running + counters.accepted - dropped - self.before

    @invariant()
    def a_waiting_trainer_can_always_be_served(self) -> None:
        if not hasattr(self, "state") or not self.state.trainer_waits or self.state.running:
            return
        if self.state.queue.size < self.state.batch_size:
            assert self._admit("a")


TestPaceMachine = PaceMachine.TestCase
TestPaceMachine.settings = settings(deadline=None, max_examples=120, stateful_step_count=50)


def collection(batch_size: int, max_lag: int | None, now: list[int]) -> CollectionState:
    depth = 4 if max_lag is None else max_lag
    queue = QueueState("c", (depth + 1) * batch_size, 1 << 30)
    return CollectionState(queue, batch_size, max_lag, lambda: now[0])


def hand_in(state: CollectionState, worker: str, stamp: int) -> None:
    state.offer(worker, [run(0, stamp=stamp, producer=worker)], 0)


@given(st.integers(1, 5), st.integers(0, 5))
def test_so_many_items_are_started_ahead_and_not_one_more(batch_size: int, max_lag: int) -> None:
    state = collection(batch_size, max_lag, [EPOCH + 1])
    allowed = (max_lag + 1) * batch_size
    for _ in range(allowed):
        assert state.admit("w", 1) == 1
    assert state.admit("w", 1) is NOT_YET


@pytest.mark.parametrize(
    ("max_lag", "assigned", "depth"),
    [(0, 1, 0), (1, 1, 1), (4, 1, 4), (4, 2, 2), (4, 3, 1), (4, 5, 0), (4, 0, 4), (1, 3, 0)],
)
def test_the_depth_follows_what_was_assigned_between_two_asks(
    max_lag: int, assigned: int, depth: int
) -> None:
    now = [EPOCH + 1]
    state = collection(1, max_lag, now)
    for _ in range(2):
        assert state.next(retry=False) is NOT_YET
        assert state.admit("w", 1) == 1
        hand_in(state, "w", now[0])
        found = state.next(retry=True)
        assert found is not NOT_YET
        state.queue.hand_out(found[0], "trainer")
        now[0] += assigned
    state.next(retry=False)
    assert state.depth == depth


def test_too_old_ten_batches_in_a_row_is_said_with_versions_and_cause() -> None:
    now = [EPOCH + 1]
    state = collection(2, 0, now)
    said = r"^collection 'c': 20 items in a row were more than max_lag=0 versions old; the last: w"
    for step in range(STALE_ROW * 2):
        assert state.next(retry=step > 0) is NOT_YET
        assert state.admit("w", 1) == 1
        now[0] += 1
        hand_in(state, "w", now[0] - 1)
    with pytest.raises(TooStale, match=said):
        state.next(retry=True)


def test_items_of_an_older_epoch_are_dropped_for_that_reason() -> None:
    now = [versions.first(8) + 1]
    state = collection(1, None, now)
    state = CollectionState(state.queue, 1, 3, lambda: now[0])
    state.admit("w", 1)
    hand_in(state, "w", EPOCH + 5)
    assert state.next(retry=False) is NOT_YET
    assert dict(state.queue.counters.dropped) == {"epoch": 1}


def test_an_ended_collection_refuses_and_drops_what_is_left() -> None:
    now = [EPOCH + 1]
    state = collection(2, 1, now)
    state.admit("w", 2)
    hand_in(state, "w", now[0])
    state.end()
    hand_in(state, "w", now[0])
    assert dict(state.queue.counters.dropped) == {"closed": 2}
    assert state.queue.stored == 0
    with pytest.raises(Closed, match=r"^collection 'c' has ended$"):
        state.admit("w", 1)
    with pytest.raises(Closed, match=r"^collection 'c' has ended$"):
        state.next(retry=False)


def test_when_all_functions_have_returned_the_rest_is_no_batch() -> None:
    state = collection(2, 1, [EPOCH + 1])
    state.admit("w", 1)
    hand_in(state, "w", EPOCH + 1)
    assert state.next(retry=False) is NOT_YET
    state.drain("trainer")
    with pytest.raises(Closed, match=r"every worker's function has returned, 1 items are left"):
        state.next(retry=True)
