"""TensorFlow: graphs of version 1 in a session of their own, eager variables and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from paceline import SchemaError, Session, Unsupported
from paceline.adapters.base import adapter, adapter_for, fingerprint, read_into
from paceline.core.bfloat16 import is_bfloat16
from paceline.testing.adapters import check_adapter

tf = pytest.importorskip("tensorflow")
tf1 = tf.compat.v1

from paceline.adapters.tensorflow import ADAPTER, GraphVariables  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def graph(initialised: bool = True) -> Any:
    """A session on a graph with variables of all kinds, finalized: nothing can be added to it."""
    made = tf.Graph()
    with made.as_default():
        with tf1.variable_scope("layer"):
            tf1.get_variable("w", [2, 3])
            tf1.get_variable("b", [3], initializer=tf1.zeros_initializer())
        tf1.get_variable("old", [2], use_resource=False)
        tf1.get_variable("brain", [3], tf.bfloat16)
        tf1.get_variable("mask", [2], tf.bool, trainable=False, initializer=tf1.zeros_initializer())
        # Two from one initial value, which can be fed with one value at a time.
        shared = tf.ones([2])
        tf1.Variable(shared, name="one")
        tf1.Variable(shared, name="other")
        tf1.train.get_or_create_global_step()
        start = tf1.global_variables_initializer()
        session = tf1.Session(graph=made)
        if initialised:
            session.run(start)
    made.finalize()
    return session


NAMES = ["layer/w", "layer/b", "old", "brain", "mask", "one", "other", "global_step"]


def variables(session: Any) -> list[Any]:
    return list(session.graph.get_collection(tf1.GraphKeys.GLOBAL_VARIABLES))


@contextmanager
def graphs(count: int = 1) -> Iterator[list[Any]]:
    made = [graph() for _ in range(count)]
    try:
        yield made
    finally:
        for session in made:
            session.close()


def test_the_tensorflow_adapter_keeps_the_contract() -> None:
    check_adapter(ADAPTER, graph)
    check_adapter(ADAPTER, lambda: (lambda s: GraphVariables(s, variables(s)[:2]))(graph()))
    check_adapter(ADAPTER, lambda: tf.Variable(np.ones((2, 3), np.float32)))
    check_adapter(ADAPTER, lambda: tf.Variable(7, dtype=tf.int64))


def test_a_session_is_the_global_variables_of_its_graph_by_name() -> None:
    with graphs() as [session]:
        tree = ADAPTER.to_tree(session, "$")
        assert list(tree) == NAMES
        assert is_bfloat16(tree["brain"].dtype)
        assert tree["global_step"].dtype == np.int64
        some = GraphVariables(session, variables(session)[1:3])
        assert list(ADAPTER.to_tree(some, "$")) == ["layer/b", "old"]
        assert repr(some) == "<GraphVariables: ['layer/b', 'old']>"
        assert adapter_for(session) is adapter_for(some) is adapter("tensorflow") is ADAPTER


def test_reading_and_writing_never_grow_a_graph() -> None:
    with graphs(2) as [one, two], Session() as session:
        before = [len(each.graph.get_operations()) for each in (one, two)]
        shared = session.variable("net", one)
        for _ in range(5):
            tree = ADAPTER.to_tree(one, "$")
            shared.assign({**tree, "layer/w": tree["layer/w"] + 1})
            assert shared.read_into(two) == shared.version
            shared.assign(two)
        assert [len(each.graph.get_operations()) for each in (one, two)] == before


def test_two_with_one_initial_value_are_written_apart() -> None:
    with graphs() as [session]:
        tree = ADAPTER.to_tree(session, "$")
        tree["one"], tree["other"] = np.ones(2, np.float32), np.zeros(2, np.float32)
        read_into(session, tree)
        found = ADAPTER.to_tree(session, "$")
        assert found["one"].tolist() == [1, 1]
        assert found["other"].tolist() == [0, 0]


def test_a_graph_never_initialised_can_be_read_into_but_not_out_of() -> None:
    fresh = graph(initialised=False)
    with graphs() as [session], fresh:
        outline = ADAPTER.outline(fresh, "$")
        assert {name: (array.dtype, array.shape) for name, array in outline.items()} == {
            name: (array.dtype, array.shape)
            for name, array in ADAPTER.to_tree(session, "$").items()
        }
        with pytest.raises(
            SchemaError,
            match=r"^\$\.net: not all variables are initialised: .*(uninitialized|not find) v",
        ):
            ADAPTER.to_tree(fresh, "$.net")
        read_into(fresh, ADAPTER.to_tree(session, "$"))
        assert (
            fresh.run(variables(fresh)[0]).tolist() == session.run(variables(session)[0]).tolist()
        )


def test_a_graph_computes_with_what_was_read_into_it() -> None:
    made = tf.Graph()
    with made.as_default(), tf1.Session(graph=made) as own, Session() as session:
        w = tf1.get_variable("w", [2])
        x = tf1.placeholder(tf.float32, [None, 2])
        y = tf.reduce_sum(x * w, axis=1)
        shared = session.variable("net", {"w": np.array([2, 3], np.float32)})
        shared.read_into(own)
        assert own.run(y, {x: [[1, 1], [0, 2]]}).tolist() == [5, 6]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    with graphs() as [session]:
        before = ADAPTER.to_tree(session, "$")
        for name, odd, message in (
            (
                "layer/w",
                np.zeros((3, 2), np.float32),
                r"is float32\[2,3\], declared float32\[3,2\]",
            ),
            ("global_step", np.zeros((), np.int32), r"is int64\[\], declared int32\[\]"),
            ("brain", np.zeros(3, np.float16), r"is bfloat16\[3\], declared float16\[3\]"),
        ):
            with pytest.raises(SchemaError, match=rf"^read_into: leaf \$.*{name}.* {message}$"):
                read_into(session, {**before, name: odd})
        del before["old"]
        with pytest.raises(SchemaError, match=r"leaf \$\.old of the target is not declared at all"):
            read_into(session, before)


def test_an_array_that_was_read_in_is_not_kept() -> None:
    made = tf.Graph()
    with made.as_default(), tf1.Session(graph=made) as own:
        w = tf1.get_variable("w", [1 << 16])
        source = np.ones(1 << 16, np.float32)
        read_into(own, {"w": source})
        source[:] = 2
        assert own.run(w).max() == 1
        eager = source.copy()
    variable = tf.Variable(np.zeros(1 << 16, np.float32))
    read_into(variable, eager)
    eager[:] = 5
    assert variable.numpy().max() == 2


def test_graphs_parts_alone_have_no_contents() -> None:
    made = tf.Graph()
    with made.as_default():
        variable = tf1.get_variable("w", [2])
        old = tf1.get_variable("old", [2], use_resource=False)
        for part in (variable, old, tf.zeros([2])):
            for attempt in (ADAPTER.to_tree, lambda v, path: ADAPTER.plan(v, np.zeros(2), path)):
                with pytest.raises(SchemaError, match=r"^leaf \$\.v is of a graph; what has its"):
                    attempt(part, "$.v")
    with pytest.raises(SchemaError, match=r"^leaf \$\.v is of a graph; what has its"):
        ADAPTER.to_tree(variable, "$.v")


def test_shapes_and_dtypes_that_cannot_travel_are_refused() -> None:
    made = tf.Graph()
    with made.as_default(), tf1.Session(graph=made) as own:
        tf1.Variable(
            tf1.placeholder_with_default(np.zeros(2), [None]),
            name="open",
            validate_shape=False,
            use_resource=True,
        )
        with pytest.raises(SchemaError, match=r"^leaf \$\.open has the shape .*, which is not one"):
            ADAPTER.outline(own, "$")
    with pytest.raises(SchemaError, match=r"^leaf \$ is a TensorFlow tensor of texts$"):
        ADAPTER.to_tree(tf.constant(["text", "longer"]), "$")


def test_tensors_travel_as_data_and_never_change() -> None:
    tensor = tf.constant([1.0, 2.0])
    with Session() as session:
        assert session.variable("t", {"x": tensor}).read().tree["x"].tolist() == [1, 2]
    with pytest.raises(SchemaError, match=r"^read_into: leaf \$ is a TensorFlow tensor, which nev"):
        read_into(tensor, np.zeros(2, np.float32))
    assert ADAPTER.to_device(np.arange(3), "cpu:0").numpy().tolist() == [0, 1, 2]
    with pytest.raises(Unsupported, match=r"^no TensorFlow device 'gpu:7'; there are \['/"):
        ADAPTER.to_device(np.arange(3), "gpu:7")
    assert fingerprint(tensor) is None
