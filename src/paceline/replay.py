"""Runs alone, in this process, what a worker ran when it failed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from paceline import functions
from paceline.calling import keywords, told
from paceline.core.account import BUSY
from paceline.core.errors import SchemaError, TimedOut
from paceline.core.names import parts, quoted
from paceline.engines.base import Link
from paceline.lines import account
from paceline.post_mortems import PostMortem
from paceline.server.local import LocalServer
from paceline.session import Session
from paceline.worker.handle import Worker
from paceline.worker.life import seed_framework, seed_libraries
from paceline.worker.line import Setup

AHEAD = 10
"""Items that are made beyond the one at which the worker failed, before it counts as well."""

ROOM = 1 << 16
"""Items that a queue holds which stands for one of the cluster's."""


@dataclass(frozen=True)
class Outcome:
    """How a replay ended: with an error, or without one after so many items, or a call's result."""

    items: int
    error: BaseException | None = None
    result: Any = None

    @property
    def traceback(self) -> TracebackType | None:
        """Where the error was raised."""
        return None if self.error is None else self.error.__traceback__

    def __str__(self) -> str:
        if self.error is not None:
            return told(self.error)
        return f"no error in {self.items} items" if self.items else f"it returned {self.result!r}"


def replay(
    found: PostMortem,
    *,
    items: int | None = None,
    on_item: Callable[[Any], None] = lambda item: None,
) -> Outcome:
    """Run a function as the worker did: with its seed, its input, and the variables it had read.

    It has a session of its own, in which these variables are, and empty queues and counters at 0
    where it has some; what nobody else does is not waited for. What it makes goes nowhere, and it
    is run for `items`, by default a few beyond that at which the worker failed. Its random numbers
    are those it had, but each item is made with the last versions, not with those of its time.

    Runs code from the file: only for what this user's own cluster wrote.

    Raises:
        FunctionError, SchemaError: what it needs cannot be made here; the message says what.
    """
    facts = found.facts
    sys.path += [place for place in facts.path if place not in sys.path]
    job, _, index = facts.worker.rpartition(":")
    with ExitStack() as ends:
        ends.callback(sys.argv.__setitem__, slice(None), list(sys.argv))
        sys.argv[:] = facts.argv
        channel = LocalServer(waits=False).connect()
        session = Session(job=job, index=int(index), channel=channel)
        ends.callback(session.close)
        session.lines.conduct.account = account(BUSY)
        for key, tree in found.variables.items():
            known = parts(key)
            with session.container(known.container):
                session.variable(known.name, tree)
        worker = Worker(
            Setup(None, b"", job, int(index), facts.seed, alone=True), session, _Alone()
        )
        seed_libraries(facts.seed)
        resolve = functools.cache(functools.partial(_stand_in, session, found))
        fn, resources = _loaded(found.function, resolve)
        seed_framework(facts.seed)
        given = () if found.input is None else (_loaded(found.input, resolve),)
        made = 0
        try:
            result = fn(*given, *resources, **keywords(fn, worker))
            if facts.item is None:
                return Outcome(0, result=result)
            for item in _some(result, facts.item + 1 + AHEAD if items is None else items):
                made += 1
                on_item(item)
        except (Exception, SystemExit, KeyboardInterrupt) as e:
            return Outcome(made, _from_there(e))
    return Outcome(made)


class _Alone(Link):
    """The line to a launcher that says nothing."""

    def send(self, message: object) -> None:
        """Nobody hears it."""

    def receive(self, timeout: float | None = None) -> object:
        raise TimedOut("there is no launcher")


def _loaded(payload: bytes, resolve: Callable[[tuple[str, ...]], object]) -> Any:
    return functions.load(payload, resolve)


def _some(made: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        try:
            yield next(made)
        except StopIteration:
            return


def _stand_in(session: Session, found: PostMortem, named: tuple[str, ...]) -> Any:
    """What stands for something that was shared in the cluster."""
    if named == ("session",):
        return session
    kind, key = named[0], named[1]
    known = parts(key)
    with session.container(known.container):
        if kind == "variable" and key in found.variables:
            return session.variable(known.name)
        if kind == "queue":
            return session.queue(known.name, ROOM)
        if kind == "counter":
            return session.counter(known.name)
        if kind == "barrier":
            return session.barrier(known.name, 1)
    why = found.facts.absent.get(key, "the worker had not read it") if kind == "variable" else ""
    raise SchemaError(
        f"the function has the {kind} {quoted(key)}, which is not in the file"
        + (f": {why}" if why else "")
    )


def _from_there(error: BaseException) -> BaseException:
    """The error, with the traceback from the function's first line on."""
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename == __file__:
        here = here.tb_next
    return error.with_traceback(here or error.__traceback__)
