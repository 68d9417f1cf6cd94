"""Requests that were sent and whose replies are taken later."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.codec import ERROR
from paceline.core.errors import Disconnected, PacelineError, WouldBlock

P = ParamSpec("P")
R = TypeVar("R")

GRACE = 60.0
"""Seconds beyond a request's own timeout after which no verdict is waited for any longer."""

LATE, SILENCE = 0.25, 1.5
"""Seconds after the end of the time that its caller gave a call. Then the server is asked for a
sign of life, and if none has come, the call ends."""

Undo: TypeAlias = Callable[[Any], m.Request[Any] | None]
"""What is told the server to take back what a reply says that it did."""
Look: TypeAlias = Literal["wait", "ask", "silent", "gone"]
"""Go on waiting; ask for a sign of life; say that there was none; wait no longer in any case."""


class _End(float):
    """When a call should have its end, by the monotonic clock."""


class _Given(threading.local):
    """The time that somebody gave what this thread asks servers.

    It is held by the call that it was given to, so that none is left after an interrupt, wherever
    that comes.
    """

    held: weakref.ref[_End] | None = None

    @property
    def due(self) -> float | None:
        end = None if self.held is None else self.held()
        return None if end is None else float(end)


_given = _Given()


def within(timeout: float | None, call: Callable[P, R], /, *args: P.args, **options: P.kwargs) -> R:
    """Make a call in which servers are asked things that should take `timeout` seconds in all.

    In a call within another the outer one's time holds.
    """
    if _given.due is not None:
        return call(*args, **options)
    due = _End(math.inf if timeout is None else time.monotonic() + timeout)
    try:
        _given.held = weakref.ref(due)
        return call(*args, **options)
    finally:
        _given.held = None


def limited(method: Callable[P, R]) -> Callable[P, R]:
    """Have the `timeout` of a method be the time for all that it asks servers."""
    parameters = inspect.signature(method).parameters
    place, default = list(parameters).index("timeout"), parameters["timeout"].default

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if _given.due is not None:
            return method(*args, **options)
        given: Any = options.get("timeout", args[place] if place < len(args) else default)
        return within(checked_timeout(given), method, *args, **options)

    return call


class Taker(Protocol):
    """The line on which requests were sent."""

    def take(self, pending: Pending, /) -> tuple[Any, Any]: ...

    def cancel(self, pending: Pending, /) -> bool: ...

    def forget(self, pending: Pending, /) -> None: ...


class Pending:
    """A request that was sent and whose reply has not been taken yet."""

    __slots__ = (
        "_asked",
        "_deadline",
        "_line",
        "cause",
        "due",
        "frame",
        "late",
        "number",
        "since",
        "undo",
        "until",
        "wake",
    )

    def __init__(
        self,
        line: Taker,
        number: int,
        cause: str,
        timeout: float | None,
        undo: Undo | None,
    ) -> None:
        self._line = line
        self.number = number
        self.cause = cause
        self.undo = undo
        self.frame: Any = None
        self.wake: threading.Lock | None = None
        self.since = time.monotonic()
        self.late = False
        """Whether nobody waits for its reply any more, which is undone when it comes."""
        due = _given.due
        self.due = None if due == math.inf else due
        """When its caller should have an answer, by the monotonic clock."""
        self._asked = 0.0
        self._deadline: float | None = None
        self.until: float | None = None
        """When to look whether this has lasted too long."""
        self.end_within(None if timeout is None else timeout + GRACE)

    def end_within(self, limit: float | None) -> None:
        """Wait no longer than so many seconds from now."""
        self._deadline = None if limit is None else time.monotonic() + limit
        self._look_at(math.inf if self.due is None else self.due + LATE)

    def look(self, now: float, heard: float | None) -> Look:
        """What is to be done at `until`.

        `heard` is when the server last gave a sign of life; `None` where it is in this process.
        """
        if self._deadline is not None and now >= self._deadline:
            return "gone"
        if self.due is None or heard is None:
            self._look_at(math.inf)
            return "wait"
        if self._asked and heard < self._asked:
            return "silent"
        self._asked = now
        self._look_at(max(self.due + SILENCE, now + SILENCE - LATE))
        return "ask"

    def silence(self, now: float, found: Look) -> str:
        """What to say when the server said nothing."""
        of_it = (
            "the server has said nothing of it, and is waited for no longer"
            if found == "gone"
            else "the server is silent, and the time that the call was given is over"
        )
        return (
            f"no verdict {now - self.since:.1f} s after the request: {of_it}; whether it was or"
            " will be carried out is unknown; this session goes on as soon as the server does, or"
            " can be reached"
        )

    def _look_at(self, then: float) -> None:
        until = then if self._deadline is None else min(then, self._deadline)
        self.until = None if until == math.inf else until

    def result(self) -> tuple[Any, Any]:
        """Wait for the reply and its buffers.

        Raises:
            PacelineError: the server's own, as its class says.
            Disconnected: the connection ended first; whether it was applied is unknown.
        """
        return self._line.take(self)

    def forget(self) -> None:
        """Take no reply; what it brings is let go of when it comes."""
        self._line.forget(self)

    def cancel(self) -> bool:
        """Have it ended, or undone if it had been carried out; whether it had.

        Its reply may have been taken. Raises nothing: without a verdict the line is ended.
        """
        return self._line.cancel(self)

    def done(self) -> bool:
        return self.frame is not None

    def rouse(self) -> None:
        """Have whoever waits look again."""
        if self.wake is not None:
            with suppress(RuntimeError):  # it has been told already
                self.wake.release()


