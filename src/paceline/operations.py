"""Operations: functions of a server's process, which sessions call by name."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, overload

from paceline.adapters.base import rebuild
from paceline.calling import parameters, told
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout, left
from paceline.core.codec import MAX_HEADER
from paceline.core.errors import (
    Closed,
    OperationFailed,
    PacelineError,
    SchemaError,
    TimedOut,
    UnknownName,
)
from paceline.core.names import text
from paceline.core.numbers import whole
from paceline.core.operation_state import How
from paceline.core.spec import Task
from paceline.core.stacking import Stretch, stack
from paceline.core.tree import flatten
from paceline.core.waiting import Stored
from paceline.lines import Lines
from paceline.packing import copied, memory, pack, pack_rows
from paceline.pending import Pending, limited
from paceline.requests import Request, run_all
from paceline.server.operation_desk import OperationDesk
from paceline.server.service import Service
from paceline.transports.interrupts import from_signal

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

REGISTERING = 1.0
"""Seconds for which an unknown operation is waited for: its server may have only just started."""

TOLD = 1 << 16
"""Characters of a traceback that travel: its last ones."""

WAIT = 0.002

_NONE = flatten(None).layout

_within: ContextVar[tuple[str, ...]] = ContextVar("within", default=())
"""The threads of operations that wait for what this thread does."""


class Host(Protocol):
    """A server within this process."""

    service: Service

    def do(self, call: Callable[[], R], /) -> R: ...


class Offer:
    """What registers operations with a server; `session` makes the session that they are given."""

    def __init__(self, host: Host, place: str, session: Callable[[], Any]) -> None:
        self._host = host
        self._place = place
        self._make = session
        self._making = threading.Lock()
        self._session: Any = None

    def operation(
        self,
        name: str,
        *,
        threads: int | None = None,
        batch: int | None = None,
        wait: float | None = None,
    ) -> Callable[[F], F]:
        """A decorator that registers a function; see `Server.operation`."""
        name = text(name, "the name of an operation")
        how = _checked(name, threads, batch, wait)

        def register(fn: F) -> F:
            if not callable(fn):
                raise SchemaError(f"operation '{name}' is a function, not {repr(fn)[:40]}")
            run = Runner(self._host, self._place, name, fn, how, self.session)
            desk: OperationDesk = self._host.service.desk(OperationDesk)
            self._host.do(lambda: desk.register(name, how, run))
            return fn

        return register

    def session(self) -> Any:
        """The session that operations are given, made when one first needs it."""
        with self._making:
            if self._session is None:
                self._session = self._make()
            return self._session

    @property
    def opened(self) -> Any:
        """That session, or `None` while none was needed."""
        return self._session


class Runner:
    """Calls one function, with a tree or with several stacked into one."""

    def __init__(
        self,
        host: Host,
        place: str,
        name: str,
        fn: Callable[..., Any],
        how: How,
        session: Callable[[], Any],
    ) -> None:
        self._host = host
        self._place = place
        self._name = name
        self._fn = fn
        self._how = how
        self._session = session
        known = parameters(fn)
        self._wants_session = known is not None and "session" in known
        self._takes_tree = known is None or any(key != "session" for key in known)

    def __call__(self, trees: list[Stored], within: tuple[str, ...]) -> list[Any]:
        """A reply with its buffers, or an error, for each of the trees."""
        n, before = len(trees), _within.set(within)
        try:
            argument = self._argument(trees)
            keywords = {"session": self._session()} if self._wants_session else {}
            given = (argument,) if self._takes_tree else ()
            del argument
            return self._packed(self._called(given, keywords), n)
        except PacelineError as e:
            return [e] * n
        except BaseException as e:
            if from_signal(e):
                raise
            return [self._failed(e)] * n
        finally:
            _within.reset(before)

    def _argument(self, trees: list[Stored]) -> Any:
        """What the function is given; the memory of `trees` is let go of."""
        arrays = [None if tree.memory is None else tree.memory.array() for tree in trees]
        if self._how.batch is None:
            [tree] = trees
            made = copied(tree.layout, tree.values, tree.memory)
        else:
            made = stack(
                [
                    Stretch(tree.layout, 1, [[value] for value in tree.values], array)
                    for tree, array in zip(trees, arrays, strict=True)
                ]
            )
        if not self._takes_tree and any(tree.layout != _NONE for tree in trees):
            raise SchemaError(f"run '{self._name}': it takes no argument")
        trees.clear()
        return made

    def _called(self, given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            return self._fn(*given, **keywords)
        except BaseException as e:
            # Whatever it raised is its caller's, and ends no thread of the server's. Only Ctrl-C
            # of the caller's own, which runs it itself in a private session, is no failure.
            if from_signal(e):
                raise
            raise self._failed(e) from None

    def _failed(self, error: BaseException) -> OperationFailed:
        text = told(error)[-TOLD:].encode(errors="replace").decode()
        return OperationFailed(f"operation '{self._name}' of {self._place} raised:\n{text}")

    def _packed(self, returned: Any, n: int) -> list[Any]:
        arena, what = self._host.service.arena, f"operation '{self._name}' returned"
        if self._how.batch is None:
            parts = [pack(arena, returned, what)]
        else:
            parts = pack_rows(arena, returned, n, what)
        replies = []
        for head, block in parts:
            reply = m.Result(head.layout, head.values)
            size = len(m.encode(reply))
            if size > MAX_HEADER:
                raise SchemaError(
                    f"{what}: {size} bytes of plain values, {MAX_HEADER} are allowed; arrays may"
                    " have any size"
                )
            replies.append((reply, [] if block is None else [block]))
        return replies


class Operations:
    """A session's way to operations."""

    _lines: Lines
    _offer: Offer | None = None
    _closed: bool

    def operation(
        self,
        name: str,
        *,
        threads: int | None = None,
        batch: int | None = None,
        wait: float | None = None,
    ) -> Callable[[F], F]:
        """A decorator that registers an operation of a private session, as `Server.operation`.

        Whoever calls it runs it, and is given this session.

        Raises:
            SchemaError: this session is on a cluster, whose servers have the operations; or as
                `Server.operation`.
        """
        if self._offer is None:
            raise SchemaError(
                f"operation '{name}': a session that is not private has none; the process of a"
                " server registers them, with @server.operation(...)"
            )
        return self._offer.operation(name, threads=threads, batch=batch, wait=wait)

    @overload
    def run(
        self,
        what: str,
        tree: Any = None,
        *,
        task: str | None = None,
        like: Any = None,
        timeout: float | None = 60.0,
    ) -> Any: ...

    @overload
    def run(self, what: Sequence[Request[Any]], *, timeout: float | None = 60.0) -> list[Any]: ...

    @limited
    def run(
        self,
        what: str | Sequence[Request[Any]],
        tree: Any = None,
        *,
        task: str | None = None,
        like: Any = None,
        timeout: float | None = 60.0,
    ) -> Any:
        """Call an operation of that name, or send a list of requests; what comes of it.

        Requests are made by handles, such as `counter.adding(1)`, and are done in order, in one
        round trip: those to one server in one step, which nobody sees the midst of, or none of
        them. While one would have to wait, all do. Their results are a list. Requests to several
        servers are sent together; each server does all of its own or none, and what was taken from
        queues goes back unless all have done theirs.

        An operation is called where it is registered, and the tree that it returns is waited for.
        Without a `task` it is called on the first server that has it. `tree` is copied; the
        result's arrays own their memory. With `like`, named tuples, dataclasses and JAX arrays come
        back as such. One that nobody has registered is waited for, for 1 s at most.

        A call that has not begun after `timeout` seconds, or when its caller dies, never begins.
        One that has begun goes on, and its result is dropped.

        Raises:
            Closed: a request waited for a queue that was closed, or this session was.
            UnknownName: there is no such operation, the message lists those there are; or no such
                server.
            OperationFailed: it raised; the message ends with its traceback.
            TimedOut: there was no result within `timeout` seconds; the message says whether it had
                begun, or which request could not be done: then none was.
            WouldBlock: it was called by an operation that has the only thread it could run on.
            SchemaError: a leaf of the tree, or of the result, may not travel; the message has its
                path. Or `what` is neither a name nor a list.
        """
        limit, began = checked_timeout(timeout), time.monotonic()
        if not isinstance(what, str):
            return self._run_list(what, limit)
        name = text(what, "the name of an operation")
        line = self._operation(name, task, limit)
        limit = left(limit, began)
        with line.interrupts:
            head, block = pack(line.arena, tree, f"run '{name}'")
            request = m.RunOperation(name, head, limit, _within.get())
            found, buffers = line.exchange(request, [block], limit)
        result = copied(found.layout, found.values, memory(buffers))
        del buffers
        line.give_back()
        return result if like is None else rebuild(result, like, f"run '{name}'")

    def _run_list(self, what: Any, limit: float | None) -> list[Any]:
        if not isinstance(what, Sequence) or isinstance(what, bytes | bytearray):
            hint = ": put it in a list" if isinstance(what, Request) else ""
            raise SchemaError(
                f"run takes an operation's name or a list of requests, not {repr(what)[:80]}{hint}"
            )
        if not what and self._closed:
            raise Closed("run: this session was closed")
        return run_all(what, limit) if what else []

    def _operation(self, name: str, task: str | None, limit: float | None) -> Connection:
        """The line to the server that has an operation; anew where it was started again."""
        wanted, began = "" if task is None else str(Task.parse(task)), time.monotonic()
        known = self._lines.operations.get((name, wanted))
        if known is not None and (known.alive() or known.forked):
            return known
        before = wanted if known is None else self._lines.task(known)
        asked = self._lines.of_servers(wanted)
        if wanted and self._lines.tasks:
            asked = [self._lines.line(wanted, limit)]
        elif not self._lines.alive():
            asked = self._lines.again()
            asked = [line for line in asked if line.alive()] or asked
        found = self._found(name, wanted, asked, left(limit, began))
        if found is None and before and self._lines.of_servers(before)[0] not in asked:
            # The one that had it is not there yet.
            asked = [self._lines.line(before, left(limit, began))]
            found = self._found(name, wanted, asked, left(limit, began))
        if found is None:
            raise UnknownName(f"no operation '{name}': " + "; ".join(self._having(asked)))
        return found

    def _found(
        self, name: str, wanted: str, asked: list[Connection], limit: float | None
    ) -> Connection | None:
        """The first of some lines whose server has an operation, or soon will."""
        found = None
        patience = REGISTERING if limit is None else min(limit, REGISTERING)
        # Those that have it answer at once; only then is it waited for.
        for wait in (0.0,) if self._offer else (0.0, patience):
            pending = [line.post(m.FindOperation(name, wait), timeout=wait) for line in asked]
            for line, reply in zip(asked, pending, strict=True):
                own = _told_by(reply)
                if own is None:
                    continue
                if wanted not in ("", own):
                    raise UnknownName(
                        f"{wanted} runs no server; {line.address} is {own or 'no task'}"
                    )
                if found is None:
                    found = self._lines.operations[name, wanted] = line
            if found is not None:
                break
        return found

    def _having(self, asked: list[Connection]) -> list[str]:
        """What operations servers have, and which servers were not there to be asked."""
        found = [_had(line) for line in asked]
        gone = [line for line in self._lines.all if line not in asked and not line.alive()]
        told = (f"{line.where} cannot be reached" for line in gone)
        return [*found, *told]


def _told_by(reply: Pending) -> str | None:
    """The task of a server that has the operation; `None` of one that has not."""
    try:
        own: str = reply.result()[0].content
    except TimedOut:
        return None
    return own


def _had(line: Connection) -> str:
    there = sorted(line.call(m.Resources()).content["operations"])
    return f"{line.where} has {there or 'none'}"


def _checked(name: str, threads: Any, batch: Any, wait: Any) -> How:
    what = f"operation '{name}'"
    if threads is not None:
        threads = whole(threads, f"{what}: threads", hint=", or None")
    if batch is None:
        if wait is not None:
            raise SchemaError(f"{what}: wait={wait!r} comes with batch=")
        return How(threads)
    batch = whole(batch, f"{what}: batch", hint=", or None")
    wait = WAIT if wait is None else checked_timeout(wait, f"{what}: wait")
    if wait is None or not math.isfinite(wait):
        raise SchemaError(f"{what}: wait= is seconds")
    return How(threads, batch, wait)
