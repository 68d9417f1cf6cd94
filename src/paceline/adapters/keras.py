"""Keras 3, with any backend: models by the names of their weights, variables as arrays."""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any

import keras
import numpy as np

from paceline.adapters.base import Adapter, Plan, adapter, adapter_for, pair, same
from paceline.core.bfloat16 import bfloat16
from paceline.core.errors import SchemaError, Unsupported
from paceline.core.tree import Array, Tree, child


class KerasAdapter(Adapter):
    """Models and layers are flat dicts of their weights, trainable or not; each comes once.

    A weight's name is its path, `dense/kernel`, without the model's own name. Names that Keras made
    itself count within the model (`dense`, `dense_1`), so that they are the same in each process,
    whatever was made there before. The states of random generators and metrics do not belong to it.
    """

    def owns(self, value: object) -> bool:
        return isinstance(value, (keras.Layer, keras.Variable))

    def to_tree(self, value: Any, path: str) -> Tree:
        if isinstance(value, keras.Layer):
            return {name: _array(v, child(path, name)) for name, v in _weights(value, path).items()}
        return _array(value, path)

    def plan(self, target: Any, tree: Tree, path: str) -> Plan:
        if isinstance(target, keras.Layer):
            parts = pair(_weights(target, path), tree, path)
            return [copy for part in parts for copy in _copies(*part)]
        return _copies(target, tree, path)

    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Any:
        """A tensor of the backend; as that framework's adapter makes it, if there is one."""
        backend = keras.backend.backend()
        if backend in ("jax", "torch", "tensorflow", "numpy"):
            return adapter(backend).to_device(leaf, device, path=path)
        if device is not None:
            raise Unsupported(f"keras with the backend {backend!r}: no device but the default one")
        return keras.ops.convert_to_tensor(np.array(leaf))

    def fingerprint(self, target: Any) -> object | None:
        """As the backend's adapter tells; with JAX, the arrays that the variables hold."""
        layer = isinstance(target, keras.Layer)
        marks = []
        for variable in target.weights if layer else [target]:
            value = variable.value
            owner = adapter_for(value)
            if owner is None:
                return None
            mark = owner.fingerprint(value) if owner.in_place else _Held(value)
            if mark is None:
                return None
            marks.append(mark)
        return tuple(marks)


ADAPTER = KerasAdapter()


class _Held:
    """Equal for the same object only, and for none once it is gone."""

    def __init__(self, value: object) -> None:
        self._value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return value is not None and isinstance(other, _Held) and other._value() is value

    __hash__ = None  # type: ignore[assignment]


def _weights(layer: keras.Layer, path: str) -> dict[str, keras.Variable]:
    if not layer.built:
        raise SchemaError(
            f"{path} is a Keras {type(layer).__name__} that has no weights yet; build it, or call"
            " it once"
        )
    naming = _Naming(layer)
    found: dict[str, keras.Variable] = {}
    for weight in layer.weights:
        name = base = naming.name(weight.path)
        count = 0
        while name in found:
            count += 1
            name = f"{base}_{count}"
        found[name] = weight
    return found


class _Naming:
    """Names that depend on the model alone, not on how many layers its process has made."""

    def __init__(self, layer: keras.Layer) -> None:
        self._own = layer.name
        self._made = {"variable": "variable"}
        for part in layer._flatten_layers(include_self=False):
            base = _snake(type(part).__name__)
            if re.fullmatch(rf"{base}(_\d+)?", part.name):
                self._made[part.name] = base
        self._counts: dict[tuple[str, str], int] = {}
        self._known: dict[tuple[str, str], str] = {}

    def name(self, path: str) -> str:
        words = path.split("/")
        if words[0] == self._own and len(words) > 1:
            words = words[1:]
        scope = ""
        for word in words:
            scope = f"{scope}/{self._counted(scope, word)}" if scope else self._counted("", word)
        return scope

    def _counted(self, scope: str, word: str) -> str:
        base = self._made.get(word)
        if base is None:
            made = re.fullmatch(r"variable_\d+", word)
            if made is None:
                return word
            base = "variable"
        if (scope, word) not in self._known:
            count = self._counts.get((scope, base), 0)
            self._counts[scope, base] = count + 1
            self._known[scope, word] = f"{base}_{count}" if count else base
        return self._known[scope, word]


def _snake(name: str) -> str:
    """The name that Keras gives to an object of a class by itself."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


def _array(tensor: Any, path: str) -> Array:
    """A variable, or a tensor of the backend, as an array, which shares its memory where it can."""
    value = tensor.value if isinstance(tensor, keras.Variable) else tensor
    owner = adapter_for(value)
    found: Array = np.asarray(value) if owner is None else owner.to_tree(value, path)
    return found


def _copies(target: keras.Variable, declared: Tree, path: str) -> Plan:
    """The checked copies of an array into a variable."""
    value = target.value
    owner = adapter_for(value)
    if owner is not None and owner.in_place:
        return owner.plan(value, declared, path)
    if owner is not None:
        # An array of JAX is replaced. The new one is the variable's own: nothing else may hold it.
        return [functools.partial(target.assign, owner.restore(declared, value, path))]
    source = same(path, _dtype(target, path), tuple(target.shape), declared)
    return [lambda: target.assign(np.array(source))]


def _dtype(variable: keras.Variable, path: str) -> np.dtype[Any]:
    try:
        return bfloat16() if variable.dtype == "bfloat16" else np.dtype(variable.dtype)
    except TypeError as e:
        raise SchemaError(f"leaf {path} is a variable of {variable.dtype}") from e
