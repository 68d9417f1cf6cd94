"""One line to one server: requests and their replies, from any thread."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from paceline.core import messages as m
from paceline.core.account import REQUESTS
from paceline.core.codec import ERROR, MAX_HEADER, ONE_WAY, REQUEST
from paceline.core.conduct import Conduct
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    SchemaError,
    TimedOut,
    WouldBlock,
)
from paceline.core.tree import Array
from paceline.transports.base import Arena, Buffers, Channel, Frame, Line
from paceline.transports.interrupts import Interrupts

R = TypeVar("R")

GRACE = 60.0
"""Seconds beyond a request's own timeout after which a silent server counts as gone."""

CANCEL_LIMIT = LEAVE_LIMIT = 5.0


class _Waiter:
    __slots__ = ("cause", "frame", "wake")

    def __init__(self, cause: str) -> None:
        self.cause = cause
        self.frame: Frame | None = None
        self.wake: threading.Lock | None = None

    def done(self) -> bool:
        return self.frame is not None

    def rouse(self) -> None:
        """Have whoever waits look again."""
        if self.wake is not None:
            with suppress(RuntimeError):  # it has been told already
                self.wake.release()


class Pending:
    """A request that was sent and whose reply has not been taken yet."""

    __slots__ = ("_connection", "_deadline", "_number", "_waiter")

    def __init__(
        self, connection: Connection, number: int, waiter: _Waiter, deadline: float | None
    ) -> None:
        self._connection = connection
        self._number = number
        self._waiter = waiter
        self._deadline = deadline

    def result(self) -> tuple[Any, Buffers]:
        """Wait for the reply.

        Raises:
            PacelineError: the server's own, as its class says.
            Disconnected: the connection ended first; whether it was applied is unknown.
        """
        return self._connection.take(self._number, self._waiter, self._deadline)

    def forget(self) -> None:
        """Take no reply; what it brings is let go of when it comes."""
        self._connection._waiters.pop(self._number, None)


