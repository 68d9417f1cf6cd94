"""The queue's state: conservation, order and bounds at every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.errors import Closed, SchemaError
from paceline.core.messages import Head
from paceline.core.queue_state import Item, QueueState
from paceline.core.waiting import NOT_YET

CAPACITY, BYTES = 5, 20


def item(producer: str = "p", nbytes: int = 1, mark: int = 0) -> Item:
    return Item(Head(b"", [mark]), None, nbytes, producer)


class QueueMachine(RuleBasedStateMachine):
    """Producers and consumers in any order, some of which die."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = QueueState("q", CAPACITY, BYTES)
        self.made = 0
        self.waiting: list[int] = []
        self.held: dict[int, tuple[str, list[int]]] = {}
        self.delivered: list[int] = []
        self.closed = False

    @rule(count=st.integers(1, 3), nbytes=st.integers(0, 8))
    def enqueue(self, count: int, nbytes: int) -> None:
        marks = list(range(self.made, self.made + count))
        items = [item(nbytes=nbytes, mark=mark) for mark in marks]
        before = (self.queue.stored, self.queue.nbytes)
        try:
            done = self.queue.enqueue(items, self.queue.ticket())
        except Closed:
            assert self.closed
            return
        except SchemaError:
            assert count > CAPACITY or count * nbytes > BYTES
            return
        assert not self.closed
        fits = before[0] + count <= CAPACITY and before[1] + count * nbytes <= BYTES
        assert (done is not NOT_YET) == fits
        if fits:
            self.made += count
            self.waiting += marks
        else:
            assert (self.queue.stored, self.queue.nbytes) == before

    @rule(least=st.integers(1, 3), more=st.integers(0, 2), consumer=st.sampled_from("ab"))
    def dequeue(self, least: int, more: int, consumer: str) -> None:
        before = self.queue.size
        try:
            items = self.queue.dequeue(least, least + more)
        except Closed:
            assert self.closed
            assert before < least
            assert not self.held
            return
        if items is NOT_YET:
            assert before < least
            assert self.queue.size == before
            return
        marks = [i.head.values[0] for i in items]
        assert marks == self.waiting[: len(marks)]
        assert len(marks) == min(before, least + more)
        del self.waiting[: len(marks)]
        self.held[self.queue.hand_out(items, consumer)] = (consumer, marks)

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
            self.waiting = sorted(marks + self.waiting)
        else:
            self.delivered += marks

    @rule(consumer=st.sampled_from("ab"))
    def consumer_dies(self, consumer: str) -> None:
        self.queue.lost(consumer)
        for delivery, (holder, marks) in list(self.held.items()):
            if holder == consumer:
                del self.held[delivery]
                self.waiting = sorted(marks + self.waiting)

    @rule(cancel=st.booleans())
    def close(self, cancel: bool) -> None:
        self.queue.close(cancel=cancel)
        self.closed = True

    @invariant()
    def everything_is_accounted_for(self) -> None:
        counters = self.queue.counters
        dropped = sum(counters.dropped.values())
        assert counters.accepted == counters.delivered + dropped + self.queue.stored == self.made
        assert self.queue.stored <= CAPACITY
        assert 0 <= self.queue.nbytes <= BYTES
        held = [mark for _, marks in self.held.values() for mark in marks]
        assert sorted(self.delivered + held + self.waiting) == list(range(self.made))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)


def test_what_was_pending_at_close_still_gets_in_and_what_comes_after_does_not() -> None:
    queue = QueueState("q", 1, 100)
    assert queue.enqueue([item()], queue.ticket()) is True
    pending = queue.ticket()
    assert queue.enqueue([item()], pending) is NOT_YET
    queue.pending_enqueues = 1
    queue.close()
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue([item()], queue.ticket())
    taken = queue.dequeue(1, 1)
    assert taken is not NOT_YET
    queue.receipt(queue.hand_out(taken, "c"), "c")
    assert queue.dequeue(1, 1) is NOT_YET
    assert queue.enqueue([item()], pending) is True
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
    queue.enqueue([item()], queue.ticket())
    pending = queue.ticket()
    queue.close(cancel=True)
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue([item()], pending)


def test_more_than_it_can_ever_hold_is_refused_with_the_way_out() -> None:
    queue = QueueState("q", 2, 100)
    with pytest.raises(SchemaError, match=r"^enqueue 'q': 3 items of 3 bytes.*larger capacity="):
        queue.enqueue([item()] * 3, queue.ticket())
    with pytest.raises(SchemaError, match=r"^enqueue 'q': 1 items of 101 bytes"):
        queue.enqueue([item(nbytes=101)], queue.ticket())
    with pytest.raises(SchemaError, match=r"^dequeue 'q': 3 items in one step.*give it capacity=3"):
        queue.dequeue(3, 3)
