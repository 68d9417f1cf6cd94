"""The works of a program: begun and ended by its chief, found by number by everybody else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from paceline.core.errors import Closed, Refused, SchemaError, TaskFailed
from paceline.core.program_state import ANY_LIFE, KNOWN, ProgramState
from paceline.core.waiting import NOT_YET, Stored

NUMBER = st.integers(1, 5)


def begun(state: ProgramState, *whats: str, chief: str = "chief") -> list[tuple[int, list[str]]]:
    return [
        state.begin(chief, number, what, f"queue of {what}") for number, what in enumerate(whats, 1)
    ]


def ask(
    state: ProgramState, number: int, what: str, life: int = ANY_LIFE, over: bool = False
) -> Any:
    return state.take_part("w:0", number, what, life, until_over=over)


def test_a_work_is_waited_for_done_and_over() -> None:
    state = ProgramState()
    assert ask(state, 1, "f") is NOT_YET
    assert begun(state, "f") == [(1, [])]
    assert ask(state, 1, "f", over=True) is NOT_YET
    assert [ask(state, 1, "f"), ask(state, 1, "f")] == [(1, False, 1), (1, False, 2)]
    assert state.take_part("w:1", 1, "f", ANY_LIFE, until_over=False) == (1, False, 1)
    assert state.stats() == {"begun": 1, "going": {"f": []}, "life": 1}
    state.end(1)
    assert ask(state, 1, "f") == ask(state, 1, "f", over=True) == (1, True, 0)
    assert state.stats() == {"begun": 1, "going": {}, "life": 1}


def test_another_work_of_that_number_is_told_also_when_it_is_over() -> None:
    state = ProgramState()
    begun(state, "f")
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"^work 1 of this program is g in w:0 and f in the"):
            ask(state, 1, "g")
        state.end(1)


def test_only_one_session_leads_and_in_order() -> None:
    state = ProgramState()
    begun(state, "f")
    with pytest.raises(Refused, match="another session leads"):
        state.begin("other", 2, "f", "")
    with pytest.raises(SchemaError, match="it is number 3, after number 1"):
        state.begin("chief", 3, "f", "")
    state.lost("other")
    state.end(7)
    state.begin("chief", 2, "f", "")


def test_old_works_are_over_whatever_they_were() -> None:
    state = ProgramState()
    begun(state, *["f"] * (KNOWN + 1))
    assert ask(state, 1, "x") == (1, True, 0)
    with pytest.raises(SchemaError):
        ask(state, 2, "x")


def test_a_part_that_has_ended_is_not_begun_again_and_its_result_stays() -> None:
    state = ProgramState()
    begun(state, "f")
    ask(state, 1, "f")
    assert state.result(1, "w:0") is NOT_YET
    stored = Stored(b"layout", [], None)
    state.end_part("w:0", 1, 1, "", stored)
    assert ask(state, 1, "f") == (1, False, 0)
    assert state.stats()["going"] == {"f": ["w:0"]}
    for _ in range(2):
        part = state.result(1, "w:0")
        assert part is not NOT_YET
        assert part.result is stored
    assert state.result(1, "w:1") is NOT_YET
    state.end_part("w:1", 1, 2, "of another life", None)
    state.end_part("w:1", 2, 1, "of another work", None)
    assert state.result(1, "w:1") is NOT_YET
    state.end_part("w:1", 1, 1, "no luck", None)
    for task in ("w:0", "w:1", "w:2"):
        with pytest.raises(TaskFailed, match=r"^f failed in w:1:\nno luck$"):
            state.result(1, task)
    state.end(1)
    state.end_part("w:0", 1, 1, "", stored)
    with pytest.raises(SchemaError, match="work 1 does not go on"):
        state.result(1, "w:0")


def test_another_chief_takes_over_what_goes_on() -> None:
    state = ProgramState()
    begun(state, "f", "g")
    state.end_part("w:0", 1, 1, "", None)
    state.lost("chief")
    assert ask(state, 1, "f", 1, over=True) is NOT_YET
    assert begun(state, "f", "g", "h", chief="next") == [(1, [])] * 3
    assert ask(state, 1, "f", 1) == (1, False, 0)
    assert ask(state, 3, "h", 1) == (1, False, 1)


def test_another_chief_begins_anew_what_is_over_or_another() -> None:
    for over, whats in ((True, ("f",)), (False, ("x",))):
        state = ProgramState()
        begun(state, "f", "g")
        if over:
            state.end(1)
        state.lost("chief")
        left = ["queue of g"] if over else ["queue of f", "queue of g"]
        assert begun(state, *whats, chief="next") == [(2, left)]
        with pytest.raises(
            Closed, match=r"^the chief that w:0 worked for died, .* start w:0 again"
        ):
            ask(state, 2, "g", 1)
        assert ask(state, 2, "g") is NOT_YET
        assert ask(state, 1, whats[0]) == (2, False, 1)


def test_its_own_collection_is_not_among_those_left() -> None:
    state = ProgramState()
    state.begin("chief", 1, "f in lockstep", "queue")
    state.lost("chief")
    assert state.begin("next", 1, "f", "queue") == (2, [])


class Programs(RuleBasedStateMachine):
    """The state beside a list of whether each work is over."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ProgramState()
        self.over: list[bool] = []
        self.begun = 0
        self.life = 1
        self.known: dict[str, int] = {}

    @rule()
    def begin(self) -> None:
        self.begun += 1
        found = self.state.begin("chief", self.begun, f"f{self.begun}", f"q{self.begun}")
        left: list[str] = []
        if self.begun <= len(self.over) and self.over[self.begun - 1]:
            rest = enumerate(self.over[self.begun :], self.begun + 1)
            left = [f"q{number}" for number, over in rest if not over]
            self.over, self.life = self.over[: self.begun - 1], self.life + 1
        if self.begun > len(self.over):
            self.over.append(False)
        assert found == (self.life, left)

    @rule(number=NUMBER)
    @precondition(lambda self: self.begun)
    def end(self, number: int) -> None:
        if number <= self.begun:
            self.state.end(number)
            self.over[number - 1] = True

    @rule()
    def chief_dies(self) -> None:
        self.state.lost("chief")
        self.begun = 0

    @rule(task=st.sampled_from(["w:0", "w:1"]), number=NUMBER, until_over=st.booleans())
    def take_part(self, task: str, number: int, until_over: bool) -> None:
        def ask() -> object:
            life = self.known.get(task, ANY_LIFE)
            return self.state.take_part(task, number, f"f{number}", life, until_over=until_over)

        if self.known.get(task, self.life) != self.life:
            with pytest.raises(Closed, match="start w:"):
                ask()
            del self.known[task]  # started again
            return
        found = ask()
        if number > len(self.over) or (until_over and not self.over[number - 1]):
            assert found is NOT_YET
            return
        assert isinstance(found, tuple)
        over = self.over[number - 1]
        assert found[:2] == (self.life, over)
        assert (found[2] > 0) == (not over)
        self.known[task] = self.life


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=100, deadline=None)
