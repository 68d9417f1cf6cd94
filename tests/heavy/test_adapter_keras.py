"""Keras models: out to arrays and back in place, with each backend that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

from paceline import SchemaError, Session, Unsupported
from paceline.adapters.base import adapter, adapter_for, convert, fingerprint, read_into
from paceline.adapters.keras import ADAPTER
from paceline.core.tree import flatten, unflatten
from paceline.testing.adapters import check_adapter

BACKEND = keras.backend.backend()
OTHERS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"))
    for name in ("jax", "tensorflow", "numpy")
]

# What old JAX and torch say of the Python that runs them.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(4, name="hidden"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(5),
            keras.layers.Dense(2),
        ]
    )


def functional() -> keras.Model:
    inputs = keras.Input((3,))
    shared = keras.layers.Dense(3)
    return keras.Model(inputs, mlp()(shared(shared(inputs))))


def recurrent() -> keras.Model:
    return keras.Sequential([keras.layers.Input((7, 3)), keras.layers.LSTM(4)])


class Own(keras.layers.Layer):  # type: ignore[misc]
    """Weights of all kinds, some without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(2)

    def build(self, shape: tuple[int, ...]) -> None:
        self.first = self.add_weight(shape=(2, 3))
        self.second = self.add_weight(shape=())
        self.steps = self.add_weight(
            shape=(2,), dtype="int32", initializer="zeros", trainable=False, name="steps"
        )
        self.mask = self.add_weight(
            shape=(3,), dtype="bool", initializer="zeros", trainable=False, name="mask"
        )
        self.brain = self.add_weight(shape=(3,), dtype="bfloat16", name="brain")
        self.inner.build(shape)


def own() -> Own:
    made = Own()
    made.build((1, 3))
    return made


MAKERS: list[Callable[[], Any]] = [
    mlp,
    functional,
    recurrent,
    own,
    lambda: built(keras.layers.Identity()),
    lambda: keras.Variable(np.ones((2, 3), "float32")),
    lambda: keras.Variable(7, dtype="int32", trainable=False),
]


def built(layer: keras.Layer) -> keras.Layer:
    layer.build((1, 3))
    return layer


def contents(model: Any) -> list[list[Any]]:
    return [keras.ops.convert_to_numpy(weight).tolist() for weight in model.weights]


@pytest.mark.parametrize("make", MAKERS)
def test_the_keras_adapter_keeps_the_contract(make: Callable[[], Any]) -> None:
    check_adapter(ADAPTER, make)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            mlp,
            "hidden/kernel hidden/bias batch_normalization/gamma batch_normalization/beta"
            " batch_normalization/moving_mean batch_normalization/moving_variance"
            " dense/kernel dense/bias dense_1/kernel dense_1/bias",
        ),
        (
            functional,
            "dense/kernel dense/bias"
            " sequential/hidden/kernel sequential/hidden/bias"
            " sequential/batch_normalization/gamma sequential/batch_normalization/beta"
            " sequential/batch_normalization/moving_mean"
            " sequential/batch_normalization/moving_variance"
            " sequential/dense/kernel sequential/dense/bias"
            " sequential/dense_1/kernel sequential/dense_1/bias",
        ),
        (recurrent, "lstm/lstm_cell/kernel lstm/lstm_cell/recurrent_kernel lstm/lstm_cell/bias"),
        (own, "variable variable_1 brain steps mask dense/kernel dense/bias"),
    ],
)
def test_the_names_of_a_model_do_not_depend_on_what_was_made_before(
    make: Callable[[], Any], names: str
) -> None:
    for _ in range(2):
        assert " ".join(ADAPTER.to_tree(make(), "$")) == names


