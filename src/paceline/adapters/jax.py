"""JAX: arrays, and pytrees of classes of their own (Equinox modules, Flax dataclasses)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from paceline.adapters.base import Adapter, Plan, adapter_for, pair, plan, same, shown
from paceline.core.bfloat16 import is_bfloat16
from paceline.core.errors import SchemaError, Unsupported
from paceline.core.tree import ALIGNMENT, Array, Tree, child

_PLAIN = (bool, int, float, str, bytes)


class JaxAdapter(Adapter):
    """Nodes of classes registered with JAX are dicts, by the names that JAX gives their parts.

    What cannot travel inside such a node (functions and other objects that JAX has for leaves) is
    None in the dict, and `restore` takes it from `like`. Static fields are no parts. Lists, tuples
    and dicts stay what they are.
    """

    in_place = False

    def owns(self, value: object) -> bool:
        if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
            return True
        return not isinstance(value, (dict, list, tuple)) and _is_node(value)

    def to_tree(self, value: Any, path: str) -> Tree:
        return _out(value, path)

    def plan(self, target: Any, tree: Tree, path: str) -> Plan:
        if isinstance(target, (jax.Array, jax.ShapeDtypeStruct)):
            raise SchemaError(
                f"leaf {path} is a JAX array, which never changes; use read(like=...).tree"
            )
        parts = pair(_parts(target), tree, path)
        return [copy for part in parts if part[1] is not None for copy in plan(*part)]

    def restore(self, tree: Tree, like: Any, path: str) -> Any:
        if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
            return _array_like(tree, like, path)
        if _is_node(like):
            return _node_like(tree, like, path)
        if isinstance(like, (np.ndarray, np.generic)):
            own = same(path, like.dtype, like.shape, tree).copy()
            return own if isinstance(like, np.ndarray) else own[()]
        owner = adapter_for(like)
        if owner is not None:
            return owner.restore(tree, like, path)
        if tree is None:
            return like
        if isinstance(like, _PLAIN) and isinstance(like, type(tree)):
            return tree
        raise SchemaError(f"leaf {path} is {shown(like)}, declared {shown(tree)}")

    def to_device(self, leaf: Array, device: Any = None, *, path: str = "$") -> Any:
        """An array with a copy of `leaf`; 64 bits become 32 unless `jax_enable_x64` is set.

        `device` is a name (`"cpu"`, `"gpu:1"`), a `jax.Device` or a sharding.

        Raises:
            SchemaError: JAX has no such dtype, or an integer does not fit into 32 bits.
            Unsupported: there is no such device.
        """
        return _put(leaf, _device(device) if isinstance(device, str) else device, path)

    def fingerprint(self, target: Any) -> object | None:
        return None


ADAPTER = JaxAdapter()


def _is_node(value: object) -> bool:
    return value is not None and not jax.tree_util.all_leaves([value])


def _opened(node: Any) -> tuple[dict[Any, Any], Any]:
    """The parts of a node by name or place, and what puts them together again."""
    parts, form = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda part: part is not node)
    if isinstance(node, (list, tuple)):
        return dict(enumerate(part for _, part in parts)), form
    return {_name(path[0]): part for path, part in parts}, form


def _parts(node: Any) -> Mapping[Any, Any]:
    return _opened(node)[0]


def _name(key: Any) -> str | int:
    """The key of a dict, the name of a field, or the place in a row."""
    for attribute in ("key", "name", "idx"):
        found = getattr(key, attribute, None)
        if isinstance(found, (str, int)):
            return found
    return str(key)


def _out(value: Any, path: str) -> Tree:
    """What travels of a part of a node; None where nothing does."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise SchemaError(f"leaf {path} is a jax.ShapeDtypeStruct, which has no contents")
    if isinstance(value, jax.Array):
        return _contents(value, path)
    if value is None or isinstance(value, (np.ndarray, np.generic, complex, *_PLAIN)):
        return value
    if isinstance(value, (list, tuple)):
        made = [_out(part, child(path, i)) for i, part in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict) or _is_node(value):
        parts = value if isinstance(value, dict) else _parts(value)
        return {key: _out(part, child(path, key)) for key, part in parts.items()}
    return value if adapter_for(value) is not None else None


