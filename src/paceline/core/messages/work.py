"""Requests to counters, barriers and readers.

Each `Define` without a definition waits until somebody has made the resource.
"""

from __future__ import annotations

from paceline.core.messages.replies import Done, PieceHead, Request, RunHead, Some, Text


class DefineCounter(Request[Text], tag=40, frozen=True, gc=False):
    """Make a counter, or find the one that starts where this one would; what it is."""

    name: str
    start: int | None
    timeout: float | None = 0.0


class AddToCounter(Request[Text], tag=41, frozen=True, gc=False):
    """Add to a counter; the number after."""

    name: str
    n: int


class AwaitCounter(Request[Text], tag=42, frozen=True, gc=False):
    """Wait until a counter is at `at_least`; the number then."""

    name: str
    at_least: int
    timeout: float | None


class DefineBarrier(Request[Text], tag=43, frozen=True, gc=False):
    """Make a barrier, or find the one for as many; what it is."""

    name: str
    n: int | None
    timeout: float | None = 0.0


class Arrive(Request[Text], tag=44, frozen=True, gc=False):
    """Wait until `n` have arrived; the place in the order of arrival."""

    name: str
    timeout: float | None


class AbortBarrier(Request[Done], tag=45, frozen=True, gc=False):
    """End the waits of those who have arrived."""

    name: str


class DefineReader(Request[Text], tag=46, frozen=True, gc=False):
    """Make a reader of these pieces, or find the one of the same; what it is."""

    name: str
    pieces: list[RunHead] | None
    epochs: Some | None = 1
    shuffle: bool = False
    seed: int = 0
    lease: float | None = None
    stream: bool = False
    timeout: float | None = 0.0


class NextPiece(Request[PieceHead], tag=47, frozen=True, gc=False):
    """The piece of delivery `done`, if it is not 0, is done; wait for another one."""

    name: str
    done: int
    timeout: float | None


class EndPiece(Request[Text], tag=48, frozen=True, gc=False):
    """A piece is done, or `returned` to the head; whether it was this session's still."""

    name: str
    delivery: int
    returned: bool = False


class FeedReader(Request[Text], tag=49, frozen=True, gc=False):
    """Add pieces, if there are any, all or none, and close it, if told to; its counters then."""

    name: str
    pieces: list[RunHead]
    close: bool = False
