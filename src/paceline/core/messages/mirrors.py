"""Requests for versions by number: mirrors' to servers, and readers' to their host's mirror."""

from __future__ import annotations

from typing import ClassVar

from paceline.core.account import VARIABLE
from paceline.core.messages.replies import Request, Value


class ReadAt(Request[Value], tag=58, frozen=True, gc=False):
    """The tree of that version, of a spread variable the home's share; of none if it is not there.

    It does not count as looked at by anybody: whoever asks knows who keeps it.
    """

    cause: ClassVar[str] = VARIABLE

    name: str
    version: int


class Mirrored(Request[Value], tag=59, frozen=True, gc=False):
    """A mirror's copy of what the server at `address` answers to `ReadAt`, or to `ReadPart`.

    `number` is the version or, for a `part`, the stage; `home` is which run of the variable's home
    counts them. Of no version if there is no copy to be had.
    """

    cause: ClassVar[str] = VARIABLE

    address: str
    name: str
    number: int
    part: bool
    home: int
    timeout: float | None
