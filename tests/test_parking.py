"""Waits that are asked again, ended and forgotten, also while others are being asked."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.clock import ManualClock
from paceline.core.errors import Closed, TimedOut
from paceline.core.waiting import HELD_BACK, NOT_YET
from paceline.server.parking import SPARE, Parked, Parking

TIMEOUTS = st.none() | st.integers(0, 5).map(float)


class Shelf(RuleBasedStateMachine):
    """Peers that wait for goods of a shelf, first come, first served, beside a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.parking = Parking(self.clock)
        self.goods = 0
        self.line: list[tuple[str, int, int, float | None]] = []
        self.numbers = 0
        self.told: list[tuple[int, Any]] = []
        self.expected: list[tuple[int, Any]] = []

    @rule(peer=st.sampled_from("xyz"), need=st.integers(1, 3), timeout=TIMEOUTS)
    def park(self, peer: str, need: int, timeout: float | None) -> None:
        self.numbers += 1
        number = self.numbers

        def attempt() -> Any:
            if need > self.goods:
                return NOT_YET
            self.goods -= need
            return need

        parked = Parked(
            peer, number, lambda: f"wait {number}", attempt,
            lambda result: self.told.append((number, str(result))),
        )  # fmt: skip
        self.parking.park("shelf", parked, timeout)
        deadline = None if timeout is None else self.clock.now() + timeout
        self.line.append((peer, number, need, deadline))

    @rule(more=st.integers(1, 4), in_order=st.booleans())
    def goods_come(self, more: int, in_order: bool) -> None:
        left = self.goods + more
        kept: list[tuple[str, int, int, float | None]] = []
        for wait in self.line:
            if wait[2] <= left and not (in_order and kept):
                left -= wait[2]
                self.expected.append((wait[1], str(wait[2])))
            else:
                kept.append(wait)
        self.goods += more
        self.parking.changed("shelf", in_order=in_order)
        assert self.goods == left
        self.line = kept

    @rule(seconds=st.integers(0, 3))
    def time_goes_by(self, seconds: int) -> None:
        self.clock.advance(seconds)
        now = self.clock.now()
        over = [wait for wait in self.line if wait[3] is not None and wait[3] <= now]
        self.line = [wait for wait in self.line if wait not in over]
        before = len(self.told)
        self.parking.expire()
        ended = sorted(number for number, _ in self.told[before:])
        assert ended == [number for _, number, _, _ in over]
        self.expected += self.told[before:]

    @rule(peer=st.sampled_from("xyz"), data=st.data())
    def cancel(self, peer: str, data: Any) -> None:
        number = data.draw(st.integers(1, self.numbers + 1))
        mine = [wait for wait in self.line if wait[:2] == (peer, number)]
        self.expected += [(number, f"wait {number}: cancelled")] * len(mine)
        self.line = [wait for wait in self.line if wait not in mine]
        self.parking.cancel(peer, number)

    @rule(peer=st.sampled_from("xyz"))
    def peer_is_lost(self, peer: str) -> None:
        self.parking.lost(peer)
        self.line = [wait for wait in self.line if wait[0] != peer]

    @invariant()
    def each_wait_is_told_once_and_as_expected(self) -> None:
        assert self.told == self.expected
        assert self.parking.waiting("shelf") == len(self.line)
        deadlines = [deadline for *_, deadline in self.line if deadline is not None]
        assert self.parking.timed == bool(deadlines)
        left = min(deadlines) - self.clock.now() if deadlines else None
        assert self.parking.next_deadline() == left


TestShelf = Shelf.TestCase
TestShelf.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)


def parked(peer: object, attempt: Any, answer: Any, number: int = 1) -> Parked:
    return Parked(peer, number, lambda: f"wait of {peer}", attempt, answer)


