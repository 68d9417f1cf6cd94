"""One line to one server: requests and their replies, from any thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from paceline.core import messages as m
from paceline.core.account import REQUESTS
from paceline.core.codec import ERROR, MAX_HEADER, ONE_WAY, REQUEST
from paceline.core.conduct import Conduct
from paceline.core.elements import check_elements
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    SchemaError,
    TimedOut,
    WouldBlock,
)
from paceline.core.tree import Array
from paceline.pending import Pending, Replies, Undo
from paceline.transports.base import Arena, Buffers, Channel, Frame, Line, Stuck
from paceline.transports.interrupts import Interrupts

R = TypeVar("R")

CANCEL_LIMIT = LEAVE_LIMIT = 5.0


class Connection(Replies):
    """Calls to one server. Of several waiting threads one reads for all.

    What a request may wait for, and when its time is up, is decided by the server: a call ends with
    the server's verdict, or with `Disconnected`. Where its caller gave it a time (`pending.within`)
    and the server is silent when that is over, the call ends alone: the line goes on.
    """

    def __init__(self, channel: Channel, arena: Arena, address: str) -> None:
        self.address = address
        self.task = ""
        """The server's, where it has one."""
        self.arena = arena
        self.session = self.incarnation = 0
        self.conduct = Conduct()
        self.explain: Callable[[], str | None] | None = None
        """Asked once for what became of the server, when the connection has broken."""
        self.successor: Callable[[float | None], Connection | None] = lambda _: None
        """Waits for the line that replaces this one once it has broken, if one does."""
        self.board: Array | None = None
        """The words that say which versions are current, where memory is shared with the server."""
        self.interrupts = channel.interrupts = Interrupts()
        """What keeps Ctrl-C from the midst of a message, or of several where it is entered."""
        super().__init__(channel, self.interrupts)
        self._channel = channel
        # Blocks that come back when the connection ends may still be looked at elsewhere.
        channel.on_end = arena.close
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
        undo: Callable[[R], m.Request[Any] | None] | None = None,
    ) -> tuple[R, Buffers]:
        """Send a request and wait for its reply and the reply's buffers.

        `timeout` is how long the server may wait before it answers. When this thread is
        interrupted, the request is cancelled; if it had been carried out already, what `undo` makes
        of its reply is sent.
        """
        if timeout != 0 and self.conduct.before_wait is not None:
            self.interrupts.during(self.conduct.before_wait)
        with self.interrupts:
            return self._carried(self._posted(request, buffers, timeout, undo, True))

    def post(
        self,
        request: m.Request[R],
        buffers: Buffers = (),
        timeout: float | None = 0.0,
        undo: Callable[[R], m.Request[Any] | None] | None = None,
    ) -> Pending:
        """Send a request; its reply is taken later. With `undo`, Ctrl-C is as in `exchange`."""
        with self.interrupts:
            return self._posted(request, buffers, timeout, undo, undo is not None)

    def take(self, pending: Pending) -> tuple[Any, Buffers]:
        """Take the reply of a posted request."""
        with self.interrupts:
            if pending.undo is not None:
                return self._carried(pending)
            try:
                return self._settled(pending)
            finally:
                self.forget(pending)

    def cancel(self, pending: Pending) -> bool:
        """As `Pending.cancel`."""
        with self.interrupts:
            self._cancelled(pending)
            self.forget(pending)
        return pending.frame is not None and pending.frame.kind != ERROR

    def forget(self, pending: Pending) -> None:
        """Take no reply to a request; what it brings is let go of when it comes."""
        if not pending.late:
            self._waiters.pop(pending.number, None)

    def _posted(
        self,
        request: m.Request[Any],
        buffers: Buffers,
        timeout: float | None,
        undo: Undo | None,
        cancels: bool,
    ) -> Pending:
        pending = self._expect(request, timeout, undo)
        try:
            frame = Frame(REQUEST, pending.number, m.encode(request), buffers, self.session)
            self._send(frame, pending.due)
        except BaseException as e:
            if cancels and isinstance(e, KeyboardInterrupt | SystemExit):
                self._cancelled(pending)
            self.forget(pending)
            raise
        return pending

    def _carried(self, pending: Pending) -> tuple[Any, Buffers]:
        try:
            reply = self._settled(pending)
            self.interrupts.check()
            return reply
        except WouldBlock as e:
            if pending.done():
                # The server itself says so, and has ended the wait.
                raise
            raise WouldBlock(f"{self._cancelled(pending)}; {e}") from None
        except (KeyboardInterrupt, SystemExit):
            self._cancelled(pending)
            raise
        finally:
            self.forget(pending)

    def tell(self, request: m.Request[Any]) -> None:
        """Send a request that has no reply."""
        with self.interrupts:
            self._tell(request)

    def _ask(self) -> None:
        self._send_unheard(m.Stopping())

    def _withdraw(self, number: int) -> None:
        self._send_unheard(m.Cancel(number))

    def _send_unheard(self, request: m.Request[Any]) -> None:
        """Send it if that can be at once; nobody waits for a reply."""
        if not self.session:
            return  # What comes before that is not counted.
        frame = Frame(REQUEST, next(self._numbers), m.encode(request), (), self.session)
        with suppress(Disconnected):
            self._send(frame, time.monotonic())

    def _came_late(self, pending: Pending, frame: Frame) -> None:
        if frame.kind != ERROR:
            with suppress(PacelineError):
                self._undo(pending, m.decode_reply(frame.header))

    def _tell(self, request: m.Request[Any]) -> None:
        # It waits for no other message, and not long for the server to take it.
        self._send(Frame(ONE_WAY, 0, m.encode(request), (), self.session), time.monotonic())

    @property
    def shares_memory(self) -> bool:
        """Whether what the server sends is looked at where the server has it."""
        return self._channel.shares_memory

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a forked process, where the connection is not ours."""
        return os.getpid() != self._process

    @property
    def where(self) -> str:
        """Which server is at its other end, as messages say it."""
        return f"{self.task} at {self.address}" if self.task else self.address

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
        pending = self._expect(request, 0.0)
        pending.end_within(LEAVE_LIMIT)
        try:
            frame = Frame(REQUEST, pending.number, m.encode(request), (), self.session)
            self._send(frame, time.monotonic() + LEAVE_LIMIT)
            self._settled(pending)
        finally:
            self.forget(pending)
        return True

    def outlive(self, joined: m.Joined, token: bytes) -> None:
        """Be the line of the session that has joined, also over other connections."""
        self.session, self.incarnation = joined.session, joined.incarnation
        if joined.linger:
            self._channel.outlive(Line(joined.session, token, joined.epoch))

    def succeeded(self, timeout: float | None) -> Connection | None:
        """The line that goes on where this one has broken, where one does, once it is there."""
        return None if self.alive() else self.successor(timeout)

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
        self, request: m.Request[Any], timeout: float | None, undo: Undo | None = None
    ) -> Pending:
        """The next request, for whose reply somebody waits."""
        number = next(self._numbers)
        cause = REQUESTS if timeout == 0 else request.cause
        pending = self._waiters[number] = Pending(self, number, cause, timeout, undo)
        return pending

    def _send(self, frame: Frame, due: float | None) -> None:
        if self._broken is not None:
            raise self._ended(self._broken)
        if len(frame.header) > MAX_HEADER:
            raise SchemaError(
                f"{len(frame.header)} bytes of plain values in one step, {MAX_HEADER} are allowed:"
                " send fewer at a time, or as arrays, which may have any size"
            )
        check_elements(frame.header)
        if self.forked:
            raise Disconnected(
                f"{self.where}: this session belongs to process {self._process}; a forked process"
                " opens one of its own"
            )
        try:
            self._channel.send(frame, due)
        except Stuck as e:
            raise self._ended(Disconnected(f"no verdict: {e}; nothing was sent")) from None
        except Disconnected as e:
            raise self._ended(self._break(self._last_word() or e)) from e

    def _wait(self, waiter: Pending) -> Frame:
        frame: Frame
        account = self.conduct.account
        if account is None or not account.mine():
            frame = self._reply(waiter)
            return frame
        before = account.enter(waiter.cause)
        try:
            frame = self._reply(waiter)
            return frame
        finally:
            account.enter(before)

    def _break(self, error: PacelineError) -> PacelineError:
        """End the connection; what its calls end with from now on, the error less its traceback."""
        if self._broken is None:
            why = None if self.explain is None else self.explain()
            self._broken = type(error)(f"{error}" if why is None else f"{error}; {why}")
        self._channel.close()
        self._wake_all()
        return self._broken

    def _ended(self, error: PacelineError) -> PacelineError:
        return type(error)(f"{self.where}: {error}")

    def _cancelled(self, pending: Pending) -> str:
        """Take a request back; what it waited for, as the server says it."""
        try:
            if pending.late:
                return ""  # It is undone if it ever is done.
            if not pending.done():
                self.tell(m.Cancel(pending.number))
            pending.due = None
            pending.end_within(CANCEL_LIMIT)
            frame = self._wait(pending)
            reply = m.decode_reply(frame.header)
            if frame.kind == ERROR:
                return str(reply.text)
            self._undo(pending, reply)
        except PacelineError as e:
            if not pending.late:
                # Without a verdict nobody knows what was done: the end of the connection undoes it.
                self._break(e)
            return str(e)
        return ""

    def _undo(self, pending: Pending, reply: Any) -> None:
        undo, pending.undo = pending.undo, None
        told = None if undo is None else undo(reply)
        if told is not None:
            self.tell(told)

    def _settled(self, pending: Pending) -> tuple[Any, Buffers]:
        frame = self._wait(pending)
        reply = m.decode_reply(frame.header)
        if frame.error is not None:
            self._undo(pending, reply)
            raise frame.error
        if frame.kind != ERROR:
            return reply, frame.buffers
        # Not by a name of its own: an error that its own traceback holds keeps alive what the
        # frames of whoever asked hold, until somebody looks for such rings.
        raise self._told(m.revived(reply))

    def _told(self, error: PacelineError) -> PacelineError:
        if isinstance(error, TimedOut):
            return TimedOut(f"{error} (server {self.where})")
        return error
