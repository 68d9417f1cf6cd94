"""Trees: taken apart and put together again without loss."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.core import tree as trees
from paceline.core.bfloat16 import bfloat16
from paceline.core.errors import SchemaError
from paceline.core.like import rebuild
from paceline.core.stacking import Stretch, row, stack

settings.register_profile("suite", deadline=None, max_examples=60)
settings.load_profile("suite")

DTYPES = st.sampled_from(
    ["?", "<i1", "<u8", ">i4", "<f2", "<f4", "<f8", "<c16", "<U3", "S2", "<M8[s]", "<m8[ms]"]
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5)
)  # fmt: skip
TREES = st.recursive(
    ARRAYS | PLAIN,
    lambda part: (
        st.lists(part, max_size=3)
        | st.lists(part, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), part, max_size=3)
    ),
    max_leaves=8,
)


def round_trip(tree: Any) -> Any:
    flat = trees.flatten(tree)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    assert trees.decoded(flat.layout).nbytes == flat.nbytes
    return trees.unflatten(flat.layout, flat.values, block)


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        same = (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        return bool(same)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or a != a


@given(TREES)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert equal(round_trip(tree), tree)


def test_stacked_trees_gain_a_leading_axis() -> None:
    parts = []
    for i in range(3):
        flat = trees.flatten({"x": np.full((2, 2), i), "n": i, "ok": i > 0, "name": f"item {i}"})
        block = np.zeros(flat.nbytes, np.uint8)
        flat.write(block.data)
        parts.append(Stretch(flat.layout, 1, [[value] for value in flat.values], block))
    joined: Any = stack(parts)
    assert joined["x"].shape == (3, 2, 2)
    np.testing.assert_array_equal(joined["x"][:, 0, 0], [0, 1, 2])
    np.testing.assert_array_equal(joined["n"], [0, 1, 2])
    np.testing.assert_array_equal(joined["ok"], [False, True, True])
    assert joined["name"] == ["item 0", "item 1", "item 2"]
    assert parts[0].block is not None
    parts[0].block[:] = 9
    assert joined["x"][0, 0, 0] == 0
    other = trees.flatten({"x": np.zeros(3), "n": 1, "ok": True, "name": ""})
    assert stack([*parts, Stretch(other.layout, 1, [[1], [True], [""]], None)]) is None


def test_strided_and_fortran_arrays_keep_their_values() -> None:
    base = np.arange(24.0).reshape(4, 6)
    back = round_trip({"t": base.T, "s": base[::2, ::-3], "f": np.asfortranarray(base)})
    np.testing.assert_array_equal(back["t"], base.T)
    np.testing.assert_array_equal(back["s"], base[::2, ::-3])
    np.testing.assert_array_equal(back["f"], base)


def test_bfloat16_keeps_its_bits() -> None:
    bits = np.array([0x3F80, 0x7FC1, 0x0001], np.uint16)
    back = round_trip([bits.view(bfloat16())])[0]
    assert back.dtype == bfloat16()
    np.testing.assert_array_equal(back.view(np.uint16), bits)


def test_leaves_are_aligned_so_that_frameworks_can_alias_them() -> None:
    flat = trees.flatten([np.zeros(3, np.int8), np.zeros(5), np.zeros(1)])
    assert [offset % 64 for _, _, offset, _ in trees.decoded(flat.layout).places] == [0, 0, 0]


Point = namedtuple("Point", "x y")


@dataclass
class Pair:
    left: Any
    right: Any


def test_named_tuples_and_dataclasses_travel_and_are_rebuilt_when_declared() -> None:
    tree = {"p": Point(1, np.zeros(2)), "d": Pair(2, [3])}
    back = round_trip(tree)
    assert type(back["p"]) is tuple
    assert type(back["d"]) is dict
    again = rebuild(back, tree)
    assert isinstance(again["p"], Point)
    assert again["d"] == Pair(2, [3])
    with pytest.raises(
        SchemaError, match=r"^\$\.d is a dict of \['left', 'right'\], wanted a dict"
    ):
        rebuild(back, {"p": back["p"], "d": {"left": 1}})


def test_a_subclass_of_dict_is_rebuilt_in_its_own_order() -> None:
    like = OrderedDict(b=Point(0, 0), a=0)
    again = rebuild({"a": 1, "b": (2, 3)}, like)
    assert list(again.items()) == [("b", Point(2, 3)), ("a", 1)]
    assert type(again) is OrderedDict
    assert like == OrderedDict(b=Point(0, 0), a=0)
    assert rebuild({"a": 1}, defaultdict(list, a=0))["new"] == []


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": [1, {2, 3}]}, r"^leaf \$\.a\[1\] is a set; allowed are None, bool"),
        ({"a b": object()}, r"^leaf \$\['a b'\] is an object; allowed"),
        ([np.array([None])], r"^leaf \$\[0\] is an array of object; allowed"),
        (2**63, r"^leaf \$ is an int of more than 64 bits: 9223372036854775808$"),
        ({(1, 2): 3}, r"^\$ has the key \(1, 2\); keys are str or int$"),
        (np.zeros(2, [("a", "f4")]), r"^leaf \$ is an array of \[\('a', '<f4'\)\]; allowed"),
        (np.ma.masked_array([1]), r"^leaf \$ is a numpy\.ma.*MaskedArray; allowed"),
    ],
)
def test_what_may_not_travel_is_named_by_its_path(tree: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        trees.flatten(tree)


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SchemaError, match=r"nested over 64 deep \(a cycle\?\)$"):
        trees.flatten(loop)


def layout(tree: Any) -> bytes:
    return trees.flatten(tree).layout


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": np.zeros(3)}, r"^assign: leaf \$\.b is missing, declared int$"),
        (
            {"a": np.zeros(4), "b": 1},
            r"^assign: leaf \$\.a is float64\[4\], declared float64\[3\]$",
        ),
        (
            {"a": np.zeros(3, "f4"), "b": 1},
            r"^assign: leaf \$\.a is float32\[3\], declared float64",
        ),
        ({"a": np.zeros(3), "b": "x"}, r"^assign: leaf \$\.b is str, declared int$"),
        ({"a": np.zeros(3), "b": 1, "c": 2}, r"^assign: leaf \$\.c is int, not declared at all$"),
    ],
)
def test_the_first_odd_leaf_is_named(found: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        trees.check(layout(found), layout({"a": np.zeros(3), "b": 1}), "assign")


def test_the_order_of_keys_does_not_matter() -> None:
    trees.check(layout({"b": 1, "a": 2}), layout({"a": 2, "b": 1}), "assign")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x92\xc0\x90",
        b"\x92\xc0\x91\x92\xa3<f8\x91\xff",
        b"\x92\xc0\x91\x92\xa1O\x90",
    ],
)
def test_bytes_that_are_no_layout_are_refused(data: bytes) -> None:
    with pytest.raises(SchemaError, match=r"^\d+ bytes are not a layout: "):
        trees.decoded(data)


@given(st.binary(max_size=40))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with contextlib.suppress(SchemaError):
        trees.decoded(data)


@given(TREES, st.integers(1, 3))
def test_rows_of_stacked_trees_are_the_trees(tree: Any, n: int) -> None:
    flat = trees.flatten(tree)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    stretch = Stretch(flat.layout, 1, [[value] for value in flat.values], block)
    joined = stack([stretch] * n)
    for place in range(n):
        assert equal(row(flat.layout, joined, place), tree)
