"""The states of counters and barriers, beside simple models."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.core.barrier_state import BarrierState
from paceline.core.counter_state import LEAST, MOST, CounterState
from paceline.core.errors import Closed, SchemaError
from paceline.core.waiting import NOT_YET


def test_a_counter_adds_up_and_says_when_it_is_there() -> None:
    counter = CounterState("step", 5)
    assert counter.reached(6) is NOT_YET
    assert (counter.add(1), counter.add(-3), counter.add(0)) == (6, 3, 3)
    assert (counter.reached(3), counter.reached(4)) == (3, NOT_YET)


def test_a_counter_stays_within_64_bits() -> None:
    counter = CounterState("step", MOST)
    with pytest.raises(SchemaError, match=r"^counter 'step' at 922\d+807, plus 1 is 922\d+808, wh"):
        counter.add(1)
    assert counter.value == MOST
    assert CounterState("low", LEAST).value == LEAST
    with pytest.raises(
        SchemaError, match=r"^counter 'low': start is -922\d+809, which is no int64"
    ):
        CounterState("low", LEAST - 1)


class BarrierMachine(RuleBasedStateMachine):
    """Tasks arrive, give up and die in any order."""

    @initialize(n=st.integers(1, 4))
    def begin(self, n: int) -> None:
        self.barrier = BarrierState("b", n)
        self.n = n
        self.waiting: list[int] = []
        self.through: dict[int, Any] = {}
        self.next = 0
        self.rounds = 0

    @rule()
    def arrive(self) -> None:
        complete = self.barrier.arrive(self.next, f"task:{self.next}")
        self.waiting.append(self.next)
        self.next += 1
        assert complete == (len(self.waiting) == self.n)
        if complete:
            self.through |= {each: place for place, each in enumerate(self.waiting)}
            self.waiting = []
            self.rounds += 1

    @rule(data=st.data(), dies=st.booleans())
    def goes(self, data: Any, dies: bool) -> None:
        if self.waiting:
            one = data.draw(st.sampled_from(self.waiting))
            (self.barrier.died if dies else self.barrier.leave)(one)
            self.waiting.remove(one)
            assert not dies or self.barrier.gone[-1] == f"task:{one}"

    @rule()
    def is_told(self) -> None:
        for one, place in self.through.items():
            if place is Closed:
                with pytest.raises(Closed, match=r"^wait at barrier 'b': x:1 aborted the round$"):
                    self.barrier.place(one)
            else:
                assert self.barrier.place(one) == place
            assert self.barrier.place(one) is NOT_YET
        self.through = {}

    @rule()
    def abort(self) -> None:
        self.barrier.abort("x:1")
        self.through |= dict.fromkeys(self.waiting, Closed)
        self.waiting = []

    @invariant()
    def only_those_who_wait_are_there(self) -> None:
        if hasattr(self, "barrier"):
            assert self.barrier.arrived == [f"task:{one}" for one in self.waiting]
            assert self.barrier.rounds == self.rounds
            assert [self.barrier.place(one) for one in self.waiting] == [NOT_YET] * len(
                self.waiting
            )


TestBarrierMachine = BarrierMachine.TestCase
TestBarrierMachine.settings = settings(deadline=None, max_examples=50, stateful_step_count=30)


def test_a_barrier_says_who_is_there_and_how_many_are_not() -> None:
    barrier = BarrierState("b", 3)
    assert barrier.missing() == "0 of 3 have arrived (nobody), 3 missing"
    barrier.arrive(1, "a:0")
    barrier.arrive(2, "a:1")
    barrier.died(1)
    assert barrier.missing() == "1 of 3 have arrived (a:1), 2 missing; gone since: a:0"


def test_a_barrier_for_nobody_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^barrier 'b': n is 1 or more, not 0$"):
        BarrierState("b", 0)
