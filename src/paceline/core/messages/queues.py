"""Requests to queues."""

from __future__ import annotations

from typing import ClassVar

from paceline.core.account import QUEUE
from paceline.core.messages.replies import Count, Done, Items, Request, RunHead, Text


class DefineQueue(Request[Done], tag=20, frozen=True, gc=False):
    """Make a queue, or find the one of the same definition."""

    name: str
    capacity: int
    capacity_bytes: int
    per_producer: int | None = None
    order: str = "fifo"
    min_after_dequeue: int = 0
    seed: int | None = None


class FindQueue(Request[Text], tag=21, frozen=True, gc=False):
    """Wait until a queue is there; its definition."""

    cause: ClassVar[str] = QUEUE

    name: str
    timeout: float | None


class Enqueue(Request[Done], tag=22, frozen=True, gc=False):
    """Add items, all or none, once there is room for all.

    A queue by priority is told one for each run.
    """

    cause: ClassVar[str] = QUEUE

    name: str
    runs: list[RunHead]
    timeout: float | None
    priorities: tuple[int, ...] = ()


class Dequeue(Request[Items], tag=23, frozen=True, gc=False):
    """Take `least` to `most` items in one step, once `least` are there."""

    cause: ClassVar[str] = QUEUE

    name: str
    least: Count
    most: Count
    timeout: float | None


class Receipt(Request[Done], tag=24, frozen=True, gc=False):
    """One way: what became of a delivery. `returned` puts its items back in their place."""

    name: str
    delivery: int
    returned: bool = False


class CloseQueue(Request[Done], tag=25, frozen=True, gc=False):
    """No new items; with `cancel` pending enqueues end too."""

    name: str
    cancel: bool


class QueueStats(Request[Text], tag=26, frozen=True, gc=False):
    """A queue's counters."""

    name: str
