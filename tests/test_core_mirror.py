"""A mirror's copies: the state against a plain model."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.mirror_state import IDLE, Copy, MirrorState, Thing
from paceline.core.waiting import NOT_YET, Stored

KEEP = 2
THINGS = st.sampled_from([Thing("a", "v", False), Thing("a", "w", False), Thing("b", "v", True)])
NUMBERS = st.integers(1, 5)


def stored(nbytes: int = 8) -> Stored:
    return Stored(b"layout", [], np.zeros(nbytes, np.uint8))


class MirrorMachine(RuleBasedStateMachine):
    """Readers ask, hold and let go; copies come, or do not, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = MirrorState(KEEP)
        self.now = 0.0
        self.under_way: dict[tuple[Thing, int], Copy] = {}
        self.held: list[Copy] = []
        self.fetches = 0

    @rule(thing=THINGS, number=NUMBERS)
    def ask(self, thing: Thing, number: int) -> None:
        before = {(copy.thing, copy.number) for copy in self.state}
        copy, absent = self.state.ask(thing, number, self.now)
        assert (copy.thing, copy.number) == (thing, number)
        # Fetched once, as long as it is there or on its way.
        assert absent == ((thing, number) not in before)
        if absent:
            self.fetches += 1
            self.under_way[thing, number] = copy
        assert (copy.look() is NOT_YET) == ((thing, number) in self.under_way)

    @rule(data=st.data(), there=st.booleans())
    def come(self, data: st.DataObject, there: bool) -> None:
        if not self.under_way:
            return
        copy = self.under_way.pop(data.draw(st.sampled_from(sorted(self.under_way))))
        self.state.came(copy, stored() if there else None)
        assert (copy.look() is None) == (not there)
        if not there:
            assert copy not in list(self.state)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        here = [copy for copy in self.state if copy.stored is not None]
        if here:
            copy = data.draw(st.sampled_from(here))
            self.state.hold(copy)
            self.held.append(copy)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.held:
            self.state.let_go(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(seconds=st.sampled_from([1.0, IDLE / 2, IDLE * 2]))
    def tidy(self, seconds: float) -> None:
        self.now += seconds
        self.state.tidy(self.now)
        for copy in self.state:
            assert copy.holders or copy.stored is None or self.now - copy.asked <= IDLE

    @invariant()
    def what_is_held_or_on_its_way_is_there_and_little_else(self) -> None:
        there = list(self.state)
        assert all(copy in there for copy in self.held)
        assert all(copy in there for copy in self.under_way.values())
        spare = Counter(
            copy.thing for copy in there if copy.stored is not None and not copy.holders
        )
        assert all(count <= KEEP for count in spare.values())
        assert self.state.nbytes == 8 * sum(copy.stored is not None for copy in there)
        done = self.state.fetched + self.state.failed
        assert self.fetches == done + len(self.under_way)


TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=200, stateful_step_count=40)


def test_the_versions_last_asked_for_are_those_that_stay() -> None:
    state, thing = MirrorState(KEEP), Thing("a", "v", False)
    for number in (1, 2, 1, 3):
        copy, absent = state.ask(thing, number, 0.0)
        if absent:
            state.came(copy, stored())
    assert sorted(copy.number for copy in state) == [1, 3]


def test_a_copy_that_could_not_be_had_is_fetched_anew() -> None:
    state, thing = MirrorState(), Thing("a", "v", False)
    copy, _ = state.ask(thing, 1, 0.0)
    state.came(copy, None)
    assert copy.look() is None
    again, absent = state.ask(thing, 1, 0.0)
    assert absent
    assert again is not copy
