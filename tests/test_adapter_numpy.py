"""Trees of NumPy arrays: read in place, checked as a whole before the first byte."""

import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.adapters.base import (
    ADAPTER,
    Adapter,
    adapter,
    adapter_for,
    convert,
    fingerprint,
    read_into,
    rebuild,
)
from paceline.core.bfloat16 import bfloat16
from paceline.core.errors import SchemaError, UnknownName, Unsupported
from paceline.core.tree import Array, Tree
from paceline.testing.adapters import check_adapter


class Pair(NamedTuple):
    w: Array
    b: Array


@dataclass
class State:
    mean: Array


def sealed(array: Array) -> Array:
    array.flags.writeable = False
    return array


def values() -> Tree:
    return {
        "net": {"w": sealed(np.arange(6, dtype=np.float32).reshape(2, 3)), 3: sealed(np.ones(2))},
        "parts": [sealed(np.array(7)), (sealed(np.array([True])),)],
    }


def zeros() -> Tree:
    return {
        "net": {"w": np.zeros((2, 3), np.float32), 3: np.zeros(2)},
        "parts": [np.zeros((), np.int64), (np.zeros(1, np.bool_),)],
    }


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.int8, np.bool_, np.complex64, "U3", "M8[s]", bfloat16()]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)])
def test_the_numpy_adapter_keeps_the_contract(dtype: Any, shape: tuple[int, ...]) -> None:
    check_adapter(ADAPTER, lambda: np.zeros(shape, dtype))


class Aliasing(Adapter):
    """Breaks the contract on purpose: its models keep the arrays that they are given."""

    def owns(self, value: object) -> bool:
        return isinstance(value, State)

    def to_tree(self, value: Any, path: str) -> Tree:
        return value.mean

    def plan(self, target: Any, tree: Tree, path: str) -> Any:
        ADAPTER.plan(target.mean, tree, path)
        return [lambda: setattr(target, "mean", tree)]

    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Any:
        return State(leaf)

    def fingerprint(self, target: Any) -> object | None:
        return None


def test_the_check_finds_an_adapter_that_aliases_its_source() -> None:
    with pytest.raises(AssertionError, match=r"^the model aliases no source"):
        check_adapter(Aliasing(), lambda: State(np.ones(3)))


def test_read_into_fills_every_array_of_a_nested_target() -> None:
    target = zeros()
    places = [target["net"]["w"], target["net"][3], target["parts"][0], target["parts"][1][0]]
    read_into(target, values())
    assert [place.tolist() for place in places] == [[[0, 1, 2], [3, 4, 5]], [1, 1], 7, [True]]


def test_read_into_fills_named_tuples_dataclasses_and_mappings() -> None:
    target = OrderedDict(pair=Pair(np.zeros(2), np.zeros(1)), state=State(np.zeros(3)))
    tree = {"state": {"mean": np.full(3, 2.0)}, "pair": (np.ones(2), np.full(1, 5.0))}
    read_into(target, tree)
    pair, state = target["pair"], target["state"]
    assert isinstance(pair, Pair)
    assert isinstance(state, State)
    assert pair.w.tolist() == [1, 1]
    assert pair.b.tolist() == [5]
    assert state.mean.tolist() == [2, 2, 2]


def test_read_into_fills_a_strided_view_and_one_of_another_byte_order() -> None:
    whole = np.zeros((2, 4), np.float32)
    swapped = np.zeros(2, ">f4")
    read_into([whole[:, ::2], swapped], [np.ones((2, 2), np.float32), np.ones(2, np.float32)])
    assert whole.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]
    assert swapped.tolist() == [1, 1]


def test_read_into_aliases_nothing() -> None:
    target, source = np.zeros(3), np.ones(3)
    read_into({"x": target}, {"x": source})
    source[:] = 9
    assert target.tolist() == [1, 1, 1]