def _contents(array: jax.Array, path: str) -> Array:
    """`array` in NumPy's form, which shares its memory on the processor."""
    if isinstance(array, jax.core.Tracer):
        raise SchemaError(f"leaf {path} is a traced array, which has no contents inside jax.jit")
    _check_dtype(array, path)
    if array.is_deleted():
        raise SchemaError(
            f"leaf {path} is an array that was deleted or donated; "
            "use what the function that it was donated to returned"
        )
    if not array.is_fully_addressable:
        raise SchemaError(
            f"leaf {path} is an array that lies on devices of other processes too; gather it first"
        )
    return np.asarray(array)


def _check_dtype(array: Any, path: str) -> None:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise SchemaError(
            f"leaf {path} is a PRNG key, {array.dtype}, which NumPy has no form for; "
            "use jax.random.key_data(key), and jax.random.wrap_key_data on the other side"
        )


def _node_like(tree: Tree, like: Any, path: str) -> Any:
    parts, form = _opened(like)
    if isinstance(like, (list, tuple)):
        if not isinstance(tree, (list, tuple)):
            raise SchemaError(f"{path} is {shown(like)}, declared {shown(tree)}")
        tree = dict(enumerate(tree))
    pairs = list(pair(parts, tree, path))
    made = {
        key: ADAPTER.restore(declared, part, place)
        for key, (part, declared, place) in zip(tree, pairs, strict=True)
    }
    return jax.tree_util.tree_unflatten(form, [made[key] for key in parts])


def _array_like(tree: Tree, like: Any, path: str) -> Any:
    _check_dtype(like, path)
    found = same(path, like.dtype, like.shape, tree)
    if isinstance(like, jax.ShapeDtypeStruct):
        return _put(found, like.sharding, path)
    # An array that was put nowhere in particular may go wherever others are. Old JAX has no public
    # word for it.
    committed = like.committed if hasattr(like, "committed") else like._committed
    array = _put(found, like.sharding if committed else None, path)
    # A function compiled for a weakly typed array would be compiled again for another.
    return like.at[...].set(array) if like.weak_type else array


def _put(leaf: Array, place: Any, path: str) -> Any:
    own = _copied(leaf)
    try:
        array = jax.device_put(own, place)
    except TypeError as e:
        raise SchemaError(f"leaf {path} is {leaf.dtype}, which jax has no dtype for") from e
    if own.dtype.kind in "iu" and array.dtype != own.dtype and own.size:
        bounds = np.iinfo(array.dtype)
        if own.min() < bounds.min or own.max() > bounds.max:
            raise SchemaError(
                f"leaf {path} is {own.dtype} with {own.min()} to {own.max()}, which jax has only "
                f"{array.dtype} for; set jax_enable_x64"
            )
    return array


def _copied(leaf: Array) -> Array:
    """A copy that JAX can have for its own: aligned as it wants, so it copies no second time."""
    dtype = leaf.dtype if is_bfloat16(leaf.dtype) else leaf.dtype.newbyteorder("=")
    block: Array = np.empty(leaf.size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    place = block[start : start + leaf.size * dtype.itemsize].view(dtype).reshape(leaf.shape)
    np.copyto(place, leaf)
    return place


def _device(name: str) -> Any:
    platform, _, index = name.partition(":")
    try:
        return jax.local_devices(backend=platform)[int(index or 0)]
    except (RuntimeError, IndexError, ValueError) as e:
        there = [f"{device.platform}:{i}" for i, device in enumerate(jax.local_devices())]
        raise Unsupported(f"no JAX device {name!r}; there are {there}") from e
