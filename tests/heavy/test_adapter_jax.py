"""JAX arrays and pytrees: out to NumPy's form, and back as new trees like the old ones."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paceline import FunctionError, SchemaError, Session, Unsupported, Variable
from paceline.adapters.base import adapter, adapter_for, convert, fingerprint, read_into, rebuild
from paceline.adapters.jax import ADAPTER
from paceline.batches import Batch
from paceline.core.bfloat16 import bfloat16
from paceline.core.tree import Array, Tree, flatten, unflatten
from paceline.functions import dump, load
from paceline.testing.adapters import check_adapter


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Plain:
    """Not known to JAX."""

    w: Any
    scale: float


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "scale", "parts"], meta_fields=["name"]
)
@dataclass
class Registered:
    w: Any
    scale: Any
    parts: Any
    name: str = "mine"


@jax.tree_util.register_pytree_node_class
class Nameless:
    """Its class gave JAX no names for its parts."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: None, parts: tuple[Any, ...]) -> Nameless:
        return cls(*parts)


def mlp(seed: int = 0) -> Any:
    return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(seed))


def registered(seed: float = 0.0) -> Registered:
    parts = [jnp.full(2, seed), (jax.nn.relu, None), {"act": jnp.tanh, "b": np.full(3, seed, "f4")}]
    return Registered(jnp.full((2, 3), seed, jnp.bfloat16), seed, parts)


def published(value: Any) -> Tree:
    """What a variable holds of `value`: a copy in read-only memory."""
    flat = flatten(value, convert)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    block.flags.writeable = False
    return unflatten(flat.layout, flat.values, block)


def back(value: Any, like: Any) -> Any:
    return rebuild(published(value), like)


def committed(array: Any) -> bool:
    """Whether it was put on a device on purpose."""
    return bool(array.committed if hasattr(array, "committed") else array._committed)


