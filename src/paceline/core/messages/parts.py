"""Requests about variables that are spread over several servers: to their home, and to the others.

The home numbers and commits. A write begins there, is staged on the others, and is committed there.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from paceline.core.account import VARIABLE
from paceline.core.messages.replies import (
    Count,
    Defined,
    Done,
    Head,
    Request,
    Spreading,
    Staging,
    Text,
    Value,
    Version,
)

Pieces: TypeAlias = list[tuple[str, Count]]
"""Arrays of a share, by their paths in it, and how many rows of each."""


class Begin(Request[Staging], tag=60, frozen=True, gc=False):
    """Begin to write; an addition waits for its turn, which the commit or `Abandon` ends."""

    cause: ClassVar[str] = VARIABLE

    name: str
    kind: Literal["first", "assign", "add", "rows"]
    timeout: float | None


class Abandon(Request[Done], tag=61, frozen=True, gc=False):
    """What was staged will not be committed."""

    name: str
    stage: int


class CommitFirst(Request[Defined], tag=62, frozen=True, gc=False):
    """Give a variable its first value, the head being the home's share; or find that it has one."""

    name: str
    head: Head
    stage: int
    spread: Spreading


class Commit(Request[Version], tag=63, frozen=True, gc=False):
    """Make what was staged the current version, and the head the home's share of it.

    Or what is added to the home's share: all of it, or rows of `pieces`, as with `Stage`.
    """

    cause: ClassVar[str] = VARIABLE

    name: str
    head: Head
    stage: int
    adding: bool
    timeout: float | None
    pieces: Pieces | None = None


class Stage(Request[Text], tag=64, frozen=True, gc=False):
    """Keep a share under that stage, or the sum of it and that of the stage `base`.

    With `pieces` the head is a list of rows, added to those at the indices in the second buffer,
    one piece after the other. Says whether it did: not if `base` is not there. Stages below `below`
    that `keep` lacks go.
    """

    name: str
    head: Head
    stage: int
    base: int | None
    keep: list[int]
    below: int
    pieces: Pieces | None = None


class ReadPart(Request[Value], tag=65, frozen=True, gc=False):
    """The share of that stage; of no version if it is not there."""

    name: str
    stage: int


class GatherHome(Request[Value], tag=27, frozen=True, gc=False):
    """Rows of the current version's home, a list of them for `pieces`; indices are the buffer.

    With `hold` the version is kept until `LetGo`.
    """

    cause: ClassVar[str] = VARIABLE

    name: str
    pieces: Pieces
    hold: bool


class GatherPart(Request[Value], tag=28, frozen=True, gc=False):
    """Such rows of the share of that stage; of no version if it is not there."""

    cause: ClassVar[str] = VARIABLE

    name: str
    pieces: Pieces
    stage: int


class LetGo(Request[Done], tag=66, frozen=True, gc=False):
    """A version that was read with `hold` need not be kept for this reader any more."""

    name: str
    version: int
