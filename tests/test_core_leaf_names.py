"""Names of a model's leaves: one form for all frameworks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import SchemaError
from paceline.core.leaf_names import leaf_names
from paceline.core.tree import flatten

A = np.zeros(2)


def names(tree: Any) -> list[str]:
    return [*leaf_names(flatten(tree).layout)]


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ({"fc.weight": A, "fc.bias": A}, ["fc.weight", "fc.bias"]),
        ({"fc": {"weight": A, "bias": A}}, ["fc.weight", "fc.bias"]),
        ({"fc/weight:0": A, "fc/bias": A}, ["fc.weight", "fc.bias"]),
        ({"layers": [A, (A, 3)]}, ["layers.0", "layers.1.0", "layers.1.1"]),
        ({0: A, "1": A}, ["0", "1"]),
        (A, ["value"]),
        ({}, []),
        ([], []),
    ],
)
def test_keys_are_joined_by_dots(tree: Any, found: list[str]) -> None:
    assert names(tree) == found


@pytest.mark.parametrize("tree", [{"a.b": A, "a": {"b": A}}, {"a/b": A, "a.b": A}, {0: A, "0": A}])
def test_two_leaves_of_one_name_are_an_error(tree: Any) -> None:
    with pytest.raises(SchemaError, match=r"^two leaves have the name '(a\.b|0)'$"):
        names(tree)


words = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=4)


@given(st.lists(words, unique_by=".".join, max_size=8))
def test_nesting_and_flat_keys_give_the_same_names(paths: list[list[str]]) -> None:
    flat = {".".join(path): n for n, path in enumerate(paths)}
    slashed = {"/".join(path) + ":0": n for n, path in enumerate(paths)}
    nested: dict[str, Any] = {}
    clash = False
    for n, path in enumerate(paths):
        place = nested
        for word in path[:-1]:
            place = place.setdefault(word, {})
            if not isinstance(place, dict):
                clash = True
                break
        else:
            clash = clash or path[-1] in place
            if not clash:
                place[path[-1]] = n
        if clash:
            break
    assert names(flat) == names(slashed) == [*flat]
    if not clash:
        assert sorted(names(nested)) == sorted(flat)
