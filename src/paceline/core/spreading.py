"""How a tree is spread over servers: which of them has which arrays, or which rows of them.

The first part is the home's, which also has all plain values. A share is a dict by path, such as
`{"$.weight": array, "$.table[0:500]": rows}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from paceline.core import tree as trees
from paceline.core.errors import ProtocolError, SchemaError
from paceline.core.messages.replies import Spreading
from paceline.core.spec import Task
from paceline.core.tree import Array, Tree

Placement: TypeAlias = Callable[[list[tuple[str, int]]], Sequence[str | Sequence[str]]]
"""Given the paths and bytes of all arrays, the task of each, or those that share its rows."""

WHOLE = -1
"""In place of a piece's last row: all of the array."""


def greedy(leaves: Sequence[tuple[str, int]], tasks: Sequence[str]) -> list[str]:
    """Each array in turn to the task that has the fewest bytes so far, the first of equal ones."""
    load = dict.fromkeys(tasks, 0)
    chosen = []
    for _, nbytes in leaves:
        task = min(load, key=load.__getitem__)
        load[task] += nbytes
        chosen.append(task)
    return chosen


def check_placement(placement: Any, what: str) -> None:
    """Whether that can be a placement, or none is given.

    Raises:
        SchemaError: it is no function.
    """
    if placement is not None and not callable(placement):
        raise SchemaError(
            f"{what}: placement= is a function of the paths and bytes of all arrays, not"
            f" {placement!r}"
        )


def placed(placement: Placement, leaves: list[tuple[str, int]], what: str) -> list[list[str]]:
    """The tasks that a placement chooses for each array, each written as `ps:1`.

    Raises:
        SchemaError: it chose none for an array, or what is no task; the message says which.
    """
    check_placement(placement, what)
    found: Any = placement([*leaves])
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        raise SchemaError(f"{what}: placement= returns a list with a task for each, not {found!r}")
    chosen: list[Any] = list(found)
    if len(chosen) != len(leaves):
        raise SchemaError(f"{what}: it has {len(leaves)} arrays, and {len(chosen)} were placed")
    return [_tasks(choice, path, what) for (path, _), choice in zip(leaves, chosen, strict=True)]


def _tasks(choice: Any, path: str, what: str) -> list[str]:
    sharing = choice if isinstance(choice, (list, tuple)) else [choice]
    if not sharing:
        raise SchemaError(f"{what}: leaf {path} was placed at no task")
    try:
        return [str(Task.parse(task)) for task in sharing]
    except SchemaError as e:
        raise SchemaError(f"{what}: leaf {path} was placed at {choice!r}: {e}") from e


def spread(
    layout: bytes, home: str, tasks: Sequence[str], placement: Placement | None, what: str
) -> Spreading:
    """Place the arrays of a layout, by default as `greedy` does, and all else at `home`.

    Rows that several tasks share are cut into runs of consecutive ones, as even as can be, the
    longer ones first.

    Raises:
        SchemaError: the placement is none for these arrays; the message says why.
    """
    plan = trees.decoded(layout)
    arrays = [n for n, leaf in enumerate(plan.leaves) if leaf.shape is not None]
    names = _paths(layout)
    leaves = [(names[n], place[3]) for n, place in zip(arrays, plan.places, strict=True)]
    chosen = (
        [[task] for task in greedy(leaves, tasks)]
        if placement is None
        else placed(placement, leaves, what)
    )
    parts: dict[str, list[tuple[int, int, int]]] = {home: []}
    for n, (path, _), sharing in zip(arrays, leaves, chosen, strict=True):
        odd = [task for task in sharing if task not in tasks]
        if odd:
            raise SchemaError(f"{what}: leaf {path} was placed at {odd}; there are {list(tasks)}")
        for task, piece in _pieces(n, plan.leaves[n], sharing):
            parts.setdefault(task, []).append(piece)
    return Spreading(layout, list(parts.items()))