def test_layers_with_one_name_are_told_apart() -> None:
    class Twins(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one = keras.layers.Dense(2, name="same")
            self.two = keras.layers.Dense(2, name="same")

        def build(self, shape: tuple[int, ...]) -> None:
            self.one.build(shape)
            self.two.build(shape)

        def call(self, x: Any) -> Any:
            return self.one(x) + self.two(x)

    twins = Twins()
    twins.build((1, 3))
    assert [*ADAPTER.to_tree(twins, "$")] == [
        "same/kernel",
        "same/bias",
        "same/kernel_1",
        "same/bias_1",
    ]


def test_a_model_without_weights_yet_is_refused() -> None:
    model = keras.Sequential([keras.layers.Dense(3)])
    message = r"^\$ is a Keras Sequential that has no weights yet; build it, or call it once$"
    for attempt in (lambda: ADAPTER.to_tree(model, "$"), lambda: ADAPTER.plan(model, {}, "$")):
        with pytest.raises(SchemaError, match=message):
            attempt()


def test_a_variable_is_read_into_a_model_all_or_nothing() -> None:
    with Session() as session:
        net, other = mlp(), mlp()
        variable = session.variable("net", net)
        assert variable.read_into(other) == variable.version
        assert contents(other) == contents(net)
        x = np.ones((2, 3), np.float32)
        assert np.allclose(net.predict(x, verbose=0), other.predict(x, verbose=0))
        narrow = recurrent()
        before = contents(narrow)
        with pytest.raises(
            SchemaError, match=r"^read_into 'net': leaf \$\['hidden/kernel'\] is missing"
        ):
            variable.read_into(narrow)
        assert contents(narrow) == before


def test_weights_never_share_the_memory_that_readers_share() -> None:
    with Session() as session:
        big = keras.Sequential([keras.layers.Input((300,)), keras.layers.Dense(200)])
        variable = session.variable("big", big)
        variable.read_into(big)
        snapshot = variable.read()
        before = snapshot.tree["dense/kernel"].copy()
        for weight in big.weights:
            weight.assign(weight + 1)
        assert np.array_equal(snapshot.tree["dense/kernel"], before)


def test_the_fingerprint_tells_training_where_the_backend_can() -> None:
    net = mlp()
    mark = fingerprint(net)
    assert (mark is None) == (BACKEND in ("tensorflow", "numpy"))
    if mark is None:
        return
    assert fingerprint(net) == mark
    net.weights[0].assign(net.weights[0] * 2)
    assert fingerprint(net) != mark


def test_names_that_keras_does_not_train_are_not_in_the_tree() -> None:
    net = mlp()
    net.compile(optimizer="adam", loss="mse", metrics=["mae"])
    if BACKEND != "numpy":
        net.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert not [name for name in ADAPTER.to_tree(net, "$") if "seed" in name or "adam" in name]
    assert len(ADAPTER.to_tree(net, "$")) == 10


def test_keras_objects_find_their_adapter() -> None:
    assert adapter("keras") is ADAPTER
    assert adapter_for(mlp()) is ADAPTER
    assert adapter_for(keras.Variable(1.0)) is ADAPTER
    assert adapter_for(keras.KerasTensor((1,))) is None
    tree = flatten({"net": mlp(), "n": 1}, convert)
    block = np.zeros(tree.nbytes, np.uint8)
    tree.write(block.data)
    target = {"net": mlp()}
    read_into(target, {"net": unflatten(tree.layout, tree.values, block)["net"]})


def test_leaves_go_to_the_backend() -> None:
    made = ADAPTER.to_device(np.arange(3.0, dtype="float32"))
    assert keras.ops.is_tensor(made)
    if BACKEND != "numpy":
        with pytest.raises((Unsupported, RuntimeError)):
            ADAPTER.to_device(np.zeros(2, "float32"), "nowhere:7")


@pytest.mark.skipif("PACELINE_TEST_INNER" in os.environ, reason="is run by the outer one")
@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.timeout(180)
def test_all_this_holds_for_each_backend(backend: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "KERAS_HOME": str(tmp_path),
        "PACELINE_TEST_INNER": "1",
    }
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-5000:]
