"""The queue's state: conservation, order and bounds at every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from items import marks, run

from paceline.core.errors import Closed, SchemaError
from paceline.core.facts import QueueFacts
from paceline.core.messages import RunHead
from paceline.core.queue_items import Run, items_in
from paceline.core.queue_orders import ORDERS
from paceline.core.queue_state import QueueState
from paceline.core.waiting import HELD_BACK, NOT_YET

CAPACITY, BYTES = 5, 20
OWNERS = st.sampled_from("xyz")


def parts(marks: list[int], sizes: list[int]) -> list[list[int]]:
    """The marks, cut into runs of these sizes and one of the rest."""
    cut = []
    for size in sizes:
        cut.append(marks[:size])
        marks = marks[size:]
    return [one for one in [*cut, marks] if one]


class QueueMachine(RuleBasedStateMachine):
    """Producers and consumers of a queue of any order; some of them die."""

    @initialize(
        per_producer=st.one_of(st.none(), st.integers(1, 4)),
        order=st.sampled_from(ORDERS),
        behind=st.integers(0, CAPACITY - 1),
    )
    def begin(self, per_producer: int | None, order: str, behind: int) -> None:
        self.order = order
        self.behind = behind if order == "shuffle" else 0
        self.queue = QueueState("q", CAPACITY, BYTES, per_producer, order, self.behind)
        self.bound = CAPACITY if per_producer is None else per_producer
        self.made = 0
        self.waiting: list[int] = []
        self.held: dict[int, tuple[str, list[int]]] = {}
        self.delivered: list[int] = []
        self.dropped: list[int] = []
        self.closed = False
        self.owner: dict[int, str | None] = {}
        self.priority: dict[int, int] = {}
        self.each: dict[int, int] = {}

    def in_order(self, waiting: list[int]) -> list[int]:
        if self.order == "priority":
            return sorted(waiting, key=lambda mark: (self.priority[mark], mark))
        return sorted(waiting)

    def owed(self, owner: str) -> int:
        held = [mark for _, marks in self.held.values() for mark in marks]
        return sum(self.owner[mark] == owner for mark in self.waiting + held)

    @rule(
        count=st.integers(1, 3), nbytes=st.integers(0, 8), owner=OWNERS,
        sizes=st.lists(st.integers(1, 2), max_size=2),
        priorities=st.lists(st.integers(-1, 1), min_size=3, max_size=3),
    )  # fmt: skip
    def enqueue(
        self, count: int, nbytes: int, owner: str, sizes: list[int], priorities: list[int]
    ) -> None:
        marks = list(range(self.made, self.made + count))
        ranked = list(zip(parts(marks, sizes), priorities, strict=False))
        runs = [run(*part, nbytes=nbytes, owner=owner, priority=p) for part, p in ranked]
        before = (self.queue.stored, self.queue.nbytes)
        try:
            done = self.queue.enqueue(runs, self.queue.ticket())
        except Closed:
            assert self.closed
            return
        except SchemaError:
            assert count > self.bound or count * nbytes > BYTES
            return
        assert not self.closed
        allowed = self.owed(owner) + count <= self.bound or self.queue.per_producer is None
        fits = before[0] + count <= CAPACITY and before[1] + count * nbytes <= BYTES
        assert done is (True if allowed and fits else NOT_YET if allowed else HELD_BACK)
        if done:
            self.made += count
            self.priority |= {mark: p for part, p in ranked for mark in part}
            self.waiting = self.in_order(self.waiting + marks)
            self.owner |= dict.fromkeys(marks, owner)
            self.each |= dict.fromkeys(marks, nbytes)
        else:
            assert (self.queue.stored, self.queue.nbytes) == before

    @rule(least=st.integers(1, 3), more=st.integers(0, 2), consumer=st.sampled_from("ab"))
    def dequeue(self, least: int, more: int, consumer: str) -> None:
        before = self.queue.size
        free = before if self.closed else max(0, before - self.behind)
        try:
            runs = self.queue.dequeue(least, least + more)
        except SchemaError:
            assert not self.closed
            assert least + self.behind > CAPACITY
            return
        except Closed:
            assert self.closed
            assert before < least
            assert not self.held
            return
        if runs is NOT_YET:
            assert free < least
            assert self.queue.size == before
            return
        taken = marks(runs)
        assert self.order == "shuffle" or taken == self.waiting[: len(taken)]
        assert len(taken) == items_in(runs) == min(free, least + more)
        for mark in taken:
            self.waiting.remove(mark)
        self.held[self.queue.hand_out(runs, consumer)] = (consumer, taken)

    @rule(returned=st.booleans(), data=st.data())
    def receipt(self, returned: bool, data: Any) -> None:
        if not self.held:
            return
        delivery = data.draw(st.sampled_from(sorted(self.held)))
        consumer, marks = self.held[delivery]
        self.queue.receipt(delivery, "somebody else")
        self.queue.receipt(delivery, consumer, returned=returned)
        self.queue.receipt(delivery, consumer, returned=returned)
        del self.held[delivery]
        if returned:
            self.waiting = self.in_order(marks + self.waiting)
        else:
            self.delivered += marks

    @rule(consumer=st.sampled_from("ab"))
    def consumer_dies(self, consumer: str) -> None:
        self.queue.lost(consumer)
        for delivery, (holder, mine) in list(self.held.items()):
            if holder == consumer:
                del self.held[delivery]
                self.waiting = self.in_order(mine + self.waiting)

    @rule(owner=OWNERS)
    def producer_dies_and_comes_back(self, owner: str) -> None:
        self.queue.lost(owner)
        # What it had enqueued is still there, and bounds nobody.
        self.owner = {mark: None if of == owner else of for mark, of in self.owner.items()}

    @rule(odd=st.integers(0, 2))
    def drop_some(self, odd: int) -> None:
        out = self.queue.sift(lambda one: one.number % 3 != odd)
        self.queue.drop(out, "odd")
        gone = marks(out)
        self.dropped += gone
        self.waiting = [mark for mark in self.waiting if mark not in gone]

    @rule()
    def is_noted_and_made_again(self) -> None:
        noted = self.queue.noted()
        again = QueueState("q", *self.queue.definition)
        assert again.pristine
        runs = [
            run(*piece.head.columns[0], nbytes=self.each[piece.head.columns[0][0]], priority=rank)
            for piece in noted.pieces()
            for _, rank in [piece.about]
        ]
        assert isinstance(noted.facts, QueueFacts)
        again.revive(noted.facts, runs)
        assert again.stats() == self.queue.stats()
        for _, taken in self.held.values():
            self.waiting = self.in_order(taken + self.waiting)
        self.queue, self.held = again, {}
        # They are nobody's now, and bound nobody.
        self.owner = dict.fromkeys(self.owner)

    @rule(cancel=st.booleans())
    def close(self, cancel: bool) -> None:
        self.queue.close(cancel=cancel)
        self.closed = True

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "queue"):
            return
        counters = self.queue.counters
        dropped = sum(counters.dropped.values())
        assert counters.accepted == counters.delivered + dropped + self.queue.stored == self.made
        assert self.queue.stored <= CAPACITY
        assert 0 <= self.queue.nbytes <= BYTES
        assert self.queue.size == len(self.waiting)
        held = [mark for _, marks in self.held.values() for mark in marks]
        assert sorted(self.delivered + self.dropped + held + self.waiting) == list(range(self.made))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(deadline=None, max_examples=160, stateful_step_count=30)


def test_what_was_pending_at_close_still_gets_in_and_what_comes_after_does_not() -> None:
    queue = QueueState("q", 1, 100)
    assert queue.enqueue([run(0)], queue.ticket()) is True
    pending = queue.ticket()
    assert queue.enqueue([run(0)], pending) is NOT_YET
    queue.pending_enqueues = 1
    queue.close()
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue([run(0)], queue.ticket())
    taken = queue.dequeue(1, 1)
    assert taken is not NOT_YET
    queue.receipt(queue.hand_out(taken, "c"), "c")
    assert queue.dequeue(1, 1) is NOT_YET
    assert queue.enqueue([run(0)], pending) is True
    queue.pending_enqueues = 0
    last = queue.dequeue(1, 1)
    assert last is not NOT_YET
    delivery = queue.hand_out(last, "c")
    # It may come back, so it is too early to say that there will be nothing more.
    assert queue.dequeue(1, 1) is NOT_YET
    queue.receipt(delivery, "c")
    with pytest.raises(Closed, match=r"^dequeue 'q': it is closed and holds 0 items, 1 were asked"):
        queue.dequeue(1, 1)


def test_cancelling_refuses_what_was_pending() -> None:
    queue = QueueState("q", 1, 100)
    queue.enqueue([run(0)], queue.ticket())
    pending = queue.ticket()
    queue.close(cancel=True)
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue([run(0)], pending)


def test_more_than_it_can_ever_hold_is_refused_with_the_way_out() -> None:
    queue = QueueState("q", 2, 100)
    with pytest.raises(SchemaError, match=r"^enqueue 'q': 3 items of 3 bytes.*larger capacity="):
        queue.enqueue([run(0, 1, 2)], queue.ticket())
    with pytest.raises(SchemaError, match=r"^enqueue 'q': 1 items of 101 bytes"):
        queue.enqueue([run(0, nbytes=101)], queue.ticket())
    with pytest.raises(SchemaError, match=r"^dequeue 'q': 3 items in one step.*give it capacity=3"):
        queue.dequeue(3, 3)


def test_with_per_producer_one_is_held_back_and_others_are_not() -> None:
    queue = QueueState("q", 4, 100, per_producer=1)
    assert queue.enqueue([run(0, owner="x")], queue.ticket()) is True
    assert queue.enqueue([run(1, owner="x")], queue.ticket()) is HELD_BACK
    assert queue.enqueue([run(2, owner="y")], queue.ticket()) is True
    taken = queue.dequeue(1, 1)
    assert marks(taken) == [0]
    assert taken is not NOT_YET
    delivery = queue.hand_out(taken, "c")
    # Taken is not delivered: the consumer may still give it back.
    assert queue.enqueue([run(1, owner="x")], queue.ticket()) is HELD_BACK
    queue.receipt(delivery, "c")
    assert queue.enqueue([run(1, owner="x")], queue.ticket()) is True


def test_the_capacity_bounds_all_producers_also_with_per_producer() -> None:
    queue = QueueState("q", 2, 100, per_producer=2)
    assert queue.enqueue([run(0, owner="x")], queue.ticket()) is True
    assert queue.enqueue([run(1, owner="y")], queue.ticket()) is True
    assert queue.enqueue([run(2, owner="z")], queue.ticket()) is NOT_YET


def test_more_than_a_producer_may_ever_have_is_refused_with_the_way_out() -> None:
    queue = QueueState("q", 8, 100, per_producer=2)
    with pytest.raises(
        SchemaError,
        match=r"^enqueue 'q': 3 items in one step, but a producer may have 2 in it: enqueue fewer"
        r" at a time, or give it per_producer=3 or more$",
    ):
        queue.enqueue([run(0), run(1, 2)], queue.ticket())


def test_what_a_dead_producer_left_bounds_nobody_and_stays_stored() -> None:
    queue = QueueState("q", 4, 100, per_producer=1)
    queue.enqueue([run(0, owner="x")], queue.ticket())
    queue.lost("x")
    assert queue.stored == 1
    assert queue.enqueue([run(1, owner="x")], queue.ticket()) is True
    left = queue.dequeue(1, 1)
    assert left is not NOT_YET
    queue.receipt(queue.hand_out(left, "c"), "c")
    assert queue.counters.delivered == 1


def test_texts_count_item_by_item() -> None:
    head = RunHead(b"", 3, [["a", "bbb", ""], [0, 0, 0]])
    whole = Run(head, None, 10, "p", texts=(0,), number=7)
    first, rest = whole.split(1)
    assert (whole.nbytes, first.nbytes, rest.nbytes) == (34, 11, 23)
    assert (rest.number, rest.content()) == (8, (RunHead(b"", 2, [["bbb", ""], [0, 0]]), None))


def drawn(seed: int | None, *, back: bool = False) -> list[int]:
    """What comes out of a shuffled queue of twenty, five at a time, the first five twice."""
    queue = QueueState("q", 20, 100, order="shuffle", seed=seed)
    queue.enqueue([run(*range(12)), run(*range(12, 20))], queue.ticket())
    seen = []
    for turn in range(4 + back):
        taken = queue.dequeue(5, 5)
        assert taken is not NOT_YET
        queue.receipt(queue.hand_out(taken, "c"), "c", returned=back and turn == 0)
        seen += marks(taken)
    assert sorted(seen[5 * back :]) == list(range(20))
    return seen


def test_a_seed_draws_the_same_items_after_the_same_events() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(7, back=True) == drawn(7, back=True)
    assert drawn(7) != list(range(20))


def test_each_item_that_waits_is_as_likely_to_be_drawn() -> None:
    queue = QueueState("q", 1000, 1000, order="shuffle", min_after_dequeue=9, seed=1)
    queue.enqueue([run(*range(10))], queue.ticket())
    seen: Counter[int] = Counter()
    for _ in range(2000):
        taken = queue.dequeue(1, 1)
        seen += Counter(marks(taken))
        assert taken is not NOT_YET
        queue.receipt(queue.hand_out(taken, "c"), "c", returned=True)
    # 200 each, give or take five deviations.
    assert all(133 < seen[mark] < 267 for mark in range(10))


def test_so_many_stay_behind_until_a_shuffled_queue_is_closed() -> None:
    queue = QueueState("q", 5, 100, order="shuffle", min_after_dequeue=3)
    queue.enqueue([run(0, 1, 2)], queue.ticket())
    assert queue.dequeue(1, 1) is NOT_YET
    queue.enqueue([run(3)], queue.ticket())
    assert len(marks(queue.dequeue(1, 9))) == 1
    assert queue.dequeue(1, 1) is NOT_YET
    with pytest.raises(
        SchemaError,
        match=r"^dequeue 'q': 3 items in one step, but it holds at most 5, of which"
        r" min_after_dequeue=3 stay behind: take fewer, or give it capacity=6 or more$",
    ):
        queue.dequeue(3, 3)
    queue.close()
    assert len(marks(queue.dequeue(3, 3))) == 3


def test_the_lowest_priority_is_next_and_of_equal_ones_the_oldest() -> None:
    queue = QueueState("q", 9, 100, order="priority")
    queue.enqueue([run(0, 1, priority=5), run(2, priority=-3)], queue.ticket())
    queue.enqueue([run(3, 4, priority=5), run(5, priority=0)], queue.ticket())
    taken = queue.dequeue(3, 3)
    assert taken is not NOT_YET
    assert marks(taken) == [2, 5, 0]
    # What comes back is before what is of no lower priority, not before everything.
    delivery = queue.hand_out(taken, "c")
    queue.enqueue([run(6, priority=-9)], queue.ticket())
    queue.receipt(delivery, "c", returned=True)
    assert marks(queue.dequeue(7, 7)) == [6, 2, 5, 0, 1, 3, 4]
