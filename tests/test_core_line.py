"""The order of a queue, whoever takes items, gives them back or dies holding them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from items import marks, run

from paceline.core.errors import Closed
from paceline.core.queue_items import Run
from paceline.core.queue_state import QueueState
from paceline.core.waiting import NOT_YET

CONSUMERS = st.sampled_from("abc")


def items(*marks: int, producer: str = "p") -> list[Run]:
    return [run(mark, producer=producer) for mark in marks]


def filled(n: int) -> QueueState:
    queue = QueueState("q", n, 1000)
    assert queue.enqueue(items(*range(n)), queue.ticket()) is True
    return queue


def take(queue: QueueState, n: int, consumer: str) -> int:
    """The delivery under which `consumer` now holds the next `n`."""
    found = queue.dequeue(n, n)
    assert found is not NOT_YET
    return queue.hand_out(found, consumer)


class Line(RuleBasedStateMachine):
    """Three consumers take from a full line and give back; the line stays in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = filled(12)
        self.free = list(range(12))
        self.held: dict[int, tuple[str, list[int]]] = {}
        self.next = 12

    @rule(n=st.integers(1, 4), consumer=CONSUMERS)
    def take(self, n: int, consumer: str) -> None:
        found = self.queue.dequeue(n, n)
        if found is NOT_YET:
            assert len(self.free) < n
            return
        assert marks(found) == self.free[:n]
        self.held[self.queue.hand_out(found, consumer)] = (consumer, self.free[:n])
        del self.free[:n]

    @rule(data=st.data(), returned=st.sampled_from([True, True, False]))
    def give_back_or_keep(self, data: Any, returned: bool) -> None:
        if self.held:
            delivery = data.draw(st.sampled_from(sorted(self.held)))
            consumer, mine = self.held.pop(delivery)
            self.queue.receipt(delivery, consumer, returned=returned)
            self.free = sorted(self.free + mine) if returned else self.free

    @rule(consumer=CONSUMERS)
    def die(self, consumer: str) -> None:
        self.queue.lost(consumer)
        for delivery in [d for d, (who, _) in self.held.items() if who == consumer]:
            self.free = sorted(self.free + self.held.pop(delivery)[1])

    @rule(odd=st.integers(0, 2))
    def put_and_sift(self, odd: int) -> None:
        if self.queue.enqueue(items(self.next), self.queue.ticket()) is True:
            self.free.append(self.next)
            self.next += 1
        out = self.queue.sift(lambda one: marks([one])[0] % 7 != odd)
        self.queue.drop(out, "odd")
        assert marks(out) == [mark for mark in self.free if mark % 7 == odd]
        self.free = [mark for mark in self.free if mark % 7 != odd]

    @invariant()
    def the_line_is_in_order(self) -> None:
        seen: list[Run] = []

        def see(one: Run) -> bool:
            seen.append(one)
            return True

        self.queue.sift(see)
        assert marks(seen) == self.free
        counters = self.queue.counters
        dropped = sum(counters.dropped.values())
        assert counters.accepted == counters.delivered + dropped + self.queue.stored
        held = sum(len(mine) for _, mine in self.held.values())
        assert self.queue.nbytes == self.queue.stored == len(self.free) + held
        assert self.queue.taken == counters.delivered + self.queue.stored - self.queue.size


TestLine = Line.TestCase
TestLine.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def test_items_return_to_their_places_also_between_those_of_others() -> None:
    queue = filled(6)
    first = take(queue, 2, "a")
    middle = take(queue, 2, "b")
    queue.receipt(first, "a", returned=True)
    around = take(queue, 3, "c")
    queue.receipt(middle, "b", returned=True)
    queue.receipt(around, "c", returned=True)
    assert marks(queue.dequeue(6, 6)) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 3)), max_size=12), st.data())
def test_each_producers_items_come_in_their_order_and_each_goes_to_one(
    puts: list[tuple[str, int]], data: Any
) -> None:
    queue = QueueState("q", 100, 1000)
    made = dict.fromkeys("xyz", 0)
    for producer, n in puts:
        batch = run(*range(made[producer], made[producer] + n), producer=producer)
        assert queue.enqueue([batch], queue.ticket()) is True
        made[producer] += n
    got: dict[str, list[int]] = {"x": [], "y": [], "z": []}
    while queue.size:
        consumer = data.draw(CONSUMERS)
        found = queue.dequeue(1, data.draw(st.integers(1, 4)))
        assert found is not NOT_YET
        delivery = queue.hand_out(found, consumer)
        returned = data.draw(st.booleans())
        queue.receipt(delivery, consumer, returned=returned)
        for one in found if not returned else []:
            got[one.producer] += marks([one])
    assert got == {producer: list(range(n)) for producer, n in made.items()}


@pytest.mark.parametrize(("capacity", "nbytes"), [(3, 1000), (1000, 3)])
def test_a_full_queue_takes_all_of_an_enqueue_or_none(capacity: int, nbytes: int) -> None:
    queue = QueueState("q", capacity, nbytes)
    assert queue.enqueue(items(0), queue.ticket()) is True
    assert queue.enqueue(items(1, 2, 3), queue.ticket()) is NOT_YET
    assert (queue.size, queue.nbytes) == (1, 1)
    assert queue.enqueue(items(1, 2), queue.ticket()) is True
    assert queue.enqueue(items(3), queue.ticket()) is NOT_YET


def test_what_a_consumer_holds_takes_room_until_its_receipt() -> None:
    queue = filled(2)
    delivery = take(queue, 1, "a")
    assert queue.enqueue(items(2), queue.ticket()) is NOT_YET
    queue.receipt(delivery, "b")
    queue.receipt(delivery + 1, "a")
    assert queue.enqueue(items(2), queue.ticket()) is NOT_YET
    queue.receipt(delivery, "a")
    assert queue.enqueue(items(2), queue.ticket()) is True


def test_a_closed_queue_waits_for_what_others_hold_and_may_give_back() -> None:
    queue = filled(2)
    delivery = take(queue, 2, "a")
    queue.close()
    queue.close()
    assert queue.dequeue(1, 1) is NOT_YET
    queue.lost("a")
    assert marks(queue.dequeue(1, 1)) == [0]
    queue.receipt(delivery, "a")
    assert queue.counters.delivered == 0


def test_a_second_close_can_still_cancel_and_none_takes_that_back() -> None:
    queue = filled(1)
    pending = queue.ticket()
    queue.close()
    assert queue.enqueue(items(1), pending) is NOT_YET
    queue.close(cancel=True)
    queue.close()
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue(items(1), pending)
    assert marks(queue.dequeue(1, 1)) == [0]


def test_a_second_close_lets_in_nobody_who_came_after_the_first() -> None:
    queue = filled(1)
    queue.close()
    late = queue.ticket()
    queue.close()
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue(items(1), late)


def test_a_queue_shows_its_counters() -> None:
    queue = filled(3)
    queue.drop(queue.sift(lambda one: marks([one]) != [1]), "odd")
    queue.receipt(take(queue, 1, "a"), "a")
    assert queue.stats() == {
        "accepted": 3, "delivered": 1, "dropped": {"odd": 1}, "stored": 1, "bytes": 1,
        "capacity": 3, "capacity_bytes": 1000, "per_producer": None, "order": "fifo",
            "closed": False,
    }  # fmt: skip
