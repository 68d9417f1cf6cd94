"""What an adapter is: one framework's models as trees of NumPy arrays, and back.

Also the adapter of NumPy itself, and the way to the adapter of any object: by its type, without
importing a framework that the program does not use.
"""

from __future__ import annotations

import functools
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np

from paceline.core import like as likes
from paceline.core.bfloat16 import is_bfloat16
from paceline.core.errors import SchemaError, UnknownName, Unsupported
from paceline.core.tree import Array, Tree, child

Plan: TypeAlias = list[Callable[[], None]]

# The name of a framework is the root of its types' modules.
_MODULES = {
    "jax": "paceline.adapters.jax",
    "keras": "paceline.adapters.keras",
    "numpy": "paceline.adapters.base",
    "tensorflow": "paceline.adapters.tensorflow",
    "torch": "paceline.adapters.pytorch",
}


class Adapter(ABC):
    """Turns one framework's objects (models, tensors) into trees of NumPy arrays and back.

    It has no state. Its module offers one as `ADAPTER`.
    """

    in_place: bool = True
    """Whether `plan` can fill its objects; else they never change, and `restore` makes others."""

    @abstractmethod
    def owns(self, value: object) -> bool:
        """Whether `value` is a model or a tensor of this framework."""

    @abstractmethod
    def to_tree(self, value: Any, path: str) -> Tree:
        """The arrays of `value`, which stands at `path`; they may share its memory.

        Raises:
            SchemaError: a leaf has no NumPy form; the message has its path and what is allowed.
        """

    def outline(self, value: Any, path: str) -> Tree:
        """As `to_tree`, but only the dtypes and shapes count: the arrays may have other contents.

        Raises as `to_tree`, but not because there are no contents yet.
        """
        return self.to_tree(value, path)

    def tied(self, value: Any) -> dict[str, str]:
        """Further names of leaves that `to_tree` gives once, each with the name that it gives."""
        return {}

    @abstractmethod
    def plan(self, target: Any, tree: Tree, path: str) -> Plan:
        """The copies, all checked and none made yet, that bring `tree` into `target` in place.

        The arrays of `tree` may be read-only; a copy never makes `target` share their memory.

        Raises:
            SchemaError: names, shapes or dtypes differ; the message names the first odd leaf.
        """

    def restore(self, tree: Tree, like: Any, path: str) -> Any:
        """An object like `like`, which stays as it is, with the contents of `tree`.

        Without a way to make one it is `tree` itself, whose arrays may be read-only.

        Raises:
            SchemaError: names, shapes or dtypes differ; the message names the first odd leaf.
        """
        return tree

    @abstractmethod
    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Any:
        """A tensor with the contents of `leaf` on `device` (`None`: the processor's memory).

        In the processor's memory it shares that of `leaf` if `leaf` is writable and dense; where
        `in_place` is false it never does.

        Raises:
            SchemaError: the framework has no such dtype.
            Unsupported: there is no such device.
        """

    @abstractmethod
    def fingerprint(self, target: Any) -> object | None:
        """A cheap mark, equal until `target` is changed in place; `None` when it cannot tell."""


class NumpyAdapter(Adapter):
    """Arrays as they are."""

    def owns(self, value: object) -> bool:
        return isinstance(value, np.ndarray)

    def to_tree(self, value: Any, path: str) -> Tree:
        return value

    def plan(self, target: Any, tree: Tree, path: str) -> Plan:
        source = same(path, target.dtype, target.shape, tree)
        if not target.flags.writeable:
            raise SchemaError(f"leaf {path} is a read-only array; a writable one is wanted")
        return [functools.partial(np.copyto, target, source)]

    def restore(self, tree: Tree, like: Any, path: str) -> Any:
        return same(path, like.dtype, like.shape, tree)

    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Any:
        if device is not None and str(device) != "cpu":
            raise Unsupported(f"no NumPy array lives on device {str(device)!r}, only on 'cpu'")
        return leaf

    def fingerprint(self, target: Any) -> object | None:
        return None


