"""Which versions a server keeps: the state against a plain model, tags, holders, the bound."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.errors import OutOfMemory, SchemaError, UnknownName
from paceline.core.tree import flatten
from paceline.core.variable_state import VariableState
from paceline.core.waiting import NOT_YET, Stored

SIZE, SLOTS = 64, 4
SESSIONS = st.sampled_from("abc")
TAGS = st.sampled_from(["one", "two", "three"])


def stored(mark: int = 0) -> Stored:
    flat = flatten(np.full(8, float(mark)))
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    return Stored(flat.layout, list(flat.values), block)


def defined(slots: int | None = SLOTS) -> VariableState:
    state = VariableState("v", 0, memory=None if slots is None else slots * SIZE)
    state.define(stored())
    return state


class KeptMachine(RuleBasedStateMachine):
    """Writers, readers and taggers in any order; `trees` is all that was ever written."""

    def __init__(self) -> None:
        super().__init__()
        self.state = VariableState("v", 0, memory=SLOTS * SIZE)
        first = stored()
        self.state.define(first)
        self.trees = {1: first}
        self.tags: dict[str, int] = {}
        self.held: Counter[tuple[int, str]] = Counter()
        self.adding = False

    @property
    def wanted(self) -> set[int]:
        return {self.state.version, *self.tags.values(), *(version for version, _ in self.held)}

    def room(self, writer: str) -> str:
        """What a write should come to."""
        if len(self.wanted) < SLOTS:
            return "later" if self.adding else "now"
        firm = {version for version, holder in self.held if holder == writer}
        return "never" if len(firm | {self.state.version}) >= SLOTS else "later"

    @rule(writer=SESSIONS)
    def assign(self, writer: str) -> None:
        expected, before, new = self.room(writer), self.state.version, stored(len(self.trees))
        try:
            version = self.state.assign(new, writer)
        except OutOfMemory:
            assert expected == "never"
            assert self.state.version == before
            return
        assert (version is not NOT_YET) == (expected == "now")
        if version is NOT_YET:
            assert expected == "later"
            assert self.state.version == before
        else:
            assert version == before + 1
            self.trees[version] = new

    @rule(writer=SESSIONS)
    def begin_add(self, writer: str) -> None:
        expected = self.room(writer)
        try:
            current = self.state.begin_add(stored(), writer)
        except OutOfMemory:
            assert expected == "never"
            return
        assert (current is not NOT_YET) == (expected == "now")
        if current is not NOT_YET:
            assert current is self.trees[self.state.version]
            self.adding = True

    @rule(fails=st.booleans())
    def end_add(self, fails: bool) -> None:
        if self.adding:
            total = None if fails else stored(len(self.trees))
            version = self.state.end_add(total)
            self.adding = False
            if total is not None:
                self.trees[version] = total

    @rule(holder=SESSIONS)
    def read(self, holder: str) -> None:
        found = self.state.read(-1)
        assert found is not NOT_YET
        version, tree = found
        assert tree is self.trees[version]
        self.hold(version, holder)

    @rule(holder=SESSIONS, tag=TAGS)
    def read_tag(self, holder: str, tag: str) -> None:
        if tag in self.tags:
            version = self.state.kept.tagged(tag)
            assert version == self.tags[tag]
            self.hold(version, holder)

    def hold(self, version: int, holder: str) -> None:
        self.state.kept.hold(version, holder)
        self.held[version, holder] += 1

    @rule(data=st.data())
    def let_go(self, data: Any) -> None:
        if not self.held:
            return
        version, holder = data.draw(st.sampled_from(sorted(self.held)))
        freed = self.state.kept.let_go(version, holder)
        self.held[version, holder] -= 1
        self.held += Counter()
        assert freed == (version not in self.wanted)

    @rule(tag=TAGS, back=st.integers(0, 5), current=st.booleans())
    def tag(self, tag: str, back: int, current: bool) -> None:
        version = self.state.version - (0 if current else back)
        taken = self.tags.get(tag, version)
        try:
            found = self.state.kept.tag(tag, None if current else version)
        except UnknownName:
            assert version not in self.wanted
            return
        except SchemaError:
            assert taken != version
            return
        assert found == version == taken
        self.tags[tag] = version

    @rule(tag=TAGS)
    def untag(self, tag: str) -> None:
        try:
            freed = self.state.kept.untag(tag)
        except UnknownName:
            assert tag not in self.tags
            return
        version = self.tags.pop(tag)
        assert freed == (version not in self.wanted)

    @invariant()
    def exactly_what_is_wanted_is_kept_and_counted(self) -> None:
        kept = self.state.kept
        listing = kept.listing()
        assert [one.version for one in listing] == sorted(self.wanted)
        assert kept.nbytes == sum(one.nbytes for one in listing) == SIZE * len(listing)
        assert kept.nbytes <= SLOTS * SIZE
        assert kept.tags == self.tags
        for version in range(self.state.version + 2):
            expected = self.trees[version] if version in self.wanted else None
            assert self.state.at(version) is expected
        for one in listing:
            assert one.current == (one.version == self.state.version)
            assert set(one.tags) == {
                tag for tag, named in self.tags.items() if named == one.version
            }
            assert set(one.holders) == {who for version, who in self.held if version == one.version}

    @invariant()
    def a_sum_being_computed_has_its_room(self) -> None:
        if self.adding:
            assert self.state.kept.nbytes + SIZE <= SLOTS * SIZE


TestKeptMachine = KeptMachine.TestCase
TestKeptMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)


def test_without_a_bound_nothing_waits() -> None:
    state = defined(None)
    for n in range(50):
        state.kept.hold(state.version, "a")
        assert state.assign(stored(n), "a") == n + 2
    assert state.kept.nbytes == 51 * SIZE


def test_a_bound_has_room_for_the_current_version_and_the_next() -> None:
    state = defined(2)
    assert [state.assign(stored(n)) for n in range(3)] == [2, 3, 4]
    state.kept.hold(4, "reader")
    assert state.assign(stored()) == 5
    assert state.assign(stored()) is NOT_YET
    assert state.kept.let_go(4, "reader") is True
    assert state.assign(stored()) == 6


def test_a_bound_below_two_versions_is_refused_with_the_numbers() -> None:
    assert VariableState("v", 0, memory=2 * SIZE).define(stored()) is True
    with pytest.raises(
        SchemaError,
        match=r"^variable 'v': memory=127 bytes, but its first version takes 64, and the current"
        r" version and the next exist at once: give it memory=128 or more$",
    ):
        VariableState("v", 0, memory=2 * SIZE - 1).define(stored())


def test_a_version_that_outgrows_the_bound_is_refused_at_once() -> None:
    def text(length: int) -> Stored:
        flat = flatten("x" * length)
        return Stored(flat.layout, list(flat.values), None)

    state = VariableState("v", 0, memory=20)
    state.define(text(10))
    assert state.assign(text(10)) == 2
    with pytest.raises(
        OutOfMemory,
        match=r"^no room in 'v' for another 11 bytes: 10 of memory=20 are held: version 2 \(10"
        r" bytes\) by current; it and the current version never have room together$",
    ):
        state.assign(text(11))


def test_who_holds_all_that_stands_in_the_way_is_told_so_at_once() -> None:
    state = defined(3)
    for _ in range(2):
        state.kept.hold(state.version, "chief:0")
        state.assign(stored())
    assert state.assign(stored(), "worker:0") is NOT_YET
    with pytest.raises(
        OutOfMemory,
        match=r"^no room in 'v' for another 64 bytes: 192 of memory=192 are held: version 1 \(64"
        r" bytes\) by chief:0; version 2 \(64 bytes\) by chief:0; version 3 \(64 bytes\) by"
        r" current; this session itself holds \[1, 2\]: let go of them first$",
    ):
        state.assign(stored(), "chief:0")
    state.kept.let_go(1, "chief:0")
    assert state.assign(stored(), "chief:0") == 4


def test_what_others_hold_or_tagged_is_waited_for_by_name() -> None:
    state = defined(3)
    state.kept.hold(1, "worker:3")
    state.assign(stored())
    state.kept.tag("gen-1", None)
    state.assign(stored())
    assert state.assign(stored(), "chief:0") is NOT_YET
    assert state.why_not(SIZE) == (
        "no room in 'v' for another 64 bytes: 192 of memory=192 are held: version 1 (64 bytes) by"
        " worker:3; version 2 (64 bytes) by tag gen-1; version 3 (64 bytes) by current; whoever"
        " lets go or untags ends the wait"
    )


def test_a_tag_is_the_name_of_one_version() -> None:
    state = defined(None)
    assert state.kept.tag("one", None) == 1
    state.assign(stored())
    assert state.kept.tag("one", 1) == 1
    with pytest.raises(
        SchemaError,
        match=r"^tag 'one' of 'v': it names version 1 already, not 2; untag\('one'\) frees",
    ):
        state.kept.tag("one", None)
    assert state.kept.tag("two", None) == 2
    assert list(state.kept.tags.items()) == [("one", 1), ("two", 2)]


def test_what_is_not_kept_cannot_be_tagged_and_an_unknown_tag_lists_those_there_are() -> None:
    state = defined(None)
    for _ in range(3):
        state.assign(stored())
    state.kept.tag("one", None)
    state.assign(stored())
    with pytest.raises(
        UnknownName,
        match=r"^tag 'old' of 'v': version 2 \(count 2\) is not kept; those of counts \[4, 5\] are;"
        r" a version is kept while it is current, tagged or held$",
    ):
        state.kept.tag("old", 2)
    for call in (state.kept.tagged, state.kept.untag):
        with pytest.raises(UnknownName, match=r"^no tag 'two' of 'v'; there are \['one'\]$"):
            call("two")
    for n in range(20):
        state.kept.tag(f"t{n}", None)
    with pytest.raises(UnknownName, match=r"'t14'\] and 5 more$"):
        state.kept.tagged("x")


def test_a_variable_without_a_value_has_nothing_to_tag() -> None:
    with pytest.raises(SchemaError, match=r"^tag 'one' of 'v': the variable has no value yet$"):
        VariableState("v", 0).kept.tag("one", None)
