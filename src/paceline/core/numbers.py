"""Whole numbers: those that users give, and those that messages say."""

from __future__ import annotations

import operator
from typing import Any

from paceline.core.errors import SchemaError


def whole(number: Any, what: str, least: int = 1, hint: str = "") -> int:
    """`number` as an int, if it is a whole number of at least `least`; NumPy's are taken too.

    Raises:
        SchemaError: it is another; the message starts with `what` and ends with `number`.
    """
    try:
        if not isinstance(number, bool) and (found := operator.index(number)) >= least:
            return found
    except TypeError:
        pass
    raise SchemaError(f"{what} is a whole number, {least} or more{hint}, not {number!r}")


def counted(number: int, what: str) -> str:
    """`number` of something, in words: "1 thread", "2 threads"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    """How often: "once", "2 times"."""
    return "once" if number == 1 else f"{number} times"
