"""A tree in the form of another: named tuples, dataclasses and frameworks' own objects again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from paceline.core.errors import SchemaError
from paceline.core.tree import Tree, child

Restore: TypeAlias = Callable[[Tree, Any, str], Any]
Restorer: TypeAlias = Callable[[Any], Restore | None]


def rebuild(tree: Tree, like: Any, path: str = "$", restorer: Restorer | None = None) -> Any:
    """Give `tree` the containers of `like`: named tuples and dataclasses come back as such.

    Where `restorer(part)` knows a part of `like`, it returns what to call with the tree, that part
    and the path. What is neither a container nor known is taken from `tree` as it is.

    Raises:
        SchemaError: `like` has another structure; the message names the place.
    """
    restore = None if restorer is None else restorer(like)
    if restore is not None:
        return restore(tree, like, path)
    if isinstance(like, Mapping):
        if not isinstance(tree, dict) or tree.keys() != like.keys():
            raise SchemaError(f"{path} is {_shown(tree)}, wanted a dict of {list(like)}")
        made = {k: rebuild(tree[k], part, child(path, k), restorer) for k, part in like.items()}
        return made if type(like) is dict or not isinstance(like, dict) else _refilled(like, made)
    if is_dataclass(like) and not isinstance(like, type):
        names = [field.name for field in fields(like)]
        if not isinstance(tree, dict) or set(tree) != set(names):
            raise SchemaError(f"{path} is {_shown(tree)}, wanted a {type(like).__name__}")
        parts = {n: rebuild(tree[n], getattr(like, n), child(path, n), restorer) for n in names}
        return type(like)(**parts)
    if isinstance(like, (list, tuple)):
        if not isinstance(tree, (list, tuple)) or len(tree) != len(like):
            raise SchemaError(f"{path} is {_shown(tree)}, wanted {len(like)} parts")
        pairs = enumerate(zip(tree, like, strict=True))
        items = [rebuild(part, other, child(path, i), restorer) for i, (part, other) in pairs]
        if hasattr(like, "_fields"):
            return type(like)(*items)
        return tuple(items) if isinstance(like, tuple) else items
    return tree


def _refilled(like: dict[Any, Any], made: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the class of `like`, such as an `OrderedDict`, with other values."""
    other = copy.copy(like)
    other.update(made)
    return other


def _shown(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a dict of {list(tree)}"
    return f"{type(tree).__name__} of {len(tree)}" if isinstance(tree, (list, tuple)) else "a leaf"