ADAPTER = NumpyAdapter()


def adapter(name: str) -> Adapter:
    """The adapter of a framework: of `"jax"`, `"keras"`, `"numpy"`, `"tensorflow"` or `"torch"`.

    Raises:
        UnknownName: there is none of that name.
        Unsupported: the framework is not installed.
    """
    if name not in _MODULES:
        raise UnknownName(f"no adapter {name!r}; there are {sorted(_MODULES)}")
    try:
        found: Adapter = importlib.import_module(_MODULES[name]).ADAPTER
    except ModuleNotFoundError as e:
        raise Unsupported(
            f"adapter {name!r} needs {e.name!r}, which is not installed; "
            f"pip install 'paceline[{name}]'"
        ) from e
    return found


def adapter_for(value: Any) -> Adapter | None:
    """The adapter that owns `value`, or `None`; imports no framework that is not loaded yet.

    A type with `__paceline_adapter__` brings its own.
    """
    kind: type = type(value)
    own: Adapter | None = getattr(kind, "__paceline_adapter__", None)
    found = own or _adapter_of(kind)
    if found is None and sys.modules.get("jax") is not None:
        # Any class can be registered with JAX, at any time; arrays are of jaxlib.
        found = adapter("jax")
    return found if found is not None and found.owns(value) else None


def convert(leaf: Any, path: str) -> Tree:
    """The tree of a framework's object, or `leaf` itself: the hook of `core.tree.flatten`.

    Raises:
        SchemaError: its framework's adapter refuses it.
    """
    found = adapter_for(leaf)
    return leaf if found is None else found.to_tree(leaf, path)


def outline(leaf: Any, path: str) -> Tree:
    """As `convert`, but only the dtypes and shapes of what it returns count."""
    found = adapter_for(leaf)
    return leaf if found is None else found.outline(leaf, path)


def read_into(target: Any, tree: Tree, what: str = "read_into") -> None:
    """Copy `tree` into `target` in place, leaf by leaf.

    `target` is a writable array, a tensor, a model, or a dict, dataclass, list or tuple of them.
    All of it is checked before the first byte is copied.

    Raises:
        SchemaError: they differ; the message starts with `what` and names the first odd leaf.
    """
    try:
        copies = plan(target, tree, "$")
    except SchemaError as e:
        raise SchemaError(f"{what}: {e}") from e
    for copy in copies:
        copy()


def rebuild(tree: Tree, like: Any, what: str = "rebuild") -> Any:
    """Give `tree` the form of `like`: its containers, models of immutable frameworks, their arrays.

    Raises:
        SchemaError: they differ; the message starts with `what` and names the first odd leaf.
    """
    try:
        return likes.rebuild(tree, like, "$", _restorer)
    except SchemaError as e:
        raise SchemaError(f"{what}: {e}") from e


def fingerprint(target: Any) -> object | None:
    """A mark of `target` that differs after a change in place; `None` when there is no telling.

    There is none for NumPy arrays, nor for anything that contains one.
    """
    owner = adapter_for(target)
    if owner is not None:
        return owner.fingerprint(target)
    parts = _parts(target)
    if parts is None:
        return None
    marks = []
    for key, part in parts.items():
        mark = fingerprint(part)
        if mark is None:
            return None
        marks.append((key, mark))
    return tuple(marks)


def in_place(target: Any, path: str = "$") -> bool:
    """Whether `read_into` can fill all of it; what it cannot is made anew by `rebuild`.

    Raises:
        SchemaError: it has models to fill beside leaves that can only be replaced.
    """
    kinds = dict(_changing(target, path))
    new = [place for place, kind in kinds.items() if kind == "new"]
    models = [place for place, kind in kinds.items() if kind == "model"]
    if new and models:
        raise SchemaError(
            f"{models[0]} is changed in place, and {new[0]} can only be replaced: they cannot be in"
            " one tree"
        )
    return not new


