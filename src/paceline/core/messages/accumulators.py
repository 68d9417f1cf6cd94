"""Requests to accumulators."""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.core.messages.replies import Count, Done, Head, Mean, Request, Some, Text

Action: TypeAlias = Literal["join", "leave"]
OnLeave: TypeAlias = Literal["raise", "lower", "wait"]


class DefineAccumulator(Request[Text], tag=50, frozen=True, gc=False):
    """Make an accumulator, or find the one of the same definition; what it is.

    Without a tree it has the structure of the variable; without a variable too it is waited for.
    """

    name: str
    like: Head | None
    variable: str | None
    max_lag: Count | None
    capacity: Some
    timeout: float | None


class Apply(Request[Text], tag=51, frozen=True, gc=False):
    """Hand a gradient in, once there is room; whether it was accepted."""

    name: str
    head: Head
    version: int | None
    timeout: float | None


class Take(Request[Mean], tag=52, frozen=True, gc=False):
    """The mean of the first `n`, once there are as many."""

    name: str
    n: Some
    on_leave: OnLeave
    timeout: float | None


class Contribute(Request[Done], tag=53, frozen=True, gc=False):
    """Be counted on from now on, or no longer."""

    name: str
    action: Action


class AccumulatorStats(Request[Text], tag=54, frozen=True, gc=False):
    """An accumulator's counters."""

    name: str
