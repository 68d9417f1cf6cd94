"""Requests to collections."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from paceline.core.account import ADMISSION, BATCH, Times
from paceline.core.messages.replies import Count, Done, Granted, Items, Request, RunHead, Text


class OpenCollection(Request[Done], tag=30, frozen=True, gc=False):
    """Make the queue and the pace of one collection.

    `turns` are its workers in the order of their turns in lockstep; without them it goes by lag.
    `makers` are its workers where nobody looks after them: there will be no more items once each of
    them has drained it, and asking again for the same while it goes on changes nothing.
    """

    name: str
    variable: str | None
    batch_size: int
    max_lag: int | None
    capacity: int
    capacity_bytes: int
    turns: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    makers: list[str] | None = None


class Offer(Request[Granted], tag=31, frozen=True, gc=False):
    """Hand in finished items and ask to start up to `want` more.

    `abandoned` counts admissions that ended without an item. The items are taken at once; the
    reply waits until at least one more may start, or for `timeout`. `times` is the worker's
    account, now and then.
    """

    cause: ClassVar[str] = ADMISSION

    name: str
    runs: list[RunHead]
    want: Count
    abandoned: Count
    timeout: float | None
    times: Times | None = None


class Next(Request[Items], tag=32, frozen=True, gc=False):
    """The trainer asks for its next batch; with `retry` it still asks for the same one."""

    cause: ClassVar[str] = BATCH

    name: str
    retry: bool
    timeout: float | None


class EndCollection(Request[Done], tag=33, frozen=True, gc=False):
    """Stop its workers and drop what is left."""

    name: str


class Drain(Request[Done], tag=35, frozen=True, gc=False):
    """The function has returned: of the worker that says so, or of all if it is the trainer."""

    name: str


class Delivered(Request[Done], tag=36, frozen=True, gc=False):
    """One way: the trainer has its batch, or gives it back."""

    name: str
    delivery: int
    returned: bool = False


class CollectionStats(Request[Text], tag=34, frozen=True, gc=False):
    """A collection's counters."""

    name: str


class Make(Request[Done], tag=90, frozen=True, gc=False):
    """This session makes items for a collection that another server has.

    Its waits here end with the collection.
    """

    name: str


class Free(Request[Done], tag=82, frozen=True, gc=False):
    """One way: this session makes items for no collection any more, and may wait for others."""