def leaves(target: Any) -> Iterator[Any]:
    """Models, arrays and plain values, without the containers around them."""
    parts = None if adapter_for(target) is not None else _parts(target)
    if parts is None:
        yield target
        return
    for part in parts.values():
        yield from leaves(part)


def plan(target: Any, tree: Tree, path: str) -> Plan:
    """The copies that bring `tree` into a target of any kind, as `Adapter.plan`."""
    owner = adapter_for(target)
    if owner is not None:
        return owner.plan(target, tree, path)
    parts = _parts(target)
    if parts is None:
        raise SchemaError(
            f"leaf {path} is {shown(target)}; only arrays, tensors and models can be read into"
        )
    if isinstance(target, (list, tuple)):
        if not isinstance(tree, list if isinstance(target, list) else tuple):
            raise SchemaError(f"{path} is {shown(target)}, declared {shown(tree)}")
        tree = dict(enumerate(tree))
    return [copy for part in pair(parts, tree, path) for copy in plan(*part)]


def pair(target: Mapping[Any, Any], declared: Tree, path: str) -> Iterator[tuple[Any, Any, str]]:
    """The parts of `target` beside those declared under the same key, each with its path.

    Raises:
        SchemaError: a key is on one side only.
    """
    if not isinstance(declared, dict):
        raise SchemaError(f"{path} has {len(target)} named parts, declared {shown(declared)}")
    for key, part in declared.items():
        if key not in target:
            raise SchemaError(f"leaf {child(path, key)} is missing, declared {shown(part)}")
        yield target[key], part, child(path, key)
    for key in target:
        if key not in declared:
            raise SchemaError(f"leaf {child(path, key)} of the target is not declared at all")


def same(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], declared: Tree) -> Array:
    """`declared`, if it is an array of this dtype (in any byte order) and shape.

    Raises:
        SchemaError: it is not; the message shows both.
    """
    if (
        isinstance(declared, np.ndarray)
        and declared.shape == shape
        and np.can_cast(declared.dtype, dtype, "equiv")
    ):
        return declared
    found = shown(np.broadcast_to(np.empty((), dtype), shape))
    raise SchemaError(f"leaf {path} is {found}, declared {shown(declared)}")


def shown(part: Any) -> str:
    """What a part of a tree is, in a message: `float32[3]`, `dict of 2`, `int`."""
    if isinstance(part, np.ndarray):
        dtype = "bfloat16" if is_bfloat16(part.dtype) else part.dtype.name
        return f"{dtype}[{','.join(map(str, part.shape))}]"
    kind = type(part).__name__
    return f"{kind} of {len(part)}" if isinstance(part, (dict, list, tuple)) else kind


@functools.lru_cache(maxsize=1024)
def _adapter_of(kind: type) -> Adapter | None:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _MODULES and root in sys.modules:
            return adapter(root)
    return None


def _restorer(like: Any) -> likes.Restore | None:
    owner = adapter_for(like)
    return None if owner is None else owner.restore


def _changing(target: Any, path: str) -> Iterator[tuple[str, str]]:
    """The parts of a target by their paths: arrays and models to fill, and what is made anew."""
    owner = adapter_for(target)
    parts = None if owner is not None else _parts(target)
    if parts is not None:
        for key, part in parts.items():
            yield from _changing(part, child(path, key))
    elif owner is None or not owner.in_place:
        yield path, "new"
    else:
        yield path, "array" if owner is ADAPTER else "model"


def _parts(target: Any) -> Mapping[Any, Any] | None:
    if isinstance(target, Mapping):
        return target
    if is_dataclass(target) and not isinstance(target, type):
        return {field.name: getattr(target, field.name) for field in fields(target)}
    if isinstance(target, (list, tuple)):
        return dict(enumerate(target))
    return None
