"""Runs: items taken apart together are what they are when taken apart one by one."""

from __future__ import annotations

import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_core_tree import TREES, equal

from paceline.core.bfloat16 import bfloat16
from paceline.core.errors import SchemaError
from paceline.core.runs import FlatRun, runs
from paceline.core.stacking import Stretch, stack
from paceline.core.tree import flatten


def stretch(run: FlatRun) -> Stretch:
    if run.nbytes == 0:
        return Stretch(run.layout, run.count, run.columns, None)
    block = np.zeros(run.nbytes, np.uint8)
    run.write(block.data)
    return Stretch(run.layout, run.count, run.columns, block)


def together_again(found: list[FlatRun]) -> list[Any]:
    return [tree for run in found for tree in stretch(run).trees()]


def varied(tree: Any, step: int) -> Any:
    """A tree of the same layout with other values."""
    if isinstance(tree, dict):
        return {key: varied(part, step) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(varied(part, step) for part in tree)
    if isinstance(tree, np.ndarray):
        return np.roll(tree, step)
    if type(tree) is int:
        return tree ^ step
    return tree * (step % 3) if isinstance(tree, (str, bytes)) else tree


@given(st.lists(TREES, min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_items_come_back_as_they_were_in_runs_of_those_alike(
    trees: list[Any], times: list[int]
) -> None:
    items = [varied(tree, n) for tree, many in zip(trees, times, strict=False) for n in range(many)]
    found = runs(items)
    assert equal(together_again(found), items)
    layouts = [flatten(item).layout for item in items]
    assert [run.layout for run in found for _ in range(run.count)] == layouts
    assert all(a.layout != b.layout for a, b in pairwise(found))


@given(TREES, st.integers(1, 9), st.integers(0, 300))
@example(np.zeros(100), 9, 1700)
def test_a_run_in_pieces_is_the_run(tree: Any, count: int, nbytes: int) -> None:
    items = [varied(tree, n) for n in range(count)]
    (run,) = runs(items)
    pieces = run.pieces(nbytes)
    assert all(piece.nbytes <= nbytes or piece.count == 1 for piece in pieces)
    assert equal(together_again(pieces), items)
    assert equal(stack([stretch(piece) for piece in pieces]), stack([stretch(run)]))


LARGE = np.arange(3000.0).reshape(30, 100)


@pytest.mark.parametrize(
    "items",
    [
        [np.float32(1), np.float32(2)],
        [np.array(3.0), np.array(4.0)],
        [np.array([1, 2], ">i4"), np.array([3, 4], ">i4")],
        [np.zeros(3, bfloat16()), np.ones(3, np.uint16).view(bfloat16())],
        [np.array(["ab", "c"]), np.array(["de", "f"])],
        [np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00:00")],
        [np.timedelta64(1, "s"), np.timedelta64(1, "D")],
        [np.str_("a"), np.str_("bcd")],
        [LARGE, LARGE + 1],
        [LARGE.T, LARGE.T + 1],
        [LARGE[::2, ::3], LARGE[1::2, ::3]],
        [np.zeros((3, 0)), np.ones((3, 0))],
        [True, 1],
        [1, 1.0],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [{1: "a"}, {1: "b"}],
        [[1], (1,)],
        [[], []],
        [np.zeros(3), np.zeros(4)],
        ["ä", "ö"],
    ],
)
def test_whatever_may_travel_travels_in_runs(items: list[Any]) -> None:
    wanted = [np.asarray(item) if isinstance(item, np.generic) else item for item in items]
    assert equal(together_again(runs(items)), wanted)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (1 << 63, r"^leaf \$\.x is an int of more than 64 bits: 9223372036854775808$"),
        ("\ud800", r"^leaf \$\.x is a str that UTF-8 cannot hold: "),
        (np.array([None]), r"^leaf \$\.x is an array of object; allowed are "),
        (datetime.date(2020, 1, 1), r"^leaf \$\.x is a datetime\.date; allowed are "),
    ],
)
def test_what_may_not_travel_is_refused_with_its_path_however_many_there_are(
    bad: Any, said: str
) -> None:
    for items in ([{"x": bad}], [{"x": bad}] * 3):
        with pytest.raises(SchemaError, match=said):
            runs(items)


def test_items_nested_too_deep_are_refused_also_when_many() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SchemaError, match=r"is nested over 64 deep \(a cycle\?\)$"):
        runs([loop, loop])
