"""Requests about the cluster that a server belongs to."""

from __future__ import annotations

from typing import ClassVar

from paceline.core.account import SERVER
from paceline.core.messages.replies import Done, Request, Text


class Locate(Request[Text], tag=70, frozen=True, gc=False):
    """Which task has the resource of that name; the first `proposal` decides, "" only waits."""

    cause: ClassVar[str] = SERVER

    kind: str
    name: str
    proposal: str
    timeout: float | None


class RequestStop(Request[Done], tag=71, frozen=True, gc=False):
    """Ask all sessions to stop; `failed` if that is because something did.

    `final`: whoever asks does not wait for the others' work any more, only for their goodbyes.
    """

    reason: str
    failed: bool = False
    final: bool = False


class Stopping(Request[Text], tag=72, frozen=True, gc=False):
    """Why all were asked to stop, and whether something failed; nothing if they were not."""
