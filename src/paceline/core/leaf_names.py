"""Names of a model's leaves that are the same in every framework."""

from __future__ import annotations

import functools
from typing import Any

from paceline.core.errors import SchemaError
from paceline.core.tree import decoded


@functools.lru_cache(maxsize=256)
def leaf_names(layout: bytes) -> tuple[str, ...]:
    """The name of each leaf, in order: the keys on the way to it, joined by dots.

    Slashes in keys are dots too, and the `:0` of TensorFlow's names is left out: `fc.weight` is the
    name of `{"fc": {"weight": ...}}`, `{"fc.weight": ...}` and `{"fc/weight:0": ...}`. Places in
    lists are numbers. A tree of one leaf names it `value`.

    Raises:
        SchemaError: two leaves have one name.
    """
    found: list[str] = []
    _walk(decoded(layout).structure, (), found)
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise SchemaError(f"two leaves have the name '{twice}'")
    return tuple(found)


def _walk(structure: Any, path: tuple[str, ...], found: list[str]) -> None:
    if structure is None:
        found.append(".".join(path) or "value")
        return
    keys = structure[1] if structure[0] == "d" else range(len(structure[1]))
    for key, part in zip(keys, structure[-1], strict=True):
        word = str(key).removesuffix(":0").strip("/").replace("/", ".")
        _walk(part, (*path, word), found)
