"""Requests to rows of variables."""

from __future__ import annotations

from typing import ClassVar

from paceline.core.account import VARIABLE
from paceline.core.messages.replies import Count, Head, Request, Value, Version


class Gather(Request[Value], tag=68, frozen=True, gc=False):
    """The rows of the current version at indices of that shape, which are the frame's buffer.

    `leaf` is the path of one leaf, or nothing for all.
    """

    cause: ClassVar[str] = VARIABLE

    name: str
    leaf: str | None
    shape: tuple[Count, ...]


class ScatterAdd(Request[Version], tag=69, frozen=True, gc=False):
    """Add rows to those at indices of that shape; indices, then rows are the frame's buffers."""

    name: str
    leaf: str | None
    shape: tuple[Count, ...]
    head: Head
    timeout: float | None = None
