"""Spread variables without servers: how trees are cut and joined, and who may commit what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import spreading
from paceline.core.errors import ProtocolError, Refused, SchemaError
from paceline.core.messages.replies import Spreading
from paceline.core.part_state import Grants, PartState
from paceline.core.tree import flatten
from paceline.core.versions import first
from paceline.core.waiting import Stored

TASKS = ["ps:0", "ps:1", "ps:2"]
SHAPES = st.lists(st.integers(0, 5), max_size=2).map(tuple)
LEAVES = SHAPES.map(
    lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape)
) | st.integers(0, 9)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and np.array_equal(one, two)


@given(TREES, st.data())
def test_what_is_cut_is_joined_again(tree: Any, data: Any) -> None:
    flat = flatten(tree)
    choices = st.sampled_from(TASKS) | st.lists(
        st.sampled_from(TASKS), min_size=1, max_size=3, unique=True
    )
    chosen = data.draw(st.lists(choices, min_size=len(flat.arrays), max_size=len(flat.arrays)))
    plan = spreading.spread(flat.layout, "ps:1", TASKS, lambda leaves: chosen, "")
    spreading.check(plan)
    shares = spreading.shares(plan, flat, "")
    assert plan.parts[0][0] == "ps:1"
    assert len(shares) == len(plan.parts)
    kept = sum(
        leaf.nbytes for share in shares for leaf in share.values() if isinstance(leaf, np.ndarray)
    )
    assert kept == flat.size
    assert same(spreading.joined(plan, shares), tree)


@given(st.dictionaries(st.sampled_from("abcd"), LEAVES, min_size=2))
def test_a_tree_in_another_order_is_cut_alike(tree: dict[str, Any]) -> None:
    plan = spreading.spread(flatten(tree).layout, "ps:0", TASKS, None, "")
    turned = flatten(dict(reversed(tree.items())))
    assert same(spreading.joined(plan, spreading.shares(plan, turned, "")), tree)


@given(st.lists(st.integers(0, 1000)))
def test_greedy_leaves_no_server_behind(sizes: list[int]) -> None:
    chosen = spreading.greedy([("", size) for size in sizes], TASKS)
    load = dict.fromkeys(TASKS, 0)
    for size, task in zip(sizes, chosen, strict=True):
        assert load[task] == min(load.values())
        load[task] += size
    assert chosen[:3] == TASKS[: len(sizes)] or 0 in sizes[:3]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("ps:0", [])],
        [("ps:0", [(0, 0, -1)]), ("ps:1", [(0, 0, -1)])],
        [("ps:0", [(0, 0, 2)])],
        [("ps:0", [(0, 0, 2)]), ("ps:1", [(0, 3, 4)])],
        [("ps:0", [(0, 0, 5)])],
        [("ps:0", [(0, 1, -1)])],
        [("ps:0", [(0, 0, 3), (0, 3, 2), (0, 2, 4)])],
        [("ps:0", [(0, 0, -1), (1, 0, -1)])],
        [("ps:0", [(0, 0, -1), (7, 0, -1)])],
    ],
)
def test_a_peer_places_every_row_once(parts: Any) -> None:
    layout = flatten({"rows": np.zeros(4), "plain": 1}).layout
    with pytest.raises(ProtocolError):
        spreading.check(Spreading(layout, parts))


def test_a_layout_that_is_none_is_not_placed() -> None:
    with pytest.raises(SchemaError, match="are not a layout"):
        spreading.check(Spreading(b"x", []))


def test_stages_only_grow_and_only_their_holder_commits_them() -> None:
    grants = Grants(7)
    one = grants.grant("v", "a", turn=False)
    two = grants.grant("v", "b", turn=True)
    other = grants.grant("w", "a", turn=False)
    assert first(7) < one < two < other < grants.below
    assert grants.of("v") == {one, two}
    grants.check("v", two, "b", turn=True)
    for name, stage, holder, turn in (
        ("v", one, "b", False),
        ("w", one, "a", False),
        ("v", two, "b", False),
        ("v", 0, "a", False),
    ):
        with pytest.raises(Refused):
            grants.check(name, stage, holder, turn=turn)
    assert grants.abandon("v", one, "b") is None
    assert grants.abandon("v", one, "a") is not None
    with pytest.raises(Refused):
        grants.check("v", one, "a", turn=False)
    # What is being committed does not end with its holder.
    grants.keep(two)
    assert grants.lost("b") == []
    assert grants.of("v") == {two}
    assert [grant.name for grant in grants.lost("a")] == ["w"]
    grants.end(two)
    assert grants.of("v") == set()


def test_a_part_drops_what_the_home_did_not_name() -> None:
    part = PartState()
    part.trees = {stage: Stored(b"", [], None) for stage in range(6)}
    part.drop({1, 3}, 5)
    assert sorted(part.trees) == [1, 3, 5]
