"""Rows of trees: taken, added to, refused; and versions that are kept while others change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.errors import OutOfMemory, SchemaError
from paceline.core.rows import STEP, add_rows, checked_indices, table
from paceline.core.tree import Array, flatten, unflatten
from paceline.core.variable_state import VariableState
from paceline.core.waiting import NOT_YET, Stored

ROWS, WIDTH = 6, 2
INDICES = st.lists(st.integers(0, ROWS - 1), max_size=8)


def taken(tree: Any) -> tuple[bytes, Array]:
    """A tree's layout, and its block."""
    flat = flatten(tree)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    return flat.layout, block


def stored(tree: Any, *, own: bool = False) -> Stored:
    layout, block = taken(tree)
    return Stored(layout, [], block, own=own)


def tree_of(found: Stored) -> Any:
    return unflatten(found.layout, found.values, found.memory)


def added_to(found: Stored, indices: list[int], rows: Any) -> None:
    places = np.array(indices, np.int64)
    table(found.layout, None, "add").scatter_add(found.memory, places, *taken(rows))


# Taking and adding


@given(
    indices=INDICES,
    width=st.sampled_from([0, 1, 2, 40]),
    dtype=st.sampled_from([np.float32, np.float64, np.int8, np.complex64, np.dtype(">f8")]),
)
def test_rows_add_up_to_the_bit_as_with_numpys_add_at(
    indices: list[int], width: int, dtype: Any
) -> None:
    draw = np.random.default_rng(len(indices))
    start = draw.normal(0, 50, (ROWS, width)).astype(dtype)
    rows = draw.normal(0, 50, (len(indices), width)).astype(dtype)
    wanted = start.copy()
    places = np.array(indices, np.int64)
    with np.errstate(all="ignore"):
        np.add.at(wanted, places, rows)
    found = stored(start)
    added_to(found, indices, rows)
    assert tree_of(found).tobytes() == wanted.tobytes()
    layout = table(found.layout, None, "take").rows_layout(places.shape)
    out = np.zeros(taken(rows)[1].size, np.uint8)
    table(found.layout, None, "take").gather(found.memory, places, out)
    assert unflatten(layout, [], out).tobytes() == wanted[places].tobytes()


@pytest.mark.parametrize("width", [1, 31, 32, 64])
def test_many_rows_are_added_in_order_across_steps(width: int) -> None:
    draw = np.random.default_rng(0)
    count = 3 * STEP // width + 1
    wanted = draw.normal(size=(50, width)).astype(np.float32)
    found = wanted.copy()
    indices = draw.integers(0, 50, count)
    rows = draw.normal(size=(count, width)).astype(np.float32)
    np.add.at(wanted, indices, rows)
    add_rows(found, indices, rows)
    assert found.tobytes() == wanted.tobytes()


def test_all_leaves_are_taken_together_or_one_by_its_path() -> None:
    tree = {"a": np.arange(6.0).reshape(3, 2), "b": [np.arange(3, dtype=np.int32)], "n": np.ones(4)}
    layout, block = taken(tree)
    one = table(layout, "$.b[0]", "take")
    out = np.zeros(64, np.uint8)
    one.gather(block, np.array([2, 0, 2]), out)
    assert unflatten(one.rows_layout((3, 1)), [], out).tolist() == [[2], [0], [2]]
    del tree["n"]
    layout, block = taken(tree)
    both = table(layout, None, "take")
    out = np.zeros(128, np.uint8)
    both.gather(block, np.array([1]), out)
    found = unflatten(both.rows_layout((1,)), [], out)
    assert (found["a"].tolist(), found["b"][0].tolist()) == ([[2, 3]], [1])


def test_rows_are_found_by_their_paths_in_whatever_order_they_come() -> None:
    found = stored({"a": np.zeros((2, 1)), "b": np.zeros(2)})
    rows = {"b": np.array([3.0]), "a": np.array([[5.0]])}
    table(found.layout, None, "add").check_rows(taken(rows)[0], (1,), "add")
    added_to(found, [1], rows)
    assert (tree_of(found)["a"].tolist(), tree_of(found)["b"].tolist()) == ([[0], [5]], [0, 3])


# What is refused


