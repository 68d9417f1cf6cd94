"""Requests about membership and the server itself."""

from __future__ import annotations

from paceline.core.account import Times
from paceline.core.messages.replies import Done, Joined, Rejoined, Request, Text


class Join(Request[Joined], tag=0, frozen=True, gc=False):
    """Become a member of the cluster under a job and an index.

    `token` is random: with it, and nothing else, the session can be taken up again. Joining with
    the token of a session that has done nothing yet is the same joining once more. `cluster` is
    what the session was given, and `servers` the tasks of it that run servers.
    """

    job: str
    index: int
    pid: int
    token: bytes = b""
    cluster: dict[str, dict[int, str]] | None = None
    servers: tuple[str, ...] = ()


class Rejoin(Request[Rejoined], tag=7, frozen=True, gc=False):
    """Go on with a session whose connection broke; the first request on another one.

    `token` is what it joined with; `received` counts the frames of the server's that it has had.
    """

    session: int
    token: bytes
    epoch: int
    received: int


class Outlived(Request[Done], tag=8, frozen=True, gc=False):
    """This session has known a server here whose epoch was that; versions may not come again."""

    epoch: int


class Leave(Request[Done], tag=1, frozen=True, gc=False):
    """End the membership: what ends afterwards is no death.

    `failed` says what ended the session, where that was an error: its task may come back.
    """

    failed: str = ""


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


class Dead(Request[Done], tag=110, frozen=True, gc=False):
    """A task's process has ended, as the chief knows that launched it: do not wait for it."""

    job: str
    index: int


class Restored(Request[Done], tag=100, frozen=True, gc=False):
    """What a server held that was started again is there: from now on it takes any session."""
