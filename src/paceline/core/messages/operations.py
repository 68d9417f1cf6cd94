"""Requests to operations."""

from __future__ import annotations

from paceline.core.messages.replies import Head, Request, Result, Text


class FindOperation(Request[Text], tag=55, frozen=True, gc=False):
    """Wait until an operation is registered; how it is run."""

    name: str
    timeout: float | None


class RunOperation(Request[Result], tag=56, frozen=True, gc=False):
    """Call an operation, and wait for its result.

    `within` names the threads of operations that wait for this call meanwhile.
    """

    name: str
    head: Head
    timeout: float | None
    within: tuple[str, ...] = ()
