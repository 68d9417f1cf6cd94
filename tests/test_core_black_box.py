"""What a worker notes of itself: read whole at any moment, whatever became of the writer."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.black_box import NAMES, SIZE, BlackBox, Seen, seen
from paceline.core.tree import flatten

NAME = st.text(string.ascii_letters, min_size=1, max_size=8)
LAYOUTS = [flatten({"x": np.zeros(n, np.float32), "n": 1}).layout for n in range(3)]
NOTES = st.one_of(
    st.just(("begin",)),
    st.tuples(st.just("read"), NAME, st.integers(0, 2**63 - 1)),
    st.tuples(st.just("made"), st.sampled_from(LAYOUTS)),
)


@given(st.lists(NOTES, max_size=60))
def test_what_was_noted_is_what_is_seen(notes: list[tuple[object, ...]]) -> None:
    memory = bytearray(SIZE)
    box = BlackBox(memory)
    items, versions, layout = 0, dict[str, int](), b""
    for what, *rest in notes:
        getattr(box, str(what))(*rest)
        if what == "begin":
            items, layout = 0, b""
        elif what == "read":
            name, version = rest
            versions.pop(str(name), None)
            versions[str(name)] = int(str(version))
            versions = dict(list(versions.items())[-NAMES:])
        else:
            items, layout = items + 1, bytes(rest[0])  # type: ignore[call-overload]
        assert seen(bytes(memory)) == Seen(items, versions, layout)


def test_a_note_that_is_half_written_leaves_the_one_before() -> None:
    memory = bytearray(SIZE)
    box = BlackBox(memory)
    box.read("policy", 7)
    before = bytes(memory)
    box.read("policy", 8)
    after = bytes(memory)
    # The words that say which half counts are written last.
    for cut in (17, 30, SIZE // 2, SIZE):
        assert seen(before[:16] + after[16:cut] + before[cut:]).versions == {"policy": 7}
    assert seen(after).versions == {"policy": 8}


def test_nothing_noted_is_nothing_seen() -> None:
    assert seen(bytes(SIZE)) == Seen(0, {}, b"")


@pytest.mark.parametrize(
    "rubbish", [b"\xff" * SIZE, b"\x01" * SIZE, bytes(16) + b"\xff" * (SIZE - 16)]
)
def test_what_somebody_else_wrote_there_is_nothing(rubbish: bytes) -> None:
    assert seen(rubbish).versions == {}


def test_the_shapes_of_the_last_item_are_told_with_their_paths() -> None:
    box = BlackBox(memory := bytearray(SIZE))
    assert seen(bytes(memory)).shapes == ""
    box.made(flatten({"obs": np.zeros((4, 2), np.float32), "n": 3}).layout)
    assert seen(bytes(memory)).shapes == "$.obs float32[4,2], $.n int"


def test_of_an_item_with_very_many_leaves_the_first_are_told() -> None:
    box = BlackBox(memory := bytearray(SIZE))
    box.made(flatten(list(range(100))).layout)
    assert seen(bytes(memory)).shapes.endswith("$[31] int, and 68 more")
    box.made(flatten([np.zeros(n, f"S{n + 1}") for n in range(9000)]).layout)
    box.read("policy", 3)
    assert seen(bytes(memory)) == Seen(2, {"policy": 3}, b"")
