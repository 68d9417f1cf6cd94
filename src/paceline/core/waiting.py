"""The one sentence inside: ask the state; if it says "not yet", wait for a change and ask again."""

from __future__ import annotations

import enum
from typing import Any, Final


class _NotYet(enum.Enum):
    NOT_YET = "not yet"

    def __bool__(self) -> bool:
        return False


class _HeldBack(enum.Enum):
    HELD_BACK = "not yet, for the asker alone"

    def __bool__(self) -> bool:
        return False


NOT_YET: Final = _NotYet.NOT_YET
NotYet = _NotYet
HELD_BACK: Final = _HeldBack.HELD_BACK
"""As `NOT_YET`, but for a bound of the asker's own, so that others need not wait behind it."""
HeldBack = _HeldBack


class Stored:
    """A tree as a server keeps it: its layout and plain values, and its arrays' memory, unread.

    `own`: the memory is the server's, which alone decides when it is written. `stage` is what other
    servers have the rest of it under, if it is spread.
    """

    __slots__ = ("layout", "memory", "own", "stage", "values")

    def __init__(self, layout: bytes, values: list[Any], memory: Any, *, own: bool = False) -> None:
        self.layout = layout
        self.values = values
        self.memory = memory
        self.own = own
        self.stage = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays, and of its texts."""
        arrays = 0 if self.memory is None else int(self.memory.nbytes)
        return arrays + sum(len(value) for value in self.values if isinstance(value, (str, bytes)))
