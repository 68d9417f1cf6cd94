"""Requests to variables."""

from __future__ import annotations

from paceline.core.messages.replies import NO_VERSION, Defined, Head, Request, Value, Version


class Define(Request[Defined], tag=10, frozen=True, gc=False):
    """Give a variable its first value, or find the one it has."""

    name: str
    head: Head
    overwrite: bool = False


class Await(Request[Defined], tag=11, frozen=True, gc=False):
    """Wait until a variable is initialised."""

    name: str
    timeout: float | None


class Assign(Request[Version], tag=12, frozen=True, gc=False):
    """Replace the whole tree."""

    name: str
    head: Head


class Add(Request[Version], tag=13, frozen=True, gc=False):
    """Add a tree to the current one, leaf by leaf."""

    name: str
    head: Head


class Read(Request[Value], tag=14, frozen=True, gc=False):
    """The current tree, once its version is above `newer_than`.

    Without its layout if it is the version that the reader has.
    """

    name: str
    newer_than: int
    timeout: float | None
    have: int = NO_VERSION
