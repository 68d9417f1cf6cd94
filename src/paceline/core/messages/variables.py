"""Requests to variables."""

from __future__ import annotations

from typing import ClassVar

from paceline.core.account import VARIABLE
from paceline.core.messages.replies import (
    NO_VERSION,
    Defined,
    Done,
    Head,
    Request,
    Text,
    Value,
    Version,
)


class Define(Request[Defined], tag=10, frozen=True, gc=False):
    """Give a variable its first value, or find the one it has."""

    name: str
    head: Head
    overwrite: bool = False
    memory: int | None = None
    timeout: float | None = None


class Await(Request[Defined], tag=11, frozen=True, gc=False):
    """Wait until a variable is initialised."""

    cause: ClassVar[str] = VARIABLE

    name: str
    timeout: float | None


class Assign(Request[Version], tag=12, frozen=True, gc=False):
    """Replace the whole tree."""

    name: str
    head: Head
    timeout: float | None = None


class Add(Request[Version], tag=13, frozen=True, gc=False):
    """Add a tree to the current one, leaf by leaf."""

    name: str
    head: Head
    timeout: float | None = None


class Read(Request[Value], tag=14, frozen=True, gc=False):
    """The current tree, once its version is above `newer_than`.

    Without its layout if it is the version that the reader has. With `hold` the version is kept
    until the reader lets go of it, while it reads the parts on other servers. So it is with `lean`,
    where a tree that is not small comes without its layout too: the reader has it from elsewhere.
    """

    cause: ClassVar[str] = VARIABLE

    name: str
    newer_than: int
    timeout: float | None
    have: int = NO_VERSION
    hold: bool = False
    lean: bool = False


class ReadTag(Request[Value], tag=15, frozen=True, gc=False):
    """The tree that a tag names; `have`, `hold` and `lean` as for `Read`."""

    name: str
    tag: str
    have: int = NO_VERSION
    hold: bool = False
    lean: bool = False


class Tag(Request[Version], tag=16, frozen=True, gc=False):
    """Keep a version, the current one unless told another, under a name."""

    name: str
    tag: str
    version: int | None = None


class Untag(Request[Done], tag=17, frozen=True, gc=False):
    """Take a tag off."""

    name: str
    tag: str


class Tags(Request[Text], tag=18, frozen=True, gc=False):
    """All tags and their versions, in order of tagging."""

    name: str


class Usage(Request[Text], tag=19, frozen=True, gc=False):
    """Which versions are kept, and for whom."""

    name: str
