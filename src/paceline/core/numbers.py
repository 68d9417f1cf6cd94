"""Whole numbers: those that users give, and those that messages say."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from paceline.core.errors import SchemaError


def whole(number: Any, what: str, least: int = 1, hint: str = "") -> int:
    """`number` as an int, if it is a whole number of at least `least`; NumPy's are taken too.

    Raises:
        SchemaError: it is another; the message starts with `what` and ends with `number`.
    """
    found = _index(number)
    if found is None or found < least:
        raise SchemaError(f"{what} is a whole number, {least} or more{hint}, not {number!r}")
    return found


def int64(number: Any, what: str) -> int:
    """`number` as an int.

    Raises:
        SchemaError: it is no whole number that fits into 64 bits; the message starts with `what`.
    """
    found = _index(number)
    if found is None or not -(1 << 63) <= found < 1 << 63:
        raise SchemaError(f"{what} is a whole number of 64 bits, not {number!r}")
    return found


def _index(number: Any) -> int | None:
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def worker_seed(seed: int, task: tuple[str, int], *starts: int) -> int:
    """The seed of a worker in a run of that seed: another one for each task, and each start."""
    job, index = task
    words = np.random.SeedSequence([seed, int.from_bytes(job.encode(), "little"), index, *starts])
    return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))


def counted(number: int, what: str) -> str:
    """`number` of something, in words: "1 thread", "2 threads"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    """How often: "once", "2 times"."""
    return "once" if number == 1 else f"{number} times"
