"""Requests that are made by handles and sent later, several in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import PacelineError, SchemaError
from paceline.pending import Pending
from paceline.transports.base import Buffers
from paceline.transports.interrupts import Interrupts

R = TypeVar("R")


@dataclass(frozen=True, slots=True, repr=False)
class Request(Generic[R]):
    """Something to do to a shared resource, which `session.run([request, ...])` does with others.

    It may be run any number of times, and does the same each time. What it carries was copied when
    it was made, and is held as long as the request is.
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
    if len(by_line) > 1:
        return _run_apart(requests, by_line, limit)
    [line] = by_line
    message, buffers = _joined(requests, limit)
    with line.interrupts:
        answers, found = line.exchange(message, buffers, limit, _undo(line, requests))
        results, had = [], False
        try:
            results = _made(requests, answers, found)
            had = True
        finally:
            for receipt in _receipts(requests, answers, had):
                line.tell(receipt)
    return results


def _run_apart(
    requests: Sequence[Request[Any]], by_line: dict[Connection, list[int]], limit: float | None
) -> list[Any]:
    """The results of requests to several servers: all are sent before one is waited for.

    Receipts go out once all results are there. Until then whatever ends this has those that wait
    ended, and gives back what was taken.
    """
    parts = {line: [requests[place] for place in places] for line, places in by_line.items()}
    before_wait = next(iter(parts)).conduct.before_wait
    if limit != 0 and before_wait is not None:
        before_wait()
    pending: dict[Connection, Pending] = {}
    results: list[Any] = [None] * len(requests)

    def replied() -> list[tuple[Connection, m.Answers, Buffers]]:
        # Within its block a line keeps Ctrl-C until it is known here what was sent.
        for line, own in parts.items():
            with line.interrupts:
                pending[line] = line.post(*_joined(own, limit), limit, _undo(line, own))
        return [(line, *each.result()) for line, each in pending.items()]

    with Interrupts() as kept:
        try:
            replies = kept.during(replied)
            for line, answers, found in replies:
                made = _made(parts[line], answers, found)
                for place, result in zip(by_line[line], made, strict=True):
                    results[place] = result
            for line, answers, _ in replies:
                del pending[line]
                for receipt in _receipts(parts[line], answers, True):
                    line.tell(receipt)
            # Here Ctrl-C is not lost in what ends with them.
            del replies, answers, found
        except BaseException as e:
            done = [line for line, each in pending.items() if each.cancel()]
            if not done or not isinstance(e, PacelineError):
                raise
            told = f"what went to {', '.join(line.where for line in done)} was done"
            if any(each.settle for line in done for each in parts[line]):
                told += ", but what it took went back"
            raise type(e)(f"{e}; {told}") from e
    return results


def _joined(requests: Sequence[Request[Any]], limit: float | None) -> tuple[m.Together, Buffers]:
    parts = [m.Part(each.message, len(each.buffers)) for each in requests]
    return m.Together(parts, limit), [one for each in requests for one in each.buffers]


def _made(requests: Sequence[Request[Any]], answers: m.Answers, found: Buffers) -> list[Any]:
    results, start = [], 0
    for request, reply, count in zip(requests, answers.replies, answers.buffers, strict=True):
        results.append(request.made(reply, found[start : start + count]))
        start += count
    return results


def _receipts(
    requests: Sequence[Request[Any]], answers: m.Answers, had: bool
) -> list[m.Request[Any]]:
    pairs = zip(requests, answers.replies, strict=True)
    return [each.settle(reply, had) for each, reply in pairs if each.settle is not None]


def _undo(
    line: Connection, requests: Sequence[Request[Any]]
) -> Callable[[m.Answers], m.Request[Any] | None]:
    def undo(answers: m.Answers) -> m.Request[Any] | None:
        receipts = _receipts(requests, answers, False)
        for receipt in receipts[:-1]:
            line.tell(receipt)
        return receipts[-1] if receipts else None

    return undo
