"""The state of operations: what starts when, and that no call is lost or run twice."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.operation_state import Call, How, LaneState, OperationState
from paceline.core.waiting import NOT_YET

WAIT = 2.0
CALLERS = st.sampled_from("abc")


def call(operation: OperationState, caller: str, since: float = 0.0, layout: bytes = b"1") -> Call:
    return Call(operation, caller, None, layout, since)


class OperationMachine(RuleBasedStateMachine):
    """Callers that call, give up and die, beside threads that run what is due."""

    @initialize(threads=st.integers(1, 2), batch=st.one_of(st.none(), st.integers(1, 3)))
    def begin(self, threads: int, batch: int | None) -> None:
        self.now = 0.0
        self.lane = LaneState("lane", threads)
        wait = WAIT if batch else 0.0
        self.operations = [
            OperationState("one", How()),
            OperationState("many", How(None, batch, wait)),
        ]
        self.calls: list[Call] = []
        self.running: list[list[Call]] = []

    def waiting(self, **kind: Any) -> list[Call]:
        return [each for each in self.calls if not each.running and not each.given_up]

    @rule(caller=CALLERS, which=st.integers(0, 1), layout=st.sampled_from([b"1", b"2"]))
    def call(self, caller: str, which: int, layout: bytes) -> None:
        made = call(self.operations[which], caller, self.now, layout)
        self.calls.append(made)
        self.lane.add(made)

    @rule(seconds=st.sampled_from([0.5, WAIT]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        before = self.waiting()
        found = self.lane.take(self.now)
        if found is NOT_YET:
            if len(self.running) < self.lane.threads:
                # Only batches that are not full wait, for others who could still call.
                assert all(self.may_wait(each) for each in before)
                due = self.lane.next_due()
                assert due is None if not before else due is not None and due > self.now
            else:
                assert self.lane.next_due() is None
            return
        first = found[0]
        assert not any(each.given_up for each in found)
        assert len(found) <= (first.operation.how.batch or 1)
        assert {(each.operation, each.layout) for each in found} == {
            (first.operation, first.layout)
        }
        passed = before[: before.index(first)]
        assert all(self.may_wait(each) for each in passed if each not in found)
        alike = [e for e in before if (e.operation, e.layout) == (first.operation, first.layout)]
        if first.operation.how.batch is None:
            assert found == alike[:1]
        assert found == alike[alike.index(first) :][: len(found)]
        self.running.append(found)

    def may_wait(self, each: Call) -> bool:
        operation = each.operation
        waiting = {one.caller for one in self.calls if one.operation is operation and live(one)}
        return (
            operation.how.batch is not None
            and each.since + WAIT > self.now
            and bool(operation.callers - waiting)
        )

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), fails=st.booleans())
    def finish(self, which: int, fails: bool) -> None:
        group = self.running.pop(which % len(self.running))
        outcomes: list[Any] = [ValueError() if fails else number for number in range(len(group))]
        self.lane.finish(group, outcomes)
        for each, outcome in zip(group, outcomes, strict=True):
            assert each.outcome is (NOT_YET if each.given_up else outcome)

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 99))
    def give_up(self, which: int) -> None:
        self.lane.give_up(self.calls[which % len(self.calls)])

    @rule(caller=CALLERS)
    def die(self, caller: str) -> None:
        for each in self.calls:
            if each.caller == caller:
                self.lane.give_up(each)
        for operation in self.operations:
            operation.lost(caller)

    @invariant()
    def every_call_is_in_one_place(self) -> None:
        if not hasattr(self, "lane"):
            return
        assert self.lane.waiting == self.waiting()
        assert self.lane.running == len(self.running) <= self.lane.threads
        for operation in self.operations:
            stats = operation.stats()
            parts = ("done", "failed", "dropped", "waiting", "running")
            assert stats["calls"] == sum(stats[part] for part in parts)
            mine = [each for each in self.calls if each.operation is operation]
            assert stats["waiting"] == sum(each in self.lane.waiting for each in mine)
            assert stats["running"] == sum(each in group for group in self.running for each in mine)
            assert set(operation.busy) == {each.caller for each in mine if live(each)}


def live(each: Call) -> bool:
    return not each.given_up and each.outcome is NOT_YET


TestOperations = OperationMachine.TestCase
TestOperations.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_what_shares_a_thread_runs_in_the_order_of_arrival() -> None:
    lane, one, two = LaneState("", 1), OperationState("one", How()), OperationState("two", How())
    calls = [call(each, "a") for each in (one, two, one)]
    for each in calls:
        lane.add(each)
    for each in calls:
        assert lane.take(0.0) == [each]
        assert lane.take(9.0) is NOT_YET
        lane.finish([each], [None])


def test_a_batch_goes_when_it_is_full_or_its_time_is_up_or_all_who_call_wait() -> None:
    lane, act = LaneState("", 1), OperationState("act", How(None, 2, WAIT))
    one, two, three, four = (call(act, caller) for caller in "abca")
    lane.add(one)
    assert lane.take(0.0) == [one]
    lane.finish([one], [None])
    lane.add(two)
    assert lane.take(0.0) is NOT_YET
    assert lane.next_due() == WAIT
    assert lane.take(WAIT) == [two]
    lane.finish([two], [None])
    lane.add(three)
    assert lane.take(0.0) is NOT_YET
    lane.add(four)
    assert lane.take(0.0) == [three, four]


def test_who_has_died_is_not_waited_for() -> None:
    lane, act = LaneState("", 1), OperationState("act", How(None, 3, WAIT))
    gone = call(act, "a")
    lane.add(gone)
    lane.take(0.0)
    waits = call(act, "b")
    lane.add(waits)
    lane.finish([gone], [None])
    assert lane.take(0.0) is NOT_YET
    act.lost("a")
    assert lane.take(0.0) == [waits]


def test_while_a_batch_waits_for_more_the_thread_does_other_things() -> None:
    lane = LaneState("", 1)
    act, step = OperationState("act", How(None, 3, WAIT)), OperationState("step", How())
    act.callers.add("who could call")
    first, other = call(act, "a"), call(step, "a")
    lane.add(first)
    lane.add(other)
    assert lane.take(0.0) == [other]