class Source(Protocol):
    """Where frames come from: a channel."""

    @property
    def heard(self) -> float | None: ...

    def receive(self, timeout: float | None, /) -> Any: ...


class Replies(ABC):
    """Replies to requests, each for who waits for it. Of several threads one reads for all."""

    def __init__(self, source: Source, interrupts: Any) -> None:
        self._source = source
        self._interrupts = interrupts
        self._numbers = itertools.count(1)
        self._waiters: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._broken: PacelineError | None = None

    @abstractmethod
    def _break(self, error: PacelineError) -> PacelineError:
        """Nothing comes any more; the error that all who wait get."""

    @abstractmethod
    def _ended(self, error: PacelineError) -> PacelineError:
        """That error as one gets it who asks now."""

    @abstractmethod
    def _ask(self) -> None:
        """Have the server give a sign of life, if it can be asked."""

    @abstractmethod
    def _withdraw(self, number: int) -> None:
        """Have the server end a request, if it still waits and can be told."""

    @abstractmethod
    def _came_late(self, pending: Pending, frame: Any) -> None:
        """The reply has come of a request for which nobody waits any more."""

    def _reply(self, waiter: Pending) -> Any:
        while waiter.frame is None:
            if self._reading.acquire(blocking=False):
                try:
                    self._read_until(waiter)
                finally:
                    self._pass_on()
                continue
            with self._lock:
                if waiter.done():
                    continue
                if waiter.wake is None:
                    waiter.wake = threading.Lock()
                waiter.wake.acquire(blocking=False)
                if not self._reading.locked():
                    continue
                wake = waiter.wake
            limit = -1.0 if waiter.until is None else max(0.0, waiter.until - time.monotonic())
            if not self._interrupts.during(wake.acquire, True, limit):
                self._look(waiter, time.monotonic())
        return waiter.frame

    def _read_until(self, waiter: Pending) -> None:
        while waiter.frame is None:
            if self._broken is not None:
                raise self._ended(self._broken)
            now = time.monotonic()
            try:
                limit = None if waiter.until is None else max(0.0, waiter.until - now)
                frame = self._source.receive(limit)
            except WouldBlock:
                raise
            except PacelineError as e:
                raise self._ended(self._break(e)) from e
            if frame is not None:
                if self._waiters.get(frame.request) is waiter:
                    waiter.frame = frame
                    return
                self._dispatch(frame)
            elif waiter.until is not None and now >= waiter.until:
                # What came before it was time has been read.
                self._look(waiter, now)

    def _dispatch(self, frame: Any) -> None:
        waiter = self._waiters.get(frame.request)
        if waiter is not None:
            with self._lock:
                if not waiter.late:
                    waiter.frame = frame
                    waiter.rouse()
                    return
            self._waiters.pop(waiter.number, None)
            self._came_late(waiter, frame)
        elif frame.kind == ERROR and frame.request == 0:
            self._break(m.revived(m.decode_reply(frame.header)))

    def _look(self, waiter: Pending, now: float) -> None:
        """See whether the server is there when an answer is due, or whether to wait for none."""
        found = waiter.look(now, self._source.heard)
        if found == "ask":
            self._ask()
        elif found != "wait":
            with self._lock:
                if waiter.done():
                    return
                waiter.late = True
                if not self._reading.locked():
                    # It may just have been told to read.
                    self._rouse_one()
            self._withdraw(waiter.number)
            raise self._ended(Disconnected(waiter.silence(now, found)))

    def _pass_on(self) -> None:
        """Stop reading, and let another waiting thread take over."""
        with self._lock:
            self._reading.release()
            if len(self._waiters) > 1 or self._broken is not None:
                self._rouse_one()

    def _rouse_one(self) -> None:
        """Have one of those who wait read; all, if there is nothing more to read."""
        for waiter in list(self._waiters.values()):
            if waiter.wake is not None and waiter.frame is None and not waiter.late:
                waiter.rouse()
                if self._broken is None:
                    break

    def _wake_all(self) -> None:
        with self._lock:
            for waiter in list(self._waiters.values()):
                waiter.rouse()

    def ending(self) -> PacelineError | None:
        """Why a connection that is not there any more has ended, if that is known."""
        if self._broken is None and self._reading.acquire(blocking=False):
            try:
                while (frame := self._source.receive(0)) is not None:
                    self._dispatch(frame)
            except PacelineError as e:
                self._break(e)
            finally:
                self._pass_on()
        return self._broken

    def _last_word(self) -> PacelineError | None:
        """Why the server ended the connection, if it said so and nobody has read it yet."""
        if self._broken is None and self._reading.acquire(blocking=False):
            try:
                while (frame := self._source.receive(0)) is not None:
                    self._dispatch(frame)
            except PacelineError:
                return self._broken
            finally:
                self._pass_on()
        return self._broken
