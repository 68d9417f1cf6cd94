"""The contract that every adapter keeps, as a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paceline.adapters.base import Adapter
from paceline.core.errors import SchemaError
from paceline.core.tree import Array, Tree, flatten, unflatten


def check_adapter(adapter: Adapter, make: Callable[[], Any]) -> None:
    """Check an adapter on models (or tensors) that `make()` returns: each time a new one, alike.

    Round trips keep every bit and dtype, nothing aliases, a tree that does not fit is refused
    before anything changes, and the fingerprint tells a changed model from an unchanged one. Where
    `in_place` is false, `restore` makes the round trip, and `plan` refuses and says so.

    Raises:
        AssertionError: the adapter breaks the contract; the message says where.
    """
    assert adapter.owns(make()), "it owns the models it is checked on"
    assert not adapter.owns(object()), "it does not own what is not of its framework"
    if adapter.in_place:
        _check_round_trip(adapter, make())
        _check_refusals(adapter, make(), adapter.plan)
    else:
        _check_restored(adapter, make())
        _check_refusals(adapter, make(), lambda like, tree, path: adapter.restore(tree, like, path))
    _check_fingerprint(adapter, make())
    _check_devices(adapter, make())


def _check_round_trip(adapter: Adapter, model: Any) -> None:
    before = _contents(adapter.to_tree(model, "$"))
    tree, block = _changed(adapter.to_tree(model, "$"))
    wanted = _contents(tree)
    assert _contents(adapter.to_tree(model, "$")) == before, "to_tree changes nothing"
    copies = adapter.plan(model, tree, "$")
    assert _contents(adapter.to_tree(model, "$")) == before, "a plan changes nothing"
    for copy in copies:
        copy()
    assert _contents(adapter.to_tree(model, "$")) == wanted, "copies keep every bit and dtype"
    assert _contents(tree) == wanted, "copies leave their source as it was"
    block[:] = 0
    assert _contents(adapter.to_tree(model, "$")) == wanted, "the model aliases no source"


def _check_restored(adapter: Adapter, model: Any) -> None:
    before = _contents(adapter.to_tree(model, "$"))
    tree, block = _changed(adapter.to_tree(model, "$"))
    wanted = _contents(tree)
    made = adapter.restore(tree, model, "$")
    assert type(made) is type(model), "restore makes an object of the same type"
    assert _contents(adapter.to_tree(made, "$")) == wanted, "restore keeps every bit and dtype"
    assert _contents(adapter.to_tree(model, "$")) == before, "restore changes nothing"
    block[:] = 0
    assert _contents(adapter.to_tree(made, "$")) == wanted, "what restore makes aliases no source"
    refusal = "nothing"
    try:
        adapter.plan(model, tree, "$.model")
    except SchemaError as e:
        refusal = str(e)
    if flatten(tree).arrays:
        fits = "$.model" in refusal and "read(like=" in refusal
        assert fits, f"a plan says by path that read(like=) is the way, not: {refusal}"


def _check_refusals(adapter: Adapter, model: Any, attempt: Callable[[Any, Tree, str], Any]) -> None:
    tree, _ = _changed(adapter.to_tree(model, "$"))
    before = _contents(adapter.to_tree(model, "$"))
    for odd, what in _tampered(tree):
        refusal = "nothing"
        try:
            attempt(model, odd, "$.model")
        except SchemaError as e:
            refusal = str(e)
        assert "$.model" in refusal, f"a tree with {what} is refused by its path, not: {refusal}"
        assert _contents(adapter.to_tree(model, "$")) == before, "what is refused changes nothing"


def _check_fingerprint(adapter: Adapter, model: Any) -> None:
    mark = adapter.fingerprint(model)
    if mark is None:
        return
    tree, _ = _changed(adapter.to_tree(model, "$"))
    assert adapter.fingerprint(model) == mark, "the fingerprint of an unchanged model stays"
    copies = adapter.plan(model, tree, "$")
    for copy in copies:
        copy()
    if copies:
        assert adapter.fingerprint(model) != mark, "the fingerprint of a changed model differs"


def _check_devices(adapter: Adapter, model: Any) -> None:
    for array in flatten(adapter.to_tree(model, "$")).arrays:
        for writable in (True, False):
            leaf = array.copy()
            leaf.flags.writeable = writable
            back = adapter.to_tree(adapter.to_device(leaf), "$")
            assert _contents(back) == _contents(array), "to_device keeps every bit and dtype"
            if not adapter.in_place:
                assert not np.shares_memory(back, leaf), "to_device aliases nothing"
            if not writable and back.flags.writeable:
                assert not np.shares_memory(back, leaf), "to_device aliases no read-only memory"


def _contents(tree: Tree) -> tuple[bytes, bytes]:
    """The layout of a tree and its bytes."""
    flat = flatten(tree)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    return flat.layout, block.tobytes()


def _changed(tree: Tree) -> tuple[Tree, Array]:
    """A read-only copy of `tree` with one bit of every byte turned over, and its memory."""
    flat = flatten(tree)
    block = np.zeros(flat.nbytes, np.uint8)
    flat.write(block.data)
    block ^= 1
    view = block.view()
    view.flags.writeable = False
    return unflatten(flat.layout, flat.values, view), block


def _tampered(tree: Tree) -> Iterator[tuple[Tree, str]]:
    """Trees that differ from `tree` in its last leaf only, each with what is odd about it."""
    if isinstance(tree, np.ndarray):
        yield np.zeros((*tree.shape, 2), tree.dtype), "another shape"
        yield np.zeros(tree.shape, "S3"), "another dtype"
        yield 1.0, "a float for an array"
    elif isinstance(tree, dict) and tree:
        last = next(reversed(tree))
        yield {key: part for key, part in tree.items() if key != last}, "a leaf missing"
        yield {**tree, "one more": np.zeros(3)}, "a leaf too many"
        for odd, what in _tampered(tree[last]):
            yield {**tree, last: odd}, what