@pytest.mark.parametrize(
    ("indices", "shape", "said"),
    [
        ([0, 6], (2,), r"index 6 at \[1\] is none of leaf \$, which has 6 rows, from 0 on"),
        ([5, -1, 9], (3,), r"index -1 at \[1\] is none of leaf \$, which has 6 rows"),
        ([0, 1, 2, 1 << 62], (2, 2), r"index 4611686018427387904 at \[1, 1\] is none of leaf \$"),
        ([-(1 << 63)], (), r"index -9223372036854775808 at \[\] is none of leaf \$"),
    ],
)
def test_an_index_without_a_row_is_named_with_its_place(
    indices: list[int], shape: tuple[int, ...], said: str
) -> None:
    found = table(taken(np.zeros((ROWS, WIDTH)))[0], None, "x")
    with pytest.raises(SchemaError, match=f"^gather 'v': {said}"):
        found.check_indices(np.array(indices, np.int64), shape, "gather 'v'")
    found.check_indices(np.array([0, ROWS - 1]), (2,), "gather 'v'")


@pytest.mark.parametrize(
    ("tree", "leaf", "said"),
    [
        (np.zeros((2, 2)), "$.a", r"there is no leaf \$\.a; there are \['\$'\]"),
        ({"a": 1}, "$.a", r"leaf \$\.a is int, which has no rows$"),
        (np.zeros(()), None, r"leaf \$ is float64\[\], which has no rows$"),
        ({"a": np.zeros(2), "b": 1}, None, r"leaf \$\.b is int, which has no rows; name the leaf"),
        (
            {"a": np.zeros(2), "b": np.zeros(3)},
            None,
            r"leaf \$\.b has 3 rows, leaf \$\.a 2; name the leaf that is meant$",
        ),
        ({}, None, "a tree without leaves has no rows"),
        ([1] * 20, "$.x", r"there is no leaf \$\.x; .*'\$\[15\]'\] and 4 more$"),
    ],
)
def test_what_is_no_table_is_refused_by_its_path(tree: Any, leaf: str | None, said: str) -> None:
    with pytest.raises(SchemaError, match=rf"^gather 'v': {said}"):
        table(flatten(tree).layout, leaf, "gather 'v'")


@pytest.mark.parametrize(
    ("rows", "leaf", "said"),
    [
        (
            np.zeros((3, 2), np.float32),
            "$.a",
            r"the rows of leaf \$\.a are float32\[3,2\], not float64\[3,2\], as its indices and"
            r" float64\[4,2\] make them$",
        ),
        (np.zeros((2, 2)), "$.a", r"the rows of leaf \$\.a are float64\[2,2\], not float64\[3,2\]"),
        (np.zeros(3), "$.a", r"the rows of leaf \$\.a are float64\[3\], not float64\[3,2\]"),
        (1.0, "$.a", r"the rows of leaf \$\.a are float, not float64\[3,2\]"),
        ({"a": np.zeros((3, 2))}, None, r"rows of leaf \$\.b are missing: bool\[3\]$"),
        ({"a": np.zeros((3, 2)), "b": np.zeros(3, bool)}, None, r"leaf \$\.b is bool\[4\], which"),
        (np.zeros(3, bool), "$.b", r"leaf \$\.b is bool\[4\], which cannot be added$"),
        ([np.zeros((3, 2)), 1], "$.a", r"rows of leaf \$\.a are missing: float64\[3,2\]"),
    ],
)
def test_rows_of_another_shape_or_dtype_are_refused_by_their_path(
    rows: Any, leaf: str | None, said: str
) -> None:
    layout = flatten({"a": np.zeros((4, 2)), "b": np.zeros(4, bool)}).layout
    with pytest.raises(SchemaError, match=f"^scatter_add 'v': {said}"):
        table(layout, leaf, "x").check_rows(flatten(rows).layout, (3,), "scatter_add 'v'")


def test_rows_with_a_leaf_too_many_are_refused() -> None:
    layout = flatten({"a": np.zeros(4)}).layout
    rows = flatten({"a": np.zeros(1), "b": np.zeros(1)}).layout
    with pytest.raises(
        SchemaError, match=r"^x: the rows have a leaf \$\.b, float64\[1\], too many"
    ):
        table(layout, None, "x").check_rows(rows, (1,), "x")


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([0.5], "indices are whole numbers, not float64"),
        ([True], "indices are whole numbers, not bool"),
        (["a"], "indices are whole numbers, not str"),
        ([[1], [1, 2]], "the indices are no array: "),
        (np.array([1 << 63], np.uint64), "the index 9223372036854775808 has more than 63 bits"),
        ([1 << 70], "indices are whole numbers, not object"),
    ],
)
def test_indices_are_whole_numbers(indices: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=f"^x: {said}"):
        checked_indices(indices, "x")


