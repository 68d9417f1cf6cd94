"""The accumulator's state: what is accepted, what a take gives, and whom it waits for."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.core.accumulator_state import AccumulatorState, Gradient
from paceline.core.arithmetic import mean, mean_values
from paceline.core.errors import SchemaError, WorkerLeft
from paceline.core.facts import AccumulatorFacts
from paceline.core.tree import flatten
from paceline.core.versions import first
from paceline.core.waiting import NOT_YET, Stored

LAYOUT = flatten(0.0).layout
CAPACITY = 4
BASE = first(7)
TASKS = st.sampled_from("abc")


def tree(mark: float) -> Stored:
    return Stored(LAYOUT, [mark], None)


def marks(gradients: Any) -> list[float]:
    return [each.tree.values[0] for each in gradients]


def made(**options: Any) -> AccumulatorState:
    state = AccumulatorState(
        "g", LAYOUT, **{"variable": "v", "max_lag": 0, "capacity": CAPACITY, **options}
    )
    state.advance(BASE + 1)
    return state


class AccumulatorMachine(RuleBasedStateMachine):
    """Contributors that come, go and come back, beside one who takes and one who assigns."""

    @initialize(max_lag=st.one_of(st.none(), st.integers(0, 2)), linked=st.booleans())
    def begin(self, max_lag: int | None, linked: bool) -> None:
        self.linked, self.max_lag = linked, max_lag
        self.state = made(variable="v" if linked else None, max_lag=max_lag)
        self.version = BASE + 9
        self.state.advance(self.version)
        self.step_taken = False
        self.marks = count()
        self.held: list[tuple[str, int, int]] = []
        self.there: set[str] = set()
        self.gone: set[str] = set()
        self.ended = {"taken": 0, "stale": 0, "late": 0, "epoch": 0}

    def allowed(self, version: int, target: int) -> bool:
        return not self.linked or self.max_lag is None or target - version <= self.max_lag

    def drop(self, target: int, reason: str) -> None:
        kept = [each for each in self.held if self.allowed(each[1], target)]
        self.ended[reason] += len(self.held) - len(kept)
        self.held = kept

    @rule(task=TASKS)
    def join(self, task: str) -> None:
        self.state.join(task, task)
        self.there.add(task)
        self.gone.discard(task)

    @rule(task=TASKS)
    def leave(self, task: str) -> None:
        assert self.state.leave(task) is (task in self.there)
        if task in self.there:
            self.there.remove(task)
            self.gone.add(task)

    @rule(task=TASKS, age=st.integers(0, 3), older_epoch=st.booleans())
    def apply(self, task: str, age: int, older_epoch: bool) -> None:
        self.join(task)
        version = first(6) + 1 if older_epoch else self.version - age
        mark = next(self.marks)
        found = self.state.apply(task, tree(float(mark)), version if self.linked else None)
        if self.linked and older_epoch:
            self.ended["epoch"] += 1
            assert found is False
        elif not self.allowed(version, self.version):
            self.ended["stale"] += 1
            assert found is False
        elif not self.allowed(version, self.version + self.step_taken):
            self.ended["late"] += 1
            assert found is False
        elif len(self.held) == CAPACITY:
            assert found is NOT_YET
        else:
            assert found is True
            self.held.append((task, version, mark))

    @rule()
    def assign(self) -> None:
        self.version += 1
        self.step_taken = False
        before = len(self.held)
        self.drop(self.version, "stale")
        assert self.state.advance(self.version) is (len(self.held) < before)

    @rule(n=st.integers(1, CAPACITY), on_leave=st.sampled_from(["raise", "lower", "wait"]))
    def take(self, n: int, on_leave: str) -> None:
        gave = {task for task, _, _ in self.held}
        possible = len(self.held) + len(self.there - gave)
        wanted = min(n, possible) if on_leave == "lower" and self.gone else n
        try:
            most = self.state.ready(n, on_leave)
        except WorkerLeft:
            assert self.gone
            assert possible < n
            assert on_leave == "raise" or (on_leave == "lower" and possible == 0)
            return
        if len(self.held) < wanted:
            assert most is NOT_YET
            assert not self.gone or possible >= wanted or on_leave == "wait"
            return
        assert most == wanted
        expected, self.held = self.held[:wanted], self.held[wanted:]
        assert marks(self.state.take(wanted)) == [mark for _, _, mark in expected]
        self.ended["taken"] += wanted
        self.step_taken = True
        self.drop(self.version + 1, "late")

    @rule()
    def is_noted_and_made_again(self) -> None:
        noted = self.state.noted()
        assert isinstance(noted.facts, AccumulatorFacts)
        held = [
            Gradient(piece.about, piece.head.version if self.linked else None, tree(mark), None)
            for piece in noted.pieces()
            for (mark,) in piece.head.columns
        ]
        self.state = made(variable="v" if self.linked else None, max_lag=self.max_lag)
        self.state.advance(self.version)
        assert self.state.pristine
        self.state.revive(noted.facts, held)
        # Nobody contributes but who comes again.
        self.there, self.gone = set(), set()
        self.held = [("", version, mark) for _, version, mark in self.held]

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        stats = self.state.stats()
        assert stats["held"] == len(self.held)
        assert stats["applied"] == stats["taken"] + sum(stats["dropped"].values()) + stats["held"]
        assert stats["dropped"] | {"taken": stats["taken"]} == {
            reason: n for reason, n in self.ended.items() if n or reason == "taken"
        }
        assert marks(self.state.held) == [mark for _, _, mark in self.held]
        assert (stats["contributors"], set(stats["left"])) == (sorted(self.there), self.gone)


TestAccumulator = AccumulatorMachine.TestCase
TestAccumulator.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def applied(state: AccumulatorState, *tasks: str, version: int = BASE + 1) -> list[Any]:
    found = []
    for task in tasks:
        state.join(task, task)
        found.append(state.apply(task, tree(0.0), version))
    return found


def test_a_take_gives_the_first_n_and_drops_the_others_of_its_version() -> None:
    state = made()
    assert applied(state, "a", "b", "c") == [True] * 3
    assert [each.task for each in state.take(2)] == ["a", "b"]
    assert applied(state, "a") == [False]
    state.advance(BASE + 2)
    assert applied(state, "a") == [False]
    assert applied(state, "a", version=BASE + 2) == [True]
    assert state.stats()["dropped"] == {"late": 2, "stale": 1}


def test_with_a_lag_allowed_the_others_stay_for_the_next_version_only() -> None:
    state = made(max_lag=1)
    assert applied(state, "a", "b") == [True, True]
    state.take(1)
    assert len(state.held) == 1
    state.take(1)
    assert state.advance(BASE + 2) is False
    assert applied(state, "a") == [True]
    assert state.advance(BASE + 3)
    assert state.stats()["dropped"] == {"stale": 1}


def test_what_a_dead_contributor_gave_counts_for_the_quorum() -> None:
    state = made()
    applied(state, "a", "b", "c")
    state.take(3)
    state.advance(BASE + 2)
    applied(state, "a", version=BASE + 2)
    state.leave("a")
    assert state.ready(3, "raise") is NOT_YET
    applied(state, "b", "c", version=BASE + 2)
    assert state.ready(3, "raise") == 3
    state.take(3)
    state.advance(BASE + 3)
    applied(state, "b", "c", version=BASE + 3)
    message = r"^take\(3\) of 'g': a left; 2 accepted, and contributors are b, c: not enough for 3$"
    with pytest.raises(WorkerLeft, match=message):
        state.ready(3, "raise")
    assert state.ready(3, "lower") == 2


def test_nobody_is_missed_before_the_first_has_left() -> None:
    state = made()
    assert state.ready(2, "lower") is NOT_YET
    applied(state, "a")
    assert state.ready(2, "lower") is NOT_YET
    state.leave("a")
    assert state.ready(2, "lower") == 1
    state.join("another connection", "a")
    assert state.ready(2, "lower") is NOT_YET


def test_two_sessions_of_one_task_are_left_when_both_are() -> None:
    state = made()
    state.join("old", "a")
    state.join("new", "a")
    state.leave("old")
    assert (state.contributors, list(state.left)) == (["a"], [])
    state.leave("new")
    assert list(state.left) == ["a"]


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (np.zeros(2, np.int64), r"int64\[2\]"), (1, "int"), (True, "bool"), (None, "none"),
        ("x", "str"), (np.zeros(2, "S3"), r"bytes24\[2\]"), (np.zeros(2, bool), r"bool\[2\]"),
    ],
)  # fmt: skip
def test_a_leaf_without_a_mean_is_named(leaf: Any, said: str) -> None:
    layout = flatten({"a": np.zeros(2), "steps": [leaf]}).layout
    message = rf"^accumulator 'g': leaf \$\.steps\[0\] is {said}, of which no mean is taken; give"
    with pytest.raises(SchemaError, match=message):
        AccumulatorState("g", layout, None, 0, 1)


def test_a_mean_keeps_dtypes_goes_by_path_and_takes_nan_as_a_value() -> None:
    one = flatten({"w": np.array([1.0, np.nan], np.float32), "c": np.array([2j]), "loss": 1.0})
    two = flatten({"loss": 2.0, "c": np.array([4j]), "w": np.array([4.0, 1.0], np.float32)})
    blocks = [np.zeros(each.nbytes, np.uint8) for each in (one, two)]
    for each, block in zip((one, two), blocks, strict=True):
        each.write(block.data)
    out = np.full(one.nbytes, 255, np.uint8)
    mean(one.layout, [(one.layout, blocks[0]), (two.layout, blocks[1])], out)
    assert out[:8].view(np.float32).tolist()[0] == 2.5
    assert np.isnan(out[:8].view(np.float32)[1])
    assert out[64:80].view(np.complex128).tolist() == [3j]
    values = mean_values(one.layout, [(one.layout, [1.0]), (two.layout, [2.0])])
    assert values == [1.5]
