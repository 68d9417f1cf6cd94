"""Several requests in one."""

from __future__ import annotations

from typing import TypeAlias

from paceline.core.messages.accumulators import Apply
from paceline.core.messages.queues import Dequeue, Enqueue
from paceline.core.messages.replies import Answers, Count, Message, Request
from paceline.core.messages.variables import Add, Assign, Read
from paceline.core.messages.work import AddToCounter

Joinable: TypeAlias = Assign | Add | Read | AddToCounter | Enqueue | Dequeue | Apply


class Part(Message, frozen=True, gc=False):
    """A request, and how many of the frame's buffers are its own."""

    request: Joinable
    buffers: Count


class Together(Request[Answers], tag=57, frozen=True, gc=False):
    """Do all of them in one step, in order, once all can be done; or none."""

    parts: list[Part]
    timeout: float | None