def test_an_attempt_that_raises_is_answered_with_its_error() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []
    parking.park("k", parked("a", lambda: 1 // 0, told.append), 5)
    parking.changed("k")
    [error] = told
    assert isinstance(error, ZeroDivisionError)
    assert (parking.waiting("k"), parking.timed) == (0, False)


def test_an_attempt_that_changes_what_it_waits_for_has_all_asked_once_more() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []
    stock = {"k": 0}

    def gives() -> Any:
        stock["k"] += 1
        parking.changed("k")
        return "gave"

    def takes() -> Any:
        return "took" if stock["k"] else NOT_YET

    parking.park("k", parked("first", takes, told.append), None)
    parking.park("k", parked("second", gives, told.append), None)
    parking.changed("k")
    assert told == ["gave", "took"]
    assert parking.waiting("k") == 0


def test_changes_within_changes_are_looked_at_in_the_order_they_came() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []

    def changing(*keys: str) -> Any:
        def answer(result: Any) -> None:
            told.append(result)
            for key in keys:
                parking.changed(key)

        return answer

    parking.park("a", parked("p", lambda: "a", changing("c", "b")), None)
    parking.park("b", parked("q", lambda: "b", changing("d")), None)
    parking.park("c", parked("r", lambda: "c", changing()), None)
    parking.park("d", parked("s", lambda: "d", changing()), None)
    parking.changed("a")
    assert told == ["a", "c", "b", "d"]


def test_a_wait_that_begins_while_others_are_asked_is_not_forgotten() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []
    open_now = {"late": False}

    def late() -> Any:
        return "late" if open_now["late"] else NOT_YET

    def answer(result: Any) -> None:
        told.append(result)
        parking.cancel("b", 7)
        parking.park("k", parked("late", late, told.append), None)

    parking.park("k", parked("a", lambda: "a", answer), None)
    parking.park("k", parked("b", lambda: NOT_YET, told.append, 7), None)
    parking.changed("k")
    assert parking.waiting("k") == 1
    open_now["late"] = True
    parking.changed("k")
    assert [str(said) for said in told] == ["a", "wait of b: cancelled", "late"]


def test_a_peer_lost_while_others_are_asked_is_not_asked() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []

    def answer(result: Any) -> None:
        told.append(result)
        parking.lost("b")

    parking.park("k", parked("a", lambda: "a", answer), None)
    parking.park("k", parked("b", lambda: "b", told.append), None)
    parking.changed("k")
    assert (told, parking.waiting("k")) == (["a"], 0)


def test_an_answer_that_cancels_its_own_wait_is_the_only_one() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []

    def answer(result: Any) -> None:
        told.append(result)
        parking.cancel("a", 1)

    parking.park("k", parked("a", lambda: "a", answer), 5)
    parking.changed("k")
    assert told == ["a"]


def test_the_wait_of_no_time_ends_at_once() -> None:
    parking = Parking(ManualClock(3.0))
    told: list[Any] = []
    parking.park("k", parked("a", lambda: NOT_YET, told.append), 0)
    parking.expire()
    [error] = told
    assert isinstance(error, TimedOut)
    assert str(error) == "wait of a, after 0.0 s"


class Memory:
    """Stands for the arrays that an attempt holds."""

    def __call__(self) -> str:
        return "done"


@pytest.mark.parametrize("how", ["answered", "cancelled", "lost"])
def test_a_wait_that_is_over_holds_no_memory_until_its_deadline(how: str) -> None:
    parking = Parking(ManualClock())
    memory = Memory()
    watched = weakref.ref(memory)
    parking.park("other", parked("b", lambda: NOT_YET, print), 1)
    parking.park("k", parked("a", memory, lambda result: None), 60)
    del memory
    if how == "answered":
        parking.changed("k")
    elif how == "cancelled":
        parking.cancel("a", 1)
    else:
        parking.lost("a")
    assert watched() is None


def test_deadlines_of_waits_that_are_over_do_not_pile_up() -> None:
    parking = Parking(ManualClock())
    parking.park("other", parked("b", lambda: NOT_YET, print), 1)
    for _ in range(1000):
        parking.park("k", parked("a", lambda: "a", lambda result: None), 60)
        parking.changed("k")
        assert len(parking._deadlines) <= 2 + SPARE + 1
    assert parking.next_deadline() == 1.0


PEERS = {name: object() for name in "abc"}


def lanes(*waits: tuple[str, Any]) -> tuple[Parking, dict[str, Any], list[str]]:
    """Waits that say what is in the dict under their name; the names of those answered."""
    parking = Parking(ManualClock())
    says = dict(waits)
    told: list[str] = []

    def tell(name: str, result: Any) -> None:
        told.append(name)

    for name, _ in waits:
        attempt, answer = partial(says.__getitem__, name), partial(tell, name)
        parking.park("room", Parked(PEERS[name[0]], 1, str, attempt, answer), None)
    return parking, says, told


def test_one_held_back_by_a_bound_of_its_own_is_passed_by_others_in_order() -> None:
    parking, says, told = lanes(("a1", HELD_BACK), ("b1", NOT_YET), ("c1", 1))
    parking.changed("room", in_order=True)
    assert told == []
    says["b1"] = 1
    parking.changed("room", in_order=True)
    assert told == ["b1", "c1"]
    says["a1"] = 1
    parking.changed("room", in_order=True)
    assert told == ["b1", "c1", "a1"]


def test_a_peers_own_waits_do_not_pass_each_other() -> None:
    parking, says, told = lanes(("a1", HELD_BACK), ("a2", 1), ("b1", 1))
    parking.changed("room", in_order=True)
    assert told == ["b1"]
    says["a1"] = 1
    parking.changed("room", in_order=True)
    assert told == ["b1", "a1", "a2"]


def test_who_comes_stands_behind_its_own_waits_and_behind_those_that_wait_for_all() -> None:
    parking, says, _ = lanes(("a1", HELD_BACK), ("a2", 1))
    parking.changed("room", in_order=True)
    assert parking.standing(PEERS["a"], "room") is HELD_BACK
    assert parking.standing(PEERS["b"], "room") is None
    says["a1"] = NOT_YET
    parking.changed("room", in_order=True)
    assert parking.standing(PEERS["b"], "room") is NOT_YET


def test_a_peer_that_may_not_wait_for_two_causes_waits_when_both_are_gone() -> None:
    parking = Parking(ManualClock())
    told: list[Any] = []

    def wait(number: int) -> None:
        parking.park("key", parked("x", lambda: NOT_YET, told.append, number), None)

    wait(1)
    parking.interrupt("x", "first", Closed("one"))
    parking.interrupt("x", "second", Closed("two"))
    wait(2)
    parking.allow("x", "first")
    parking.allow("x", "third")
    wait(3)
    assert list(map(str, told)) == ["one", "one", "two"]
    parking.allow("x", "second")
    wait(4)
    assert (len(told), parking.waiting("key")) == (3, 1)
    parking.interrupt("x", "first", Closed("one"))
    parking.lost("x")
    wait(5)
    assert (len(told), parking.waiting("key")) == (4, 1)
