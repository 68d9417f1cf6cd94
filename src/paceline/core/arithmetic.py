"""Sums of trees that lie in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.errors import SchemaError
from paceline.core.tree import PLAIN, Array, decoded, paths, views


def add(
    layout: bytes, a: Array | None, delta_layout: bytes, b: Array | None, out: Array | None
) -> None:
    """Write `a + b` to `out`, leaf by leaf, in `a`'s dtype; leaves of `b` are found by their path.

    Raises:
        SchemaError: a leaf cannot be added.
    """
    plan = decoded(layout)
    others = dict(zip(_arrays(delta_layout), views(decoded(delta_layout), b), strict=True))
    mine = views(plan, a)
    for path, x, total in zip(_arrays(layout), mine, views(plan, out), strict=True):
        if x.dtype.kind not in "iufc":
            raise SchemaError(f"assign_add: leaf {path} is {x.dtype}, which cannot be added")
        np.add(x, others[path], out=total)


def add_values(
    layout: bytes, values: Sequence[Any], delta_layout: bytes, delta: Sequence[Any]
) -> list[Any]:
    """The plain values after an addition: to what is no number nothing is added but what is empty.

    Raises:
        SchemaError: something is to be added to text, bytes or a bool, or a sum of ints does not
            fit into 64 bits.
    """
    others = dict(zip(_plain(delta_layout), delta, strict=True))
    sums = []
    for path, value in zip(_plain(layout), values, strict=True):
        total, more = value, others[path]
        if type(value) in (int, float):
            total = value + more
        elif more:
            raise SchemaError(
                f"assign_add: leaf {path} is {PLAIN[type(value)]}, which cannot be added:"
                f" {type(value)()!r} leaves it as it is"
            )
        if type(total) is int and not -(1 << 63) <= total < 1 << 63:
            raise SchemaError(f"assign_add: leaf {path} would be an int of more than 64 bits")
        sums.append(total)
    return sums


def mean(layout: bytes, trees: Sequence[tuple[bytes, Array | None]], out: Array | None) -> None:
    """Write the mean of `trees` to `out`, leaf by leaf, summed in the leaf's dtype and in order."""
    totals = views(decoded(layout), out)
    with np.errstate(all="ignore"):
        for place, (its_layout, block) in enumerate(trees):
            leaves = views(decoded(its_layout), block)
            found = dict(zip(_arrays(its_layout), leaves, strict=True))
            for path, total in zip(_arrays(layout), totals, strict=True):
                if place == 0:
                    total[...] = found[path]
                else:
                    np.add(total, found[path], out=total)
        for total in totals:
            np.divide(total, len(trees), out=total)


def mean_values(layout: bytes, trees: Sequence[tuple[bytes, Sequence[float]]]) -> list[float]:
    """The means of the plain values, which are floats."""
    found = [dict(zip(_plain(one), values, strict=True)) for one, values in trees]
    return [sum(each[path] for each in found) / len(found) for path in _plain(layout)]


def _arrays(layout: bytes) -> list[str]:
    leaves = zip(paths(layout), decoded(layout).leaves, strict=True)
    return [path for path, leaf in leaves if leaf.shape is not None]


def _plain(layout: bytes) -> list[str]:
    leaves = zip(paths(layout), decoded(layout).leaves, strict=True)
    return [path for path, leaf in leaves if leaf.shape is None]