def equal(a: Any, b: Any) -> bool:
    """Whether two pytrees have one structure, and leaves of the same types, dtypes and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, (jax.Array, np.ndarray)):
            alike = isinstance(y, jax.Array) == isinstance(x, jax.Array) and x.dtype == y.dtype
            return bool(alike and np.array_equal(np.asarray(x), np.asarray(y)))
        return type(x) is type(y) and bool(x == y)

    return all(map(same, jax.tree.leaves(a), jax.tree.leaves(b)))


MAKERS: list[Callable[[], Any]] = [
    mlp,
    registered,
    lambda: jnp.arange(6.0).reshape(2, 3),
    lambda: jnp.float32(3),
    lambda: jnp.zeros((0, 3), jnp.int8),
    lambda: jnp.array([True, False]),
    lambda: jnp.arange(3, dtype=jnp.bfloat16),
    lambda: jnp.arange(3, dtype=jnp.complex64),
    lambda: jnp.arange(3, dtype=jnp.uint32),
    lambda: Nameless(jnp.ones(2), {"n": Nameless(jnp.zeros(1))}),
    lambda: eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=jax.random.key(1)), eqx.nn.Lambda(abs)]),
    lambda: eqx.nn.LSTMCell(2, 3, key=jax.random.key(1)),
    lambda: eqx.nn.Identity(),
]


@pytest.mark.parametrize("make", MAKERS)
def test_the_jax_adapter_keeps_the_contract(make: Callable[[], Any]) -> None:
    check_adapter(ADAPTER, make)


def test_the_adapter_is_found_by_name_and_by_object() -> None:
    assert adapter("jax") is ADAPTER
    for value in (jnp.zeros(2), jax.random.key(0), mlp(), registered(), Nameless()):
        assert adapter_for(value) is ADAPTER
    others: tuple[Any, ...] = (
        {},
        OrderedDict(),
        [],
        (),
        Point(1, 2),
        Plain(1, 2),
        None,
        1,
        jax.nn.relu,
        abs,
    )
    for other in others:
        assert adapter_for(other) is None


def test_a_module_is_a_dict_by_the_names_of_its_parts() -> None:
    tree = published(mlp())
    assert list(tree) == ["layers", "activation", "final_activation"]
    assert [list(layer) for layer in tree["layers"]] == [["weight", "bias"]] * 2
    assert tree["activation"] is tree["final_activation"] is None
    assert tree["layers"][0]["weight"].shape == (4, 2)


def test_a_node_without_names_is_a_dict_by_places() -> None:
    assert published({"n": Nameless(np.ones(1), 2.0)}) == {"n": {0: np.ones(1), 1: 2.0}}


def test_an_array_shares_the_memory_of_its_tree() -> None:
    array = jnp.arange(1000.0)
    assert ADAPTER.to_tree(array, "$").ctypes.data == array.unsafe_buffer_pointer()


def test_a_module_comes_back_with_new_arrays_and_its_own_functions() -> None:
    source, like = mlp(1), mlp(2)
    made = back(source, like)
    assert equal(made, source)
    assert not equal(made, like)
    assert made.activation is like.activation
    assert made.in_size == 2
    x = jnp.ones(2)
    assert np.array_equal(eqx.filter_jit(made)(x), eqx.filter_jit(source)(x))


def test_every_part_of_a_node_comes_back_as_it_was() -> None:
    source, like = registered(3.0), registered(0.0)
    made = back({"r": [source]}, {"r": [like]})["r"][0]
    assert equal(made, source)
    assert isinstance(made.parts, list)
    assert made.parts[1] == (jax.nn.relu, None)
    assert made.scale == 3.0
    assert type(made.parts[2]["b"]) is np.ndarray


def test_half_of_a_partitioned_module_fills_the_whole() -> None:
    source = mlp(1)
    params, _ = eqx.partition(source, eqx.is_array)
    assert equal(back(params, mlp(2)), source)
    assert equal(back(source, params), params)


def test_each_leaf_is_of_the_framework_of_its_like() -> None:
    source = {"j": jnp.ones(2), "n": np.ones(3), "p": Point(jnp.zeros(1), [2, "x", None])}
    made = back(source, source)
    assert equal(made, source)
    swapped = back(source, {"j": np.zeros(2, np.float32), "n": 0, "p": Point(0, 0)})
    assert type(swapped["j"]) is np.ndarray
    assert not swapped["j"].flags.writeable
    assert type(swapped["n"]) is np.ndarray


def test_containers_are_those_of_like() -> None:
    source = OrderedDict(b=Point(jnp.ones(1), 2), a=Plain(jnp.zeros(2), 0.5))
    made = back(source, source)
    assert list(made) == ["b", "a"]
    assert type(made) is OrderedDict
    assert isinstance(made["b"], Point)
    assert isinstance(made["a"].w, jax.Array)
    assert made["a"].scale == 0.5


def test_the_state_of_an_optimiser_comes_back_with_its_structure() -> None:
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    chain = optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(1e-3, 0, 9)))
    state = chain.init(params)
    _, stepped = chain.update(params, state, params)
    assert equal(back(stepped, state), stepped)


def test_a_model_beside_the_state_of_its_optimiser_makes_the_round_trip() -> None:
    net = mlp()
    state = optax.adam(1e-3).init(eqx.filter(net, eqx.is_array))
    source = {"net": net, "opt": state, "step": 7}
    assert equal(back(source, {"net": mlp(1), "opt": state, "step": 0}), source)


def test_the_shapes_of_an_abstract_tree_are_enough() -> None:
    source = {"w": jnp.ones((2, 3)), "net": mlp()}
    like = eqx.filter_eval_shape(lambda: source)
    assert equal(back(source, like), source)
    with pytest.raises(SchemaError, match=r"^leaf \$\.net\.layers\[0\]\.weight is a jax\.Shape"):
        published(like)


def test_a_donated_array_is_still_good_enough_to_be_like() -> None:
    like = jnp.zeros(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(like)
    assert equal(back(jnp.ones(3), like), jnp.ones(3))


def test_weak_types_and_places_are_those_of_like() -> None:
    weak, fixed = jnp.asarray(2.0), jax.device_put(jnp.zeros(2), jax.devices()[0])
    made = back({"weak": weak, "fixed": fixed}, {"weak": jnp.asarray(0.0), "fixed": fixed})
    assert made["weak"].weak_type
    assert float(made["weak"]) == 2.0
    assert committed(made["fixed"])
    assert not committed(back(jnp.ones(2), jnp.zeros(2)))


def test_what_comes_back_may_be_donated() -> None:
    tree = published(jnp.zeros(1 << 16))
    array = rebuild(tree, jnp.zeros(1 << 16))
    assert not np.shares_memory(np.asarray(array), tree)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert not tree.any()


def test_numpy_arrays_in_a_node_come_back_as_copies() -> None:
    tree = published(Nameless(np.ones(2)))
    made = rebuild(tree, Nameless(np.zeros(2)))
    made.parts[0][:] = 3
    assert tree[0].tolist() == [1, 1]


def test_plain_dataclasses_are_what_they_are_without_jax() -> None:
    target = Plain(np.zeros(2), 0.5)
    tree = published(target)
    assert type(tree) is dict
    assert tree["scale"] == 0.5
    read_into({"w": target.w}, {"w": np.ones(2)})
    assert target.w.tolist() == [1, 1]
    with pytest.raises(SchemaError, match=r"^leaf \$\.w is a builtin"):
        published(Plain(abs, 0.5))


def test_numpy_arrays_in_a_node_can_be_read_into() -> None:
    target = Nameless(np.zeros(2), [np.zeros(1)], abs)
    read_into(target, published(Nameless(np.ones(2), [np.full(1, 3.0)], abs)))
    assert target.parts[0].tolist() == [1, 1]
    assert target.parts[1][0].tolist() == [3]
    assert fingerprint(target) is None


ODD: list[tuple[Any, Any, str]] = [
    (jnp.ones(3), jnp.ones(4), r"leaf \$\.x is float32\[4\], declared float32\[3\]"),
    (jnp.ones(3), jnp.ones(3, jnp.bfloat16),
     r"leaf \$\.x is bfloat16\[3\], declared float32\[3\]"),
    (np.ones(3), jnp.ones(3), r"leaf \$\.x is float32\[3\], declared float64\[3\]"),
    (jnp.ones(3), np.ones(3), r"leaf \$\.x is float64\[3\], declared float32\[3\]"),
    (1.0, jnp.float32(1), r"leaf \$\.x is float32\[\], declared float"),
    ({"a": 1}, jnp.ones(1), r"leaf \$\.x is float32\[1\], declared dict of 1"),
    (Nameless(jnp.ones(1)), Nameless(jnp.ones(2)),
     r"leaf \$\.x\[0\] is float32\[2\], declared float32\[1\]"),
    (Nameless(jnp.ones(1)), Nameless(), r"leaf \$\.x\[0\] is missing, declared float32\[1\]"),
    (Nameless(), Nameless(jnp.ones(1)), r"leaf \$\.x\[0\] of the target is not declared at all"),
    (Nameless(jnp.ones(1)), Nameless(abs),
     r"leaf \$\.x\[0\] is builtin_function_or_method, declared float32\[1\]"),
    (Nameless(1.5), Nameless("a"), r"leaf \$\.x\[0\] is str, declared float"),
    (Nameless(1.5), Nameless(None), r"leaf \$\.x\[0\] is NoneType, declared float"),
    (Nameless(abs), Nameless(jnp.ones(1)),
     r"leaf \$\.x\[0\] is float32\[1\], declared NoneType"),
    (Nameless(Point(1, 2)), Nameless([1, 2, 3]), r"leaf \$\.x\[0\]\[2\] of the target is not"),
    (Nameless({"a": 1}), Nameless([1]), r"\$\.x\[0\] is list of 1, declared dict of 1"),
    (3, mlp(), r"\$\.x has 3 named parts, declared int"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "like", "message"), ODD)
def test_the_first_odd_leaf_of_like_is_named(source: Any, like: Any, message: str) -> None:
    with Session() as session:
        variable = session.variable("policy", {"first": jnp.ones(1), "x": source})
        with pytest.raises(SchemaError, match=rf"^read 'policy': {message}"):
            variable.read(like={"first": jnp.ones(1), "x": like})


def donated() -> Any:
    array = jnp.ones(2)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jax.random.key(0), r"a PRNG key, key<fry>, which NumPy has no form for; use jax\.random"),
        (donated(), r"an array that was deleted or donated; use what the function"),
        (jnp.zeros(2, jnp.float8_e5m2), r"an array of float8_e5m2; allowed are"),
        (jnp.zeros(2, jnp.float8_e4m3fn), r"an array of float8_e4m3fn; allowed are"),
        (jnp.zeros(2, jnp.int4), r"an array of int4; allowed are"),
        (1j, r"a complex; allowed are"),
    ],
)
def test_a_leaf_that_cannot_travel_is_named(leaf: Any, message: str) -> None:
    with Session() as session:
        policy: Variable[Any] = session.variable("policy", {"x": 0})
        for tree, path in (({"x": leaf}, r"\$\.x"), ({"x": Nameless(leaf)}, r"\$\.x\[0\]")):
            with pytest.raises(SchemaError, match=rf"^assign 'policy': leaf {path} is {message}"):
                policy.assign(tree)


def test_a_key_travels_as_its_data() -> None:
    key = jax.random.key(7)
    data = back(jax.random.key_data(key), jax.random.key_data(key))
    assert jax.random.wrap_key_data(data) == key
    with pytest.raises(SchemaError, match=r"^rebuild: leaf \$\.x is a PRNG key, key<fry>, which"):
        rebuild({"x": np.zeros(2, np.uint32)}, {"x": key})


def test_a_traced_array_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^leaf \$\.x is a traced array, which has no contents"):
        jax.jit(lambda x: published({"x": x}))(jnp.ones(2))


def test_reading_into_what_never_changes_names_the_way() -> None:
    with Session() as session:
        net = mlp()
        policy = session.variable("policy", {"net": net})
        with pytest.raises(
            SchemaError,
            match=r"^read_into 'policy': leaf \$\.net\.layers\[0\]\.weight is a JAX array, which "
            r"never changes; use read\(like=\.\.\.\)\.tree$",
        ):
            policy.read_into({"net": net})


def test_a_module_is_a_variable_like_any_other() -> None:
    with Session() as session:
        net = mlp(1)
        policy = session.variable("policy", net)
        assert equal(policy.read(like=mlp(2)).tree, net)
        version = policy.assign(mlp(3))
        found = policy.read(like=net)
        assert found.version == version
        assert equal(found.tree, mlp(3))
        grads = jax.tree.map(lambda x: x if eqx.is_array(x) else None, net)
        policy.assign_add(grads)
        wanted = mlp(3).layers[0].weight + net.layers[0].weight
        assert np.array_equal(policy.read(like=net).tree.layers[0].weight, wanted)
        with pytest.raises(SchemaError, match=r"^assign 'policy': leaf \$\.layers\[0\]\.weight is"):
            policy.assign(eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0)))


# Batches and devices


def batch(data: Any) -> Batch[Any]:
    none = np.zeros(0, np.int64)
    return Batch(data=data, version=none, lag=none, worker=("worker:0",), metrics={})


def test_a_batch_goes_to_jax_as_copies() -> None:
    data: dict[str, Any] = {
        "x": np.ones((2, 3), np.float32),
        "name": ["a", "b"],
        "pair": (np.arange(2), [0, 1]),
    }
    moved = batch(data).to("jax").data
    data["x"][:] = 9
    assert isinstance(moved["x"], jax.Array)
    assert moved["x"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert moved["name"] == ["a", "b"]
    assert moved["pair"][0].dtype == jnp.int32
    assert not committed(moved["x"])


@pytest.mark.parametrize("device", ["cpu", "cpu:0", jax.devices("cpu")[0]])
def test_a_batch_goes_to_a_device_by_name_or_object(device: Any) -> None:
    moved = batch(np.ones(2)).to("jax", device=device).data
    assert moved.devices() == {jax.devices("cpu")[0]}
    assert committed(moved)


@pytest.mark.parametrize("device", ["npu", "cpu:7", "cpu:x"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(device: str) -> None:
    with pytest.raises(Unsupported, match=rf"^no JAX device '{device}'; there are \['cpu:0'\]$"):
        batch(np.ones(2)).to("jax", device=device)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.array(["abc"]), r"<U3, which jax has no dtype for"),
        (np.array([1], "M8[s]"), r"datetime64\[s\], which jax has no dtype for"),
        (np.array([5, 1 << 31]), r"int64 with 5 to 2147483648, which jax has only int32 for; set"),
        (np.array([-(1 << 31) - 1]), r"int64 with -2147483649 to -2147483649, which jax has only"),
    ],
)
def test_a_leaf_that_jax_cannot_hold_is_named(leaf: Array, message: str) -> None:
    with pytest.raises(SchemaError, match=rf"^leaf \$\.x\[1\] is {message}"):
        batch({"x": [np.ones(1), leaf]}).to("jax")


def test_integers_that_just_fit_go_to_jax() -> None:
    leaf = np.array([-(1 << 31), (1 << 31) - 1])
    assert ADAPTER.to_device(leaf).tolist() == leaf.tolist()


@pytest.mark.parametrize(
    "leaf", [np.arange(6.0)[::-2], np.arange(3, dtype=">i4"), np.array(3), np.zeros((0, 2))]
)
def test_to_device_takes_any_layout(leaf: Array) -> None:
    assert ADAPTER.to_device(leaf).tolist() == leaf.tolist()


def test_bfloat16_keeps_its_bits() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    made = ADAPTER.to_device(bits.view(bfloat16()))
    assert made.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(made).view(np.uint16), bits)


def test_with_64_bits_enabled_they_are_kept() -> None:
    program = """
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
from paceline.adapters.jax import ADAPTER
print(ADAPTER.to_device(np.array([1 << 40])), ADAPTER.to_device(np.ones(1)).dtype)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == "[1099511627776] float64\n"


# Functions


def test_captured_arrays_modules_and_compiled_functions_travel() -> None:
    array, net = jnp.arange(3.0), mlp()
    compiled = jax.jit(lambda x: x @ jnp.ones((3, 3)))
    run: Any = load(dump(lambda: (compiled(array), net(jnp.ones(2)))), lambda name: name)
    found = run()
    assert np.array_equal(found[0], compiled(array))
    assert np.array_equal(found[1], net(jnp.ones(2)))


def test_a_traced_array_stays_where_it_is_traced() -> None:
    def trace(x: Any) -> Any:
        with pytest.raises(FunctionError, match=r"captured variable 'x' is a traced JAX array; "):
            dump(lambda: x)
        return x

    jax.jit(trace)(jnp.ones(2))
