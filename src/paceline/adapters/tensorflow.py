"""TensorFlow: graphs of version 1 in a session of their own, and eager variables and tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from paceline.adapters.base import Adapter, Plan, pair, same
from paceline.core.errors import SchemaError, Unsupported
from paceline.core.tree import Array, Tree, child

_tf1 = tf.compat.v1
_Feeds: TypeAlias = list[tuple[Any, Any, Array]]


class TensorFlowAdapter(Adapter):
    """A `tf.compat.v1.Session` is a flat dict of its graph's global variables, by their names.

    `GraphVariables` chooses among them. They are read and written with what a graph has for each of
    its variables already, so a graph never grows by it, and may be finalized. An eager variable, or
    a tensor, is one array.
    """

    def owns(self, value: object) -> bool:
        return isinstance(value, (_tf1.Session, GraphVariables, tf.Variable, tf.Tensor))

    def to_tree(self, value: Any, path: str) -> Tree:
        if not isinstance(value, (tf.Variable, tf.Tensor)):
            return _linked(value).contents(path)
        _check_eager(value, path)
        return _checked(value.numpy(), path)

    def outline(self, value: Any, path: str) -> Tree:
        if isinstance(value, (tf.Variable, tf.Tensor)):
            return self.to_tree(value, path)
        return _linked(value).outline(path)

    def plan(self, target: Any, tree: Tree, path: str) -> Plan:
        if not isinstance(target, (tf.Variable, tf.Tensor)):
            return _linked(target).plan(tree, path)
        _check_eager(target, path)
        if isinstance(target, tf.Tensor):
            raise SchemaError(f"leaf {path} is a TensorFlow tensor, which never changes")
        source = same(path, _dtype(target, path), _shape(target, path), tree)
        # TensorFlow may keep the memory that it is given.
        return [lambda: target.assign(np.array(source))]

    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Any:
        """A tensor with a copy of `leaf`, on a device such as `"cpu"` or `"gpu:1"`."""
        place = None if device is None else _device(device)
        try:
            with tf.device(place):
                return tf.constant(np.array(leaf, leaf.dtype.newbyteorder("=")))
        except (TypeError, ValueError, NotImplementedError) as e:
            raise SchemaError(
                f"leaf {path} is {leaf.dtype}, which TensorFlow has no dtype for"
            ) from e

    def fingerprint(self, target: Any) -> object | None:
        return None


ADAPTER = TensorFlowAdapter()


class GraphVariables:
    """Some variables of a graph of TensorFlow 1, and the session that has their values.

    Args:
        session: a `tf.compat.v1.Session`.
        variables: variables of its graph; by default all global ones, as of a `Saver`.
    """

    __paceline_adapter__ = ADAPTER

    def __init__(self, session: Any, variables: Iterable[Any] | None = None) -> None:
        if variables is None:
            variables = session.graph.get_collection(_tf1.GraphKeys.GLOBAL_VARIABLES)
        self._session = session
        self._variables = {variable.op.name: variable for variable in variables}

    def __repr__(self) -> str:
        return f"<GraphVariables: {[*self._variables]}>"

    def contents(self, path: str) -> dict[str, Array]:
        """All variables, read in one step."""
        try:
            found = self._session.run(self._variables)
        except tf.errors.FailedPreconditionError as e:
            raise SchemaError(f"{path}: not all variables are initialised: {_said(e)}") from e
        return {
            name: _checked(np.asarray(value), child(path, name)) for name, value in found.items()
        }

    def outline(self, path: str) -> dict[str, Array]:
        """The dtypes and shapes, which need no values."""
        return {
            name: np.broadcast_to(
                np.empty((), _dtype(variable, child(path, name))),
                _shape(variable, child(path, name)),
            )
            for name, variable in self._variables.items()
        }

    def plan(self, tree: Tree, path: str) -> Plan:
        """Write all variables, in one step where they were made from initial values of their own.

        A variable's initialiser is fed with the new value: so it also initialises.
        """
        steps: list[_Feeds] = []
        for variable, declared, place in pair(self._variables, tree, path):
            source = same(place, _dtype(variable, place), _shape(variable, place), declared)
            value = variable.initializer.inputs[1]
            # Of several with one initial value each is fed in a step of its own.
            for step in steps:
                if all(value is not other for _, other, _ in step):
                    break
            else:
                step = []
                steps.append(step)
            step.append((variable.initializer, value, source))
        return [functools.partial(_run, self._session, step) for step in steps]


def _run(session: Any, step: _Feeds) -> None:
    # TensorFlow may keep the memory that it is given.
    feeds = {value: np.array(source) for _, value, source in step}
    session.run([initializer for initializer, _, _ in step], feeds)


def _linked(value: Any) -> GraphVariables:
    return value if isinstance(value, GraphVariables) else GraphVariables(value)


def _check_eager(value: Any, path: str) -> None:
    if hasattr(value, "graph"):
        raise SchemaError(
            f"leaf {path} is of a graph; what has its contents is the session, or"
            " paceline.adapters.tensorflow.GraphVariables(session, variables)"
        )


def _dtype(variable: Any, path: str) -> np.dtype[Any]:
    dtype = variable.dtype.base_dtype
    try:
        return _checked(np.empty(0, dtype.as_numpy_dtype), path).dtype
    except (TypeError, NotImplementedError) as e:
        raise SchemaError(f"leaf {path} is a variable of {dtype.name}") from e


def _shape(variable: Any, path: str) -> tuple[int, ...]:
    if not variable.shape.is_fully_defined():
        raise SchemaError(f"leaf {path} has the shape {variable.shape}, which is not one shape")
    return tuple(variable.shape)


def _checked(array: Any, path: str) -> Array:
    found: Array = np.asarray(array)
    if found.dtype == object:
        raise SchemaError(f"leaf {path} is a TensorFlow tensor of texts")
    return found


def _device(device: Any) -> str:
    kind, _, number = str(device).upper().removeprefix("/DEVICE:").partition(":")
    there = [found.name for found in tf.config.list_logical_devices()]
    # Asked for one that there is not, TensorFlow takes another.
    if f"/device:{kind}:{number or 0}" not in there:
        raise Unsupported(f"no TensorFlow device {device!r}; there are {there}")
    return f"/device:{kind}:{number or 0}"


def _said(error: Any) -> str:
    """The line of what TensorFlow says that names a variable."""
    lines = str(error.message).strip().splitlines()
    return next((line for line in lines if "uninitialized" in line or "not find" in line), lines[0])
