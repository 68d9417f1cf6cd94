"""Keys of names in containers, and which of them a reset leaves behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline import SchemaError, WasReset
from paceline.core import names
from paceline.core.container_state import CONTAINERS, ContainerState, Reset

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
CONTAINER = st.sampled_from(["", "x", "y"])


@given(TEXTS.filter(bool), TEXTS, st.integers(0, 1 << 40))
def test_a_key_says_what_it_was_made_of_and_no_other_does(
    name: str, container: str, generation: int
) -> None:
    key = names.key(name, container, generation)
    assert names.parts(key) == (name, container, generation)
    assert names.checked(key) == key
    assert ("\0" in key) == bool(container or generation)


@given(TEXTS.filter(bool), TEXTS, st.integers(0, 9))
def test_a_key_in_quotes_is_shown_as_people_read_it(
    name: str, container: str, generation: int
) -> None:
    key = names.key(name, container, generation)
    shown = names.shown(f"read '{key}' and '{key}': 'no' key")
    assert shown == f"read {names.quoted(key)} and {names.quoted(key)}: 'no' key"
    assert "\0" not in shown
    assert names.quoted(key) == (
        f"'{name}' in container '{container}'" if container else f"'{name}'"
    )


@pytest.mark.parametrize(
    "key", ["w\0x", "w\0x\0", "w\0x\0-1", "w\0x\x001\x002", "w\0x\0" + "9" * 19]
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(SchemaError, match=r"^no name, and no key of one: 'w\\x00x"):
        names.parts(key)


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("", r"^a name has 1 to 256 characters, not 0: ''$"),
        ("w" * 257, r"^a name has 1 to 256 characters, not 257: 'www"),
        (
            names.key("w", "x" * 257),
            r"^the name of a container has at most 256 characters, not 257",
        ),
    ],
)
def test_names_and_containers_have_a_length(key: str, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        names.checked(key)
    names.checked(names.key("w" * 256, "x" * 256, 7))


def test_no_name_has_a_nul() -> None:
    with pytest.raises(
        SchemaError, match=r"^the name of a queue is a str without NUL, not 'a\\x00b'"
    ):
        names.text("a\0b", "the name of a queue")


def test_the_names_beside_a_key_are_those_of_its_container() -> None:
    keys = ["b", "a", names.key("c", "x"), names.key("d", "", 1)]
    assert names.beside("z", keys) == ["a", "b", "d"]
    assert names.beside(names.key("z", "x", 3), keys) == ["c"]


def test_a_reset_of_too_many_containers_by_name_is_refused_and_changes_nothing() -> None:
    state = ContainerState()
    state.reset([f"c{n}" for n in range(CONTAINERS)], "chief:0")
    with pytest.raises(SchemaError, match=rf"^{CONTAINERS + 1} containers were reset by name, "):
        state.reset(["one more"], "chief:0")
    assert (state.latest, state.generation("one more")) == (1, 0)
    state.reset(None, "chief:0")
    assert state.reset(["one more"], "chief:0") == 3


@pytest.mark.parametrize(
    ("container", "which"), [("x", "container 'x'"), ("", "the default container")]
)
def test_who_reset_a_container_is_said_once_it_is_known(container: str, which: str) -> None:
    state = ContainerState()
    state.reset([container], "", 4)
    old = names.key("w", container, 3)
    with pytest.raises(WasReset, match=rf"^{which} was reset$"):
        state.ahead(old)
    state.reset([container], "chief:0", 4)
    with pytest.raises(WasReset, match=rf"^{which} was reset by chief:0$"):
        state.ahead(old)
    assert state.generation(container) == 4


def test_a_first_server_that_was_started_again_counts_above_what_the_others_know() -> None:
    first, other = ContainerState(1000), ContainerState(1000)
    for _ in range(5):
        other.reset(["x"], "chief:0", first.reset(["x"], "chief:0"))
    known = other.generation("x")
    again = ContainerState(1001)
    assert again.generation("x") == 0
    number = again.reset(["x"], "chief:0")
    assert number > known
    other.reset(["x"], "chief:0", number)
    assert not other.ahead(names.key("w", "x", again.generation("x")))


class Resets(RuleBasedStateMachine):
    """The first server numbers resets; another hears of them in any order, and from keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = ContainerState(), ContainerState()
        self.log: list[Reset] = []
        self.of: list[str | None] = []
        self.told: set[int] = set()
        self.put: set[str] = set()

    def newest(self, container: str) -> int:
        """The model: the last reset of a container, or of all."""
        return max(
            (
                reset.number
                for reset, of in zip(self.log, self.of, strict=True)
                if of in (None, container)
            ),
            default=0,
        )

    @rule(container=st.none() | CONTAINER, by=st.sampled_from(["chief:0", "worker:1"]))
    def reset(self, container: str | None, by: str) -> None:
        number = self.first.reset(None if container is None else [container], by)
        assert number == len(self.log) + 1
        self.log.append(Reset(number, by))
        self.of.append(container)

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        if not self.log:
            return
        place = data.draw(st.integers(0, len(self.log) - 1))
        of, reset = self.of[place], self.log[place]
        self.other.reset(None if of is None else [of], reset.by, reset.number)
        self.told.add(place)

    @rule(container=CONTAINER)
    def made_with_the_newest_key(self, container: str) -> None:
        key = names.key("w", container, self.first.generation(container))
        assert not self.first.ahead(key)
        if self.other.ahead(key):
            self.other.reset([container], "", names.parts(key).generation)
        assert not self.other.ahead(key)
        self.other.add("variable", key, "worker:0", 0.0)
        self.put.add(key)

    @invariant()
    def the_first_knows_all_and_the_other_what_it_was_told(self) -> None:
        for container in ("", "x", "y"):
            newest = self.newest(container)
            assert self.first.generation(container) == newest
            assert self.other.generation(container) <= newest
            if newest:
                old = names.key("w", container, newest - 1)
                assert self.first.gone(old)
                assert not self.first.gone(names.key("w", container, newest))
                with pytest.raises(WasReset, match=rf"by {self.log[newest - 1].by}$"):
                    self.first.ahead(old)

    @invariant()
    def nothing_that_is_gone_is_listed_and_nothing_else_was_removed(self) -> None:
        kept = {key for key in self.put if not self.other.gone(key)}
        assert {key for _, key in self.other.made} == kept

    def teardown(self) -> None:
        for place in set(range(len(self.log))) - self.told:
            of, reset = self.of[place], self.log[place]
            self.other.reset(None if of is None else [of], reset.by, reset.number)
        for container in ("", "x", "y"):
            assert self.other.generation(container) == self.first.generation(container)


TestResets = Resets.TestCase
TestResets.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