def _pieces(
    n: int, leaf: trees.Leaf, sharing: list[str]
) -> Iterator[tuple[str, tuple[int, int, int]]]:
    if len(sharing) == 1 or not leaf.shape or not leaf.shape[0]:
        yield sharing[0], (n, 0, WHOLE)
        return
    size, more = divmod(leaf.shape[0], len(sharing))
    last = 0
    for place, task in enumerate(sharing):
        first, last = last, last + size + (place < more)
        if first < last:
            yield task, (n, first, last)


def check(spreading: Spreading) -> None:
    """Whether a peer may say that: each row of each array is in one place.

    Raises:
        ProtocolError, SchemaError: it is not so.
    """
    leaves = trees.decoded(spreading.layout).leaves
    lengths = {n: _rows(leaf) for n, leaf in enumerate(leaves) if leaf.shape is not None}
    ends = dict.fromkeys(lengths, 0)
    for n, first, last in sorted(piece for _, pieces in spreading.parts for piece in pieces):
        if n not in ends or first != ends[n] or (last != WHOLE and last <= first):
            raise ProtocolError(f"rows {first} to {last} of leaf {n} are out of place")
        ends[n] = lengths[n] if last == WHOLE else last
    if ends != lengths or not spreading.parts:
        raise ProtocolError(f"a tree of {len(leaves)} leaves is not placed as a whole")


def _rows(leaf: trees.Leaf) -> int:
    return leaf.shape[0] if leaf.shape else 1


def shares(spreading: Spreading, flat: trees.Flat, what: str) -> list[dict[str, Any]]:
    """A tree cut as the spreading says, a share for each part; they alias its arrays.

    Raises:
        SchemaError: it has another structure; the message starts with `what` and names the leaf.
    """
    trees.check(flat.layout, spreading.layout, what)
    values, arrays = iter(flat.values), iter(flat.arrays)
    given = zip(_paths(flat.layout), trees.decoded(flat.layout).leaves, strict=True)
    leaves = {path: next(values if leaf.shape is None else arrays) for path, leaf in given}
    names, declared = _paths(spreading.layout), trees.decoded(spreading.layout).leaves
    cut = [
        {
            name(names[n], first, last): _cut(leaves[names[n]], first, last)
            for n, first, last in pieces
        }
        for _, pieces in spreading.parts
    ]
    cut[0] |= {
        path: leaves[path] for path, leaf in zip(names, declared, strict=True) if leaf.shape is None
    }
    return cut


def joined(spreading: Spreading, found: Sequence[dict[str, Any]]) -> Tree:
    """The tree of all shares; read-only. An array in one piece is that of its share, not copied."""
    names, plan = _paths(spreading.layout), trees.decoded(spreading.layout)
    pieces: dict[int, list[tuple[int, Array]]] = {}
    for (_, part), share in zip(spreading.parts, found, strict=True):
        for n, first, last in part:
            piece = share[name(names[n], first, last)]
            pieces.setdefault(n, []).append((first, piece))
    values = [found[0][names[n]] for n, leaf in enumerate(plan.leaves) if leaf.shape is None]
    arrays = [_whole(pieces[n]) for n, leaf in enumerate(plan.leaves) if leaf.shape is not None]
    return trees.build(plan, values, arrays)


def check_added(layout: bytes, what: str) -> None:
    """Whether one can add to trees of that layout.

    Raises:
        SchemaError: not to the leaf that the message names.
    """
    for path, leaf in zip(_paths(layout), trees.decoded(layout).leaves, strict=True):
        if leaf.shape is not None and trees.dtype_named(leaf.kind).kind not in "iufc":
            raise SchemaError(f"{what}: leaf {path} is {leaf}, which cannot be added")


def name(path: str, first: int, last: int) -> str:
    """What a piece is called in its share."""
    return path if last == WHOLE else f"{path}[{first}:{last}]"


def _cut(leaf: Array, first: int, last: int) -> Array:
    return leaf if last == WHOLE else leaf[first:last]


def _whole(pieces: list[tuple[int, Array]]) -> Array:
    if len(pieces) == 1:
        return pieces[0][1]
    made: Array = np.concatenate([rows for _, rows in sorted(pieces, key=lambda one: one[0])])
    made.flags.writeable = False
    return made


@functools.lru_cache(maxsize=256)
def _paths(layout: bytes) -> tuple[str, ...]:
    return tuple(trees.paths(layout))
