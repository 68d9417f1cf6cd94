"""Versions: one int64 that only grows, the epoch in its high bits, a count in its low ones."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V", int, NDArray[np.int64])

COUNT_BITS = 31

EPOCHS = 1 << (63 - COUNT_BITS)
"""All epochs are below."""


def first(epoch: int) -> int:
    """The version before the first one of `epoch`."""
    return epoch << COUNT_BITS


def epoch_of(version: int) -> int:
    """The epoch a version belongs to."""
    return version >> COUNT_BITS


def count_of(version: V) -> V:
    """The number of assigns in its epoch up to this version: what people read."""
    return version & ((1 << COUNT_BITS) - 1)


def moved(version: int, epoch: int) -> int:
    """The version of the same count in another epoch."""
    return first(epoch) + count_of(version)


def lag(current: int, stamped: int) -> int | None:
    """Versions assigned after `stamped`, never negative; `None` across epochs."""
    if epoch_of(current) != epoch_of(stamped):
        return None
    return max(0, current - stamped)
