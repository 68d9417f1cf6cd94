"""Requests about variables that are spread over several servers: to their home, and to the others.

The home numbers and commits. A write begins there, is staged on the others, and is committed there.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from paceline.core.account import VARIABLE
from paceline.core.messages.replies import (
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


class Begin(Request[Staging], tag=60, frozen=True, gc=False):
    """Begin to write; an addition waits for its turn, which the commit or `Abandon` ends."""

    cause: ClassVar[str] = VARIABLE

    name: str
    kind: Literal["first", "assign", "add"]
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

    Or what is added to the home's share.
    """

    cause: ClassVar[str] = VARIABLE

    name: str
    head: Head
    stage: int
    adding: bool
    timeout: float | None


class Stage(Request[Text], tag=64, frozen=True, gc=False):
    """Keep a share under that stage, or the sum of it and that of the stage `base`.

    Says whether it did: not if `base` is not there. Stages below `below` that `keep` lacks go.
    """

    name: str
    head: Head
    stage: int
    base: int | None
    keep: list[int]
    below: int


class ReadPart(Request[Value], tag=65, frozen=True, gc=False):
    """The share of that stage; of no version if it is not there."""

    name: str
    stage: int


class LetGo(Request[Done], tag=66, frozen=True, gc=False):
    """A version that was read with `hold` need not be kept for this reader any more."""

    name: str
    version: int
