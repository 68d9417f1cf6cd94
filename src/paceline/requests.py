"""Requests that are made by handles and sent later, several in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import PacelineError, SchemaError
from paceline.transports.base import Buffers

R = TypeVar("R")


@dataclass(frozen=True, slots=True, repr=False)
class Request(Generic[R]):
    """Something to do to a shared resource, which `session.run([request, ...])` does with others.

    It may be run once. What it carries was copied when it was made.
    """

    line: Connection
    message: Any
    buffers: Buffers
    made: Callable[[Any, Buffers], R]
    settle: Callable[[Any, bool], m.Request[Any]] | None = None
    """What is told the server of an answer that was had, or is given back."""

    def __repr__(self) -> str:
        return f"<Request {type(self.message).__name__} of '{self.message.name}'>"


def run_all(requests: Sequence[Request[Any]], limit: float | None) -> list[Any]:
    """The results of requests, in order; those to one server are done in one step, or none is.

    Raises:
        SchemaError: one is no request.
        PacelineError: a server did none of its own. Others may have done theirs: the message of an
            error says which.
    """
    by_line: dict[Connection, list[int]] = {}
    for place, request in enumerate(requests):
        if not isinstance(request, Request):
            raise SchemaError(
                f"run: {type(request).__name__} at place {place + 1} is no request, such as"
                " counter.adding(1); an operation is run alone"
            )
        by_line.setdefault(request.line, []).append(place)
    results: list[Any] = [None] * len(requests)
    if len(by_line) == 1:
        [line] = by_line
        message, buffers = _joined(requests, limit)
        undo = _undo(line, requests) if any(each.settle for each in requests) else None
        with line.interrupts:
            answers, found = line.exchange(message, buffers, limit, undo)
            return _taken(line, requests, answers, found)
    pending = {}
    for line, places in by_line.items():
        message, buffers = _joined([requests[place] for place in places], limit)
        pending[line] = line.post(message, buffers, limit)
    done, failed = [], []
    for line, places in by_line.items():
        try:
            answers, found = pending[line].result()
            mine = _taken(line, [requests[place] for place in places], answers, found)
            done.append(line.address)
        except PacelineError as e:
            failed.append(e)
        else:
            for place, result in zip(places, mine, strict=True):
                results[place] = result
    if failed:
        rest = f"; what went to {', '.join(done)} was done" if done else ""
        raise type(failed[0])(f"{failed[0]}{rest}") from failed[0]
    return results


def _joined(requests: Sequence[Request[Any]], limit: float | None) -> tuple[m.Together, Buffers]:
    parts = [m.Part(each.message, len(each.buffers)) for each in requests]
    return m.Together(parts, limit), [one for each in requests for one in each.buffers]


def _taken(
    line: Connection, requests: Sequence[Request[Any]], answers: m.Answers, found: Buffers
) -> list[Any]:
    """What is made of answers, whose servers are told that they were had."""
    results, start = [], 0
    had = False
    try:
        for request, reply, count in zip(requests, answers.replies, answers.buffers, strict=True):
            results.append(request.made(reply, found[start : start + count]))
            start += count
        had = True
    finally:
        for receipt in _receipts(requests, answers, had):
            line.tell(receipt)
    return results


def _receipts(
    requests: Sequence[Request[Any]], answers: m.Answers, had: bool
) -> list[m.Request[Any]]:
    pairs = zip(requests, answers.replies, strict=True)
    return [each.settle(reply, had) for each, reply in pairs if each.settle is not None]


def _undo(
    line: Connection, requests: Sequence[Request[Any]]
) -> Callable[[m.Answers], m.Request[Any]]:
    def undo(answers: m.Answers) -> m.Request[Any]:
        *others, last = _receipts(requests, answers, False)
        for receipt in others:
            line.tell(receipt)
        return last

    return undo