class Connection:
    """Calls to one server. Of several waiting threads one reads for all.

    What a request may wait for, and when its time is up, is decided by the server: a call ends with
    the server's verdict, or with `Disconnected`.
    """

    def __init__(self, channel: Channel, arena: Arena, address: str) -> None:
        self.address = address
        self.arena = arena
        self.session = 0
        self.conduct = Conduct()
        self.explain: Callable[[], str | None] | None = None
        """Asked once for what became of the server, when the connection has broken."""
        self.board: Array | None = None
        """The words that say which versions are current, where memory is shared with the server."""
        self.interrupts = channel.interrupts = Interrupts()
        """What keeps Ctrl-C from the midst of a message, or of several where it is entered."""
        self._channel = channel
        # Blocks that come back when the connection ends may still be looked at elsewhere.
        channel.on_end = arena.close
        self._numbers = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._broken: PacelineError | None = None
        self._process = os.getpid()

    def call(self, request: m.Request[R], buffers: Buffers = (), timeout: float | None = 0.0) -> R:
        """Send a request that is answered without buffers, and wait for its reply."""
        reply, _ = self.exchange(request, buffers, timeout)
        return reply

    def exchange(
        self,
        request: m.Request[R],
        buffers: Buffers = (),
        timeout: float | None = 0.0,
        undo: Callable[[R], m.Request[Any]] | None = None,
    ) -> tuple[R, Buffers]:
        """Send a request and wait for its reply and the reply's buffers.

        `timeout` is how long the server may wait before it answers. When this thread is
        interrupted, the request is cancelled; if it had been carried out already, what `undo` makes
        of its reply is sent.
        """
        if timeout != 0 and self.conduct.before_wait is not None:
            self.interrupts.during(self.conduct.before_wait)
        with self.interrupts:
            number, waiter, deadline = self._expect(request, timeout)
            try:
                self._send(Frame(REQUEST, number, m.encode(request), buffers, self.session))
                reply = self._settled(self._wait(waiter, deadline), undo)
                self.interrupts.check()
                return reply
            except WouldBlock as e:
                if waiter.done():
                    # The server itself says so, and has ended the wait.
                    raise
                raise WouldBlock(f"{self._cancelled(number, waiter, undo)}; {e}") from None
            except (KeyboardInterrupt, SystemExit):
                self._cancelled(number, waiter, undo)
                raise
            finally:
                self._waiters.pop(number, None)

    def post(
        self, request: m.Request[R], buffers: Buffers = (), timeout: float | None = 0.0
    ) -> Pending:
        """Send a request; its reply is taken later."""
        with self.interrupts:
            number, waiter, deadline = self._expect(request, timeout)
            try:
                self._send(Frame(REQUEST, number, m.encode(request), buffers, self.session))
            except BaseException:
                self._waiters.pop(number, None)
                raise
        return Pending(self, number, waiter, deadline)

    def take(self, number: int, waiter: _Waiter, deadline: float | None) -> tuple[Any, Buffers]:
        """Take the reply of a posted request."""
        with self.interrupts:
            try:
                return self._settled(self._wait(waiter, deadline))
            finally:
                self._waiters.pop(number, None)

    def tell(self, request: m.Request[Any]) -> None:
        """Send a request that has no reply."""
        with self.interrupts:
            self._send(Frame(ONE_WAY, 0, m.encode(request), (), self.session))

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a forked process, where the connection is not ours."""
        return os.getpid() != self._process

    def alive(self) -> bool:
        """Whether the server is still there, without asking it.

        So it is while another connection is being made.
        """
        return self._broken is None and self._channel.alive()

    def leave(self, failed: str = "") -> bool:
        """Say goodbye, if there is a connection to say it over; whether the server knows."""
        if not self._channel.connected:
            return False
        request = m.Leave(failed)
        number, waiter, _ = self._expect(request, 0.0)
        try:
            self._send(Frame(REQUEST, number, m.encode(request), (), self.session))
            self._settled(self._wait(waiter, time.monotonic() + LEAVE_LIMIT))
        finally:
            self._waiters.pop(number, None)
        return True

    def outlive(self, joined: m.Joined, token: bytes) -> None:
        """Be the line of the session that has joined, also over other connections."""
        self.session = joined.session
        if joined.linger:
            self._channel.outlive(Line(joined.session, token, joined.epoch))

    def give_back(self) -> None:
        """Let the server know now which of its buffers are no longer used here.

        Finalisers may call it: it neither waits for another thread nor raises.
        """
        if not self.forked:
            with suppress(PacelineError):
                self.interrupts.silently(self._channel.flush)

    def fail(self, error: PacelineError) -> None:
        """End the connection, unless it has ended; what waits in other threads ends with that."""
        if self._broken is None:
            self._broken = error
            self._channel.close()
            self._wake_all()

    def close(self, *, left: bool = False) -> None:
        """End the connection; what waits in other threads ends with `Closed`. Idempotent.

        `left`: the server knows, and what was received from it stays as it is while it is held.
        """
        if self._broken is None:
            self._broken = Closed("this session was closed")
        if self.forked:
            return  # The connection is the parent's, which goes on with it.
        if left:
            self._channel.retire()
        else:
            self._channel.close()
        self._wake_all()

    # Waiting

    def _expect(
        self, request: m.Request[Any], timeout: float | None
    ) -> tuple[int, _Waiter, float | None]:
        """The number of the next request, who waits for its reply, and until when."""
        number = next(self._numbers)
        cause = REQUESTS if timeout == 0 else request.cause
        waiter = self._waiters[number] = _Waiter(cause)
        return number, waiter, None if timeout is None else time.monotonic() + timeout + GRACE

    def _send(self, frame: Frame) -> None:
        if self._broken is not None:
            raise self._ended(self._broken)
        if len(frame.header) > MAX_HEADER:
            raise SchemaError(
                f"{len(frame.header)} bytes of plain values in one step, {MAX_HEADER} are allowed:"
                " send fewer at a time, or as arrays, which may have any size"
            )
        if self.forked:
            raise Disconnected(
                f"{self.address}: this session belongs to process {self._process}; a forked process"
                " opens one of its own"
            )
        try:
            self._channel.send(frame)
        except Disconnected as e:
            raise self._ended(self._break(self._last_word() or e)) from e

    def _last_word(self) -> PacelineError | None:
        """Why the server ended the connection, if it said so and nobody has read it yet."""
        if self._broken is None and self._reading.acquire(blocking=False):
            try:
                while (frame := self._channel.receive(0)) is not None:
                    self._dispatch(frame)
            except PacelineError:
                return self._broken
            finally:
                self._pass_on()
        return self._broken

    def _wait(self, waiter: _Waiter, deadline: float | None) -> Frame:
        account = self.conduct.account
        if account is None or not account.mine():
            return self._reply(waiter, deadline)
        before = account.enter(waiter.cause)
        try:
            return self._reply(waiter, deadline)
        finally:
            account.enter(before)

    def _reply(self, waiter: _Waiter, deadline: float | None) -> Frame:
        while waiter.frame is None:
            if self._reading.acquire(blocking=False):
                try:
                    self._read_until(waiter, deadline)
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
            limit = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.interrupts.during(wake.acquire, True, limit):
                self._give_up()
        return waiter.frame

    def _read_until(self, waiter: _Waiter, deadline: float | None) -> None:
        while waiter.frame is None:
            if self._broken is not None:
                raise self._ended(self._broken)
            limit = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                frame = self._channel.receive(limit)
            except WouldBlock:
                raise
            except PacelineError as e:
                raise self._ended(self._break(e)) from e
            if frame is not None:
                if self._waiters.get(frame.request) is waiter:
                    waiter.frame = frame
                    return
                self._dispatch(frame)
            elif deadline is not None and time.monotonic() >= deadline:
                self._give_up()

    def _dispatch(self, frame: Frame) -> None:
        waiter = self._waiters.get(frame.request)
        if waiter is not None:
            with self._lock:
                waiter.frame = frame
                waiter.rouse()
        elif frame.kind == ERROR and frame.request == 0:
            self._break(m.revived(m.decode_reply(frame.header)))

    def _pass_on(self) -> None:
        """Stop reading, and let another waiting thread take over."""
        with self._lock:
            self._reading.release()
            if len(self._waiters) > 1 or self._broken is not None:
                for waiter in list(self._waiters.values()):
                    if waiter.wake is not None and waiter.frame is None:
                        waiter.rouse()
                        if self._broken is None:
                            break

    def _wake_all(self) -> None:
        with self._lock:
            for waiter in list(self._waiters.values()):
                waiter.rouse()

    def _break(self, error: PacelineError) -> PacelineError:
        """End the connection; the error that its calls end with from now on."""
        if self._broken is None:
            why = None if self.explain is None else self.explain()
            self._broken = error if why is None else type(error)(f"{error}; {why}")
        self._channel.close()
        self._wake_all()
        return self._broken

    def _give_up(self) -> None:
        self._break(Disconnected(f"no verdict within {GRACE:.0f} s of a request's own timeout"))

    def _ended(self, error: PacelineError) -> PacelineError:
        return type(error)(f"{self.address}: {error}")

    def _cancelled(
        self, number: int, waiter: _Waiter, undo: Callable[[Any], m.Request[Any]] | None
    ) -> str:
        """Take a request back; what it waited for, as the server says it."""
        try:
            self.tell(m.Cancel(number))
            frame = self._wait(waiter, time.monotonic() + CANCEL_LIMIT)
            if frame.kind != ERROR and undo is not None:
                self.tell(undo(m.decode_reply(frame.header)))
            return "" if frame.kind != ERROR else m.decode_reply(frame.header).text
        except PacelineError as e:
            # Without a verdict nobody knows what was done: the end of the connection undoes it.
            self._break(e)
            return str(e)

    def _settled(
        self, frame: Frame, undo: Callable[[Any], m.Request[Any]] | None = None
    ) -> tuple[Any, Buffers]:
        reply = m.decode_reply(frame.header)
        if frame.error is not None:
            if undo is not None:
                self.tell(undo(reply))
            raise frame.error
        if frame.kind != ERROR:
            return reply, frame.buffers
        # Not by a name of its own: an error that its own traceback holds keeps alive what the
        # frames of whoever asked hold, until somebody looks for such rings.
        raise self._told(m.revived(reply))

    def _told(self, error: PacelineError) -> PacelineError:
        if isinstance(error, TimedOut):
            return TimedOut(f"{error} (server {self.address})")
        return error
