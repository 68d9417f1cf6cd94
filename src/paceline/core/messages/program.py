"""Requests about the works that the tasks of one program have a part in."""

from __future__ import annotations

from paceline.core.messages.replies import Count, Done, Head, Request, Result, Some, Text


class TakePart(Request[Text], tag=91, frozen=True, gc=False):
    """Wait until the chief has begun that work, or with `until_over` until it has ended it.

    The answer is the program's life, whether the work is over, and how often this task began it, 0
    if it has nothing to begin. `life` is what an answer before said, 0 without one.
    """

    number: Some
    what: str
    life: Count
    until_over: bool
    timeout: float | None


class BeginWork(Request[Text], tag=92, frozen=True, gc=False):
    """The chief begins its next work, that of a collection if one is named, or takes it over.

    The answer is the program's life, and the collections that are left from another one.
    """

    number: Some
    what: str
    collection: str


class EndWork(Request[Done], tag=93, frozen=True, gc=False):
    """The chief has ended a work."""

    number: Some


class EndPart(Request[Done], tag=94, frozen=True, gc=False):
    """A function has ended in this task: with an error, or with a tree, or with nothing to tell."""

    number: Some
    life: Some
    error: str
    head: Head | None


class TakeResult(Request[Result], tag=95, frozen=True, gc=False):
    """Wait until that task's function has ended; an empty layout stands for nothing to tell.

    An error of any task is the answer at once.
    """

    number: Some
    task: str
    timeout: float | None
