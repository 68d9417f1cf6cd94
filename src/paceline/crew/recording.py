"""What can be said of a worker that is dead: what it noted, and what it printed last."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from contextlib import suppress

from paceline.core.black_box import SIZE, Seen, seen
from paceline.core.names import quoted
from paceline.core.versions import count_of
from paceline.engines.base import readable

LAST_LINES = 200
"""Lines on standard error that are remembered of a worker."""

FATAL = "Fatal Python error:"
"""What the interpreter says first when it dies of a signal, before the stacks."""


class Recording:
    """What one worker notes and prints, from its start on.

    `shared`: the worker is another process; `place` is then a descriptor, which it inherits, if
    that is `near`. What a process of another host notes cannot be read.
    """

    def __init__(self, *, shared: bool, near: bool = True) -> None:
        self.near = near
        self.place: int | bytearray
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        if not shared or not near:
            self.place = bytearray(SIZE)
            return
        if hasattr(os, "memfd_create"):
            self.place = os.memfd_create("black box")
        else:
            with tempfile.TemporaryFile() as file:
                self.place = os.dup(file.fileno())
        os.ftruncate(self.place, SIZE)

    @property
    def inherit(self) -> tuple[int, ...]:
        """The descriptors that its process inherits."""
        return (self.place,) if isinstance(self.place, int) else ()

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if isinstance(self.place, int):
            with suppress(OSError):
                os.close(self.place)
        self.place = bytearray(SIZE)

    def printed(self, line: str) -> None:
        """It printed a line on standard error."""
        self._lines.append(line)

    def seen(self) -> Seen:
        """What it noted last."""
        if isinstance(self.place, int):
            return seen(os.pread(self.place, SIZE, 0))
        return seen(bytes(self.place))

    @property
    def output(self) -> list[str]:
        """The last lines that it printed on standard error."""
        return list(self._lines)

    @property
    def last_words(self) -> str:
        """The stacks of an interpreter that died of a signal; empty if it left none."""
        _, fatal, said = "\n".join(self._lines).rpartition(FATAL)
        if not fatal:
            return ""
        first, _, stacks = said.partition("\n")
        return f"{FATAL}{first}\n{readable(stacks)}".rstrip()


def where(seed: int, found: Seen, stamps: str | None, *, items: bool) -> str:
    """How far a worker got, as part of a message; `stamps` is the variable that stamps items."""
    told = [f"seed {seed}"]
    if items:
        told.append(f"item {found.items}")
        version = found.versions.get(stamps) if stamps is not None else None
        told.append(f"parameters' version {'none' if version is None else count_of(version)}")
    else:
        told += [f"version {count_of(v)} of {quoted(k)}" for k, v in found.versions.items()]
    return ", ".join(told)
