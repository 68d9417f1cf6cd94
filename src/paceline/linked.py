"""Models as leaves by names that are the same in every framework, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from paceline.adapters import base as adapters
from paceline.core.errors import SchemaError, said_of
from paceline.core.leaf_names import leaf_names
from paceline.core.tree import Array, Flat, build, decoded, flatten
from paceline.packing import taken

T = TypeVar("T")

Names: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None]
"""From a model's own name of a leaf to the shared one; to `None` for what is not shared."""

Leaves: TypeAlias = dict[str, Any]
"""Arrays and plain values by the shared names of their leaves."""


class Linked(Generic[T]):
    """A model as leaves by shared names, and back."""

    def __init__(self, model: T, names: Names | None, what: str) -> None:
        self.value = model
        with said_of(what):
            self._in_place = adapters.in_place(model)
            outline = flatten(model, adapters.outline)
            self._layout = outline.layout
            own = leaf_names(outline.layout)
            self._shared = dict(zip(own, _renamed(own, names), strict=True))
            owner = adapters.adapter_for(model)
            self._tied = {} if owner is None else owner.tied(model)
            self.outline = {name: _empty(leaf) for name, leaf in self._chosen(outline).items()}
            """Its leaves by their shared names; only their dtypes and shapes count."""
        own_leaves = adapters.leaves(model)
        self._copied = any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in own_leaves)

    def mark(self) -> object | None:
        """Equal as long as the model is not changed; `None` where there is no telling."""
        marks = []
        for leaf in adapters.leaves(self.value):
            owner = adapters.adapter_for(leaf)
            replaced = owner is None or not owner.in_place
            mark = _Same(leaf) if replaced else adapters.fingerprint(leaf)
            if mark is None:
                return None
            marks.append(mark)
        return marks

    def leaves(self, tree: Any, what: str, *, adding: bool = False) -> Leaves:
        """The leaves of a tree, by default of the model; for an addition 0 where there are none.

        Where all names of a tree are shared ones they are taken as such, else as the model's own.

        Raises:
            SchemaError: it has a name that is neither, or some of each; or adds nothing.
        """
        flat = taken(self.value if tree is None else tree, what)
        with said_of(what):
            own = tree is None or tree is self.value or not self._are_shared(flat)
            found = self._chosen(flat, own=own)
            if adding and self.outline and not found:
                raise SchemaError("nothing to add: no leaf of the tree is shared and not None")
        if not adding:
            return found
        return {name: found.get(name, _zero(leaf)) for name, leaf in self.outline.items()}

    def put(self, found: Leaves, what: str) -> None:
        """Bring leaves into the model: all of them, or none."""
        values: list[Any] = []
        arrays: list[Array] = []
        plan = decoded(self._layout)
        # What does not come stays.
        own: Iterator[Any] = iter(()) if self._covers(found) else _contents(taken(self.value, what))
        for name, leaf in zip(self._shared.values(), plan.leaves, strict=True):
            mine = next(own, None)
            content: Any = found[name] if name is not None and name in found else mine
            if self._copied and not self._in_place:
                # NumPy's arrays beside what can only be replaced are the model's own.
                content = np.copy(content) if isinstance(content, np.ndarray) else content
            (values if leaf.shape is None else arrays).append(content)
        tree = build(plan, values, arrays)
        if self._in_place:
            adapters.read_into(self.value, tree, what)
        else:
            self.value = adapters.rebuild(tree, self.value, what)

    def _covers(self, found: Leaves) -> bool:
        leaves = decoded(self._layout).leaves
        return all(
            name in found if name is not None else leaf.kind == "none"
            for name, leaf in zip(self._shared.values(), leaves, strict=True)
        )

    def _are_shared(self, flat: Flat) -> bool:
        """Whether the names of a tree are shared ones, and not the model's own."""
        shared = {name for name in self._shared.values() if name is not None}
        leaves = zip(leaf_names(flat.layout), _contents(flat), strict=True)
        # A None that the model has not, as gradients have of what is no array, tells nothing.
        own = self._shared.keys() | self._tied.keys()
        known = own | shared
        names = [name for name, leaf in leaves if leaf is not None or name in known]
        if shared.issuperset(names):
            return True
        if not own >= {*names}:
            odd = next((name for name in names if name not in known), None)
            raise SchemaError(
                (f"'{odd}' is no leaf of it" if odd else "some names are shared, some its own")
                + f"; there are {sorted(shared)}"
                + (f", its own are {[*self._shared]}" if shared != self._shared.keys() else "")
            )
        return False

    def _chosen(self, flat: Flat, *, own: bool = True) -> Leaves:
        """The shared leaves in the order of their names, which is one for all models."""
        found: Leaves = {}
        for name, leaf in zip(leaf_names(flat.layout), _contents(flat), strict=True):
            first = self._tied.get(name, name) if own else name
            shared = self._shared.get(first, first) if own else name
            if shared is None or leaf is None:
                continue
            if shared in found and not _equal(found[shared], leaf):
                raise SchemaError(
                    f"'{name}' is tied to '{first}', and the tree has other values for it"
                )
            found[shared] = leaf
        return dict(sorted(found.items()))


class _Same:
    """Equal for the same object only."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _renamed(own: tuple[str, ...], names: Names | None) -> list[str | None]:
    """The shared names of leaves."""
    if names is None:
        return [*own]
    found: list[Any]
    if callable(names):
        found = [names(name) for name in own]
    elif not isinstance(names, Mapping):
        raise SchemaError(f"names is a dict or a function, not {names!r}")
    else:
        unknown = [name for name in names if name not in own]
        if unknown:
            raise SchemaError(f"names: the model has no leaf {unknown[0]!r}; it has {[*own]}")
        found = [names.get(name, name) for name in own]
    counts = Counter(found)
    for name, shared in zip(own, found, strict=True):
        if shared is not None and not (isinstance(shared, str) and shared):
            raise SchemaError(f"names: '{name}' becomes {shared!r}; a name is a text, or None")
        if shared is not None and counts[shared] > 1:
            raise SchemaError(f"names: two leaves become '{shared}'")
    return found


def _contents(flat: Flat) -> Iterator[Any]:
    """The leaves of a tree that was taken apart, in order."""
    values, arrays = iter(flat.values), iter(flat.arrays)
    for leaf in decoded(flat.layout).leaves:
        yield next(values) if leaf.shape is None else next(arrays)


def _equal(one: Any, other: Any) -> bool:
    """Whether two leaves are alike to the last bit; those of tied weights often are one array."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return bool(type(one) is type(other) and one == other)
    if one.__array_interface__ == other.__array_interface__:
        return True
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def _empty(leaf: Any) -> Any:
    """A leaf of the same dtype and shape that takes no memory."""
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    return leaf


def _zero(leaf: Any) -> Any:
    """What an addition leaves as it is."""
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return type(leaf)()