@pytest.mark.parametrize(
    "indices", [[], np.empty((2, 0)), 3, np.array([[1], [2]], np.uint8), (4, 5)]
)
def test_indices_keep_their_shape(indices: Any) -> None:
    found = checked_indices(indices, "x")
    assert found.dtype == np.int64
    assert found.shape == np.shape(indices)
    assert found.tolist() == np.asarray(indices).tolist()


# Versions


class RowsMachine(RuleBasedStateMachine):
    """Writers of all kinds, holders and tags; `trees` is what each version has to be."""

    def __init__(self) -> None:
        super().__init__()
        self.state = VariableState("v", 0)
        self.state.define(stored(np.zeros((ROWS, WIDTH))))
        self.trees = {1: np.zeros((ROWS, WIDTH))}
        self.held: Counter[tuple[int, str]] = Counter()
        self.hand: tuple[Stored, list[int], Array] | None = None
        self.marks = 0

    @rule()
    def assign(self) -> None:
        self.marks += 1
        new = np.full((ROWS, WIDTH), 100.0 * self.marks)
        version = self.state.assign(stored(new))
        assert (version is NOT_YET) == (self.hand is not None)
        if version is not NOT_YET:
            self.trees[version] = new

    @rule(indices=INDICES)
    def begin(self, indices: list[int]) -> None:
        before = self.state.version
        alone = not any(version == before for version, _ in self.held) and (
            before not in self.state.kept.tags.values()
        )
        current = self.state.begin_rows()
        assert (current is NOT_YET) == (self.hand is not None)
        if current is NOT_YET:
            return
        self.marks += 1
        rows = np.arange(len(indices) * WIDTH, dtype=float).reshape(-1, WIDTH) + self.marks
        wanted = self.trees[before].copy()
        np.add.at(wanted, np.array(indices, np.int64), rows)
        self.trees[before + 1] = wanted
        assert self.state.changing == (current.own and alone)
        if not self.state.changing:
            current = Stored(current.layout, [], current.memory.copy(), own=True)
        self.hand = current, indices, rows

    @precondition(lambda self: self.hand is not None)
    @rule()
    def end(self) -> None:
        assert self.hand is not None
        current, indices, rows = self.hand
        self.hand = None
        added_to(current, indices, rows)
        version = self.state.end_add(None if self.state.changing else current)
        assert self.state.stored is current
        assert version == max(self.trees)

    @rule(holder=st.sampled_from("ab"))
    def hold(self, holder: str) -> None:
        self.state.kept.hold(self.state.version, holder)
        self.held[self.state.version, holder] += 1

    @rule(data=st.data())
    def let_go(self, data: Any) -> None:
        if self.held:
            version, holder = data.draw(st.sampled_from(sorted(self.held)))
            self.state.kept.let_go(version, holder)
            self.held[version, holder] -= 1
            self.held += Counter()

    @rule(tag=st.sampled_from(["one", "two"]))
    def tag(self, tag: str) -> None:
        if tag in self.state.kept.tags:
            self.state.kept.untag(tag)
        else:
            self.state.kept.tag(tag, None)

    @invariant()
    def what_is_kept_never_changes(self) -> None:
        kept = self.state.kept
        wanted = {self.state.version, *kept.tags.values(), *(version for version, _ in self.held)}
        listing = kept.listing()
        assert {one.version for one in listing} == wanted
        assert kept.nbytes == sum(one.nbytes for one in listing)
        for version in wanted:
            found = self.state.at(version)
            assert found is not None
            if not (self.state.changing and version == self.state.version):
                assert tree_of(found).tolist() == self.trees[version].tolist()


TestRowsMachine = RowsMachine.TestCase
TestRowsMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)


def test_an_addition_to_rows_needs_room_only_for_a_copy() -> None:
    first = stored(np.zeros((ROWS, WIDTH)), own=True)
    state = VariableState("v", 0, memory=2 * first.nbytes)
    state.define(first)
    state.kept.hold(1, "a")
    state.assign(stored(np.ones((ROWS, WIDTH)), own=True))
    # No room for another, and none is needed.
    assert state.begin_rows() is state.stored
    assert (state.changing, state.end_add(None)) == (True, 3)
    state.kept.hold(3, "a")
    with pytest.raises(OutOfMemory, match=r"this session itself holds \[1\]"):
        state.begin_rows("a")
    assert state.begin_rows("b") is NOT_YET
    state.kept.let_go(1, "a")
    assert state.begin_rows("b") is state.stored
    assert state.changing is False
