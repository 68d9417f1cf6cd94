"""Requests about membership and the server itself."""

from __future__ import annotations

from paceline.core.account import Times
from paceline.core.messages.replies import Done, Joined, Request, Text


class Join(Request[Joined], tag=0, frozen=True, gc=False):
    """Become a member of the cluster under a job and an index."""

    job: str
    index: int
    pid: int


class Leave(Request[Done], tag=1, frozen=True, gc=False):
    """End the membership: what ends afterwards is no death."""


class Cancel(Request[Done], tag=2, frozen=True, gc=False):
    """Stop waiting for request `number`; one way, its own reply is the verdict."""

    number: int


class Resources(Request[Text], tag=3, frozen=True, gc=False):
    """List what is shared."""


class Report(Request[Done], tag=5, frozen=True, gc=False):
    """One way: where this session's time went."""

    times: Times


class Stats(Request[Text], tag=6, frozen=True, gc=False):
    """All counters of the server, in one step."""


class Stop(Request[Done], tag=4, frozen=True, gc=False):
    """End the server."""
