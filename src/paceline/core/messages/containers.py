"""Requests about containers."""

from __future__ import annotations

from paceline.core.messages.replies import Request, Text


class Enter(Request[Text], tag=80, frozen=True, gc=False):
    """The generation that a container's keys have now; the first server says it."""

    container: str


class Reset(Request[Text], tag=81, frozen=True, gc=False):
    """Remove all that is in these containers, in all for `None`; its number, and of how much.

    The first server numbers it, the others are told the number.
    """

    containers: list[str] | None
    number: int | None = None
