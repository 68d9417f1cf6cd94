"""Calls: each has one outcome, whatever becomes of the workers."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.budget import BACK_OFF, MOST_BACK_OFF, WINDOW, Budget
from paceline.core.call_state import Call, CallState
from paceline.core.waiting import NOT_YET


def state(*calls: Call) -> CallState:
    made = CallState()
    for call in calls:
        made.add(call)
    return made


def test_calls_are_leased_in_the_order_they_were_made() -> None:
    one, two = Call(1), Call(2)
    calls = state(one, two)
    assert [calls.take(0), calls.take(1), calls.take(2)] == [one, two, NOT_YET]


def test_a_worker_has_one_call_at_a_time() -> None:
    calls = state(Call(1), Call(2))
    calls.take(0)
    assert calls.take(0) is NOT_YET


def test_a_call_goes_to_the_worker_that_alone_may_run_it() -> None:
    one, two = Call(1, only=1), Call(2)
    calls = state(one, two)
    assert calls.take(0) is two
    assert calls.take(1) is one


def test_a_call_that_lost_its_worker_goes_first() -> None:
    one, two = Call(1, retries=1), Call(2)
    calls = state(one, two)
    calls.take(0)
    assert calls.lost(0) is one
    assert one.again
    calls.again(one)
    assert calls.take(1) is one
    assert not one.again


def test_a_call_without_a_limit_of_its_own_may_always_be_made_again() -> None:
    call = Call(1, retries=None, begun=1000)
    assert call.again


def test_the_time_limit_counts_from_when_the_function_begins() -> None:
    call = Call(1, timeout=5.0)
    calls = state(call)
    calls.take(0)
    assert calls.next_deadline() is None
    calls.began(0, 1, now=100.0)
    assert calls.next_deadline() == 105.0
    assert calls.overdue(104.9) == []
    assert calls.overdue(105.0) == [(0, call)]
    assert calls.next_deadline() is None


def test_what_a_worker_answers_too_late_is_ignored_and_frees_it() -> None:
    calls = state(Call(1, timeout=5.0), Call(2))
    calls.take(0)
    calls.began(0, 1, now=0.0)
    calls.overdue(5.0)
    assert calls.take(0) is NOT_YET
    assert calls.finish(0, 1) is None
    assert calls.take(0) is not NOT_YET


def test_a_call_given_up_is_no_ones_any_more() -> None:
    one, two = Call(1), Call(2)
    calls = state(one, two)
    calls.take(0)
    assert calls.cancel(two) is None
    assert calls.cancel(one) == 0
    assert calls.finish(0, 1) is None
    assert calls.end() == []


def test_calls_that_wait_for_one_worker_can_be_taken_out() -> None:
    one, two, three = Call(1, only=0), Call(2, only=1), Call(3)
    calls = state(one, two, three)
    assert calls.drop(1) == [two]
    assert calls.end() == [one, three]


class CallMachine(RuleBasedStateMachine):
    """Workers take, answer, die, are late and are given up, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = CallState()
        self.now = 0.0
        self.made: dict[int, Call] = {}
        self.outcomes: Counter[int] = Counter()
        self.runs: dict[int, int] = {}  # worker: the number it works on, as it sees it

    @rule(retries=st.integers(0, 2), timeout=st.none() | st.just(3.0), only=st.none() | st.just(1))
    def ask(self, retries: int, timeout: float | None, only: int | None) -> None:
        call = Call(len(self.made) + 1, retries, timeout, only)
        self.made[call.number] = call
        self.calls.add(call)

    @rule(worker=st.integers(0, 2))
    def take(self, worker: int) -> None:
        call = self.calls.take(worker)
        if call is NOT_YET:
            return
        assert worker not in self.runs
        assert call.only in (None, worker)
        self.runs[worker] = call.number
        self.calls.began(worker, call.number, self.now)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.runs)))
        call = self.calls.finish(worker, self.runs.pop(worker))
        if call is not None:
            self.outcomes[call.number] += 1

    @rule(worker=st.integers(0, 2))
    def die(self, worker: int) -> None:
        self.runs.pop(worker, None)
        self._lost(self.calls.lost(worker))

    @rule()
    def wait(self) -> None:
        self.now += 2.0
        for _, call in self.calls.overdue(self.now):
            self._lost(call)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(list(self.made.values())))
        if not self.outcomes[call.number]:
            self.calls.cancel(call)
            self.outcomes[call.number] += 1

    def _lost(self, call: Call | None) -> None:
        if call is None:
            return
        if call.again:
            self.calls.again(call)
        else:
            self.outcomes[call.number] += 1

    @invariant()
    def each_has_one_outcome_or_is_still_there(self) -> None:
        assert all(count <= 1 for count in self.outcomes.values())
        open_calls = len(self.made) - sum(self.outcomes.values())
        assert self.calls.waiting + self.calls.running == open_calls

    @invariant()
    def none_is_begun_more_often_than_it_may(self) -> None:
        assert all(call.begun <= (call.retries or 0) + 1 for call in self.made.values())


TestCallMachine = CallMachine.TestCase


def test_a_budget_bounds_the_restarts_within_its_window() -> None:
    budget = Budget(2)
    assert [budget.allow(0.0), budget.allow(1.0), budget.allow(WINDOW)] == [True, True, False]
    assert budget.allow(WINDOW + 0.1)


def test_the_pause_before_a_restart_doubles_up_to_a_limit() -> None:
    budget = Budget(100)
    pauses = []
    for _ in range(10):
        budget.allow(0.0)
        pauses.append(budget.back_off)
    assert pauses[:3] == pytest.approx([BACK_OFF, 2 * BACK_OFF, 4 * BACK_OFF])
    assert pauses[-1] == MOST_BACK_OFF