ODD: list[tuple[Any, Any, str]] = [
    (np.zeros(3), np.zeros(4), r"leaf \$\.x is float64\[3\], declared float64\[4\]"),
    (np.zeros(3), np.zeros(3, "f4"), r"leaf \$\.x is float64\[3\], declared float32\[3\]"),
    (np.zeros(()), np.zeros((1,)), r"leaf \$\.x is float64\[\], declared float64\[1\]"),
    (
        np.zeros(2, bfloat16()),
        np.zeros(2, "u2"),
        r"leaf \$\.x is bfloat16\[2\], declared uint16\[2\]",
    ),
    (
        np.zeros(2, "u2"),
        np.zeros(2, bfloat16()),
        r"leaf \$\.x is uint16\[2\], declared bfloat16\[2\]",
    ),
    (np.zeros(()), 1.0, r"leaf \$\.x is float64\[\], declared float"),
    (np.zeros(3), {}, r"leaf \$\.x is float64\[3\], declared dict of 0"),
    ({}, {"y": np.zeros(3)}, r"leaf \$\.x\.y is missing, declared float64\[3\]"),
    ({}, {"a.b": {"c": 1}}, r"leaf \$\.x\['a\.b'\] is missing, declared dict of 1"),
    ({"y": np.zeros(3)}, {}, r"leaf \$\.x\.y of the target is not declared at all"),
    ({}, np.zeros(3), r"\$\.x has 0 named parts, declared float64\[3\]"),
    ([], (), r"\$\.x is list of 0, declared tuple of 0"),
    ((), [], r"\$\.x is tuple of 0, declared list of 0"),
    ([], [np.zeros(3)], r"leaf \$\.x\[0\] is missing, declared float64\[3\]"),
    (3, 3, r"leaf \$\.x is int; only arrays, tensors and models can be read into"),
    (np.float64(3), np.zeros(()), r"leaf \$\.x is float64; only arrays, tensors and models can be"),
    (sealed(np.ones(3)), np.zeros(3), r"leaf \$\.x is a read-only array; a writable one is wanted"),
]


@pytest.mark.parametrize(("target", "tree", "message"), ODD)
def test_an_odd_leaf_is_named_before_anything_changes(target: Any, tree: Any, message: str) -> None:
    first = np.zeros(3)
    with pytest.raises(SchemaError, match=rf"^read_into 'policy': {message}"):
        read_into({"a": first, "x": target}, {"a": np.ones(3), "x": tree}, "read_into 'policy'")
    assert first.tolist() == [0, 0, 0]


def test_rebuild_gives_containers_and_checks_arrays() -> None:
    source = np.ones(3)
    made: Any = rebuild(
        {"p": (source, source), "n": 1}, {"p": Pair(np.zeros(3), np.zeros(3)), "n": None}
    )
    assert isinstance(made["p"], Pair)
    assert made["p"].w is made["p"].b is source
    assert made["n"] == 1
    with pytest.raises(
        SchemaError, match=r"^read 'v': leaf \$\.p\[0\] is float32\[3\], declared float64\[3\]$"
    ):
        rebuild({"p": (source,)}, {"p": (np.zeros(3, np.float32),)}, "read 'v'")


def test_what_no_adapter_owns_is_left_as_it_is() -> None:
    odd = {1}
    assert adapter_for(odd) is None
    assert convert(odd, "$.x") is odd


def test_an_array_in_the_tree_leaves_no_telling_whether_it_changed() -> None:
    assert fingerprint(np.zeros(3)) is None
    assert fingerprint({"x": [np.zeros(3)]}) is None
    assert fingerprint({"x": 3}) is None


def test_adapters_are_found_by_name() -> None:
    assert adapter("numpy") is ADAPTER
    assert adapter_for(np.zeros(3)) is ADAPTER
    known = r"\['jax', 'keras', 'numpy', 'tensorflow', 'torch'\]"
    with pytest.raises(UnknownName, match=rf"^no adapter 'torhc'; there are {known}"):
        adapter("torhc")


def test_arrays_stay_in_the_memory_of_the_processor() -> None:
    leaf = np.zeros(3)
    assert ADAPTER.to_device(leaf, "cpu") is leaf
    with pytest.raises(Unsupported, match=r"^no NumPy array lives on device 'cuda:0', only on"):
        ADAPTER.to_device(leaf, "cuda:0")


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    return done.stdout.strip()


def test_no_framework_is_imported_for_a_program_that_does_not_use_it() -> None:
    program = """
import sys, numpy
from paceline.adapters.base import adapter_for, read_into
Net = type("Net", (), {"__module__": "torch.nn"})
read_into({"x": numpy.zeros(3)}, {"x": numpy.ones(3)})
print(adapter_for(Net()), "torch" in sys.modules)
"""
    assert run(program) == "None False"


def test_a_framework_that_is_not_installed_is_named_with_the_way_to_get_it() -> None:
    program = """
import sys
sys.modules["torch"] = None
from paceline.adapters.base import adapter
try:
    adapter("torch")
except Exception as e:
    print(type(e).__name__, e)
"""
    wanted = "adapter 'torch' needs 'torch', which is not installed; pip install 'paceline[torch]'"
    assert run(program) == f"Unsupported {wanted}"
