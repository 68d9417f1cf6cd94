"""A channel that outlives its connections: what one of them lost, the next one brings."""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from paceline.core import messages as m
from paceline.core.codec import ERROR, ONE_WAY, REQUEST
from paceline.core.errors import Disconnected, PacelineError, ProtocolError, Refused
from paceline.core.window import Window
from paceline.transports.base import Channel, Frame, Line, Stuck
from paceline.transports.pieces import locked
from paceline.transports.stream import ENDED, StreamChannel

RECONNECT = 60.0
"""Seconds for which a server is called again, at growing intervals, when a connection broke. It
keeps the session for fewer, but begins to count when its own kernel notices the break."""

REFUSED = 5.0
"""Seconds of them after which a host that says that nobody listens is believed."""

ATTEMPT = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
READ_LIMIT = 1.0
CLOSE_LIMIT = 1.0


class LastingChannel(Channel):
    """A client's end. Until `outlive` it is no more than the connection it was given.

    From then on a thread notices when the connection breaks, and makes another one with `dial`.
    Meanwhile sending goes on and receiving waits.
    """

    shares_memory = False

    def __init__(self, first: StreamChannel, dial: Callable[[float], StreamChannel]) -> None:
        self._dial = dial
        self._inner: StreamChannel | None = first
        # Those before it; a descriptor may be used again only when nobody uses its channel.
        self._broken: list[StreamChannel] = []
        self._line: Line | None = None
        self._window: Window[Frame] = Window()
        self._error: PacelineError | None = None
        self._owes = False
        # Read before their connection ended, and not received yet.
        self._early: deque[Frame] = deque()
        # One reads at a time, so that no frame is read from a connection when it has been counted
        # what came over it.
        self._reader = threading.Lock()
        # Frames leave in the order in which they are counted.
        self._order = threading.Lock()
        self._changed = threading.Condition()
        self._woken, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None

    def outlive(self, line: Line) -> None:
        self._line = line
        if self._inner is not None:
            self._inner.interrupts = self.interrupts
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        # The thread does not keep the channel: one that nobody uses any more ends.
        weakref.finalize(self, _wake, self._waker).atexit = False
        self._thread = threading.Thread(
            target=_tend, args=(weakref.ref(self), self._woken), name="paceline-line", daemon=True
        )
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._inner is not None and self.alive()

    def alive(self) -> bool:
        if self.closed or self._error is not None:
            return False
        return self._line is not None or (self._inner is not None and self._inner.alive())

    # Sending

    @property
    def heard(self) -> float | None:  # type: ignore[override]
        inner = self._inner
        return 0.0 if inner is None else inner.heard

    def send(self, frame: Frame, due: float | None = None) -> None:
        locked(self._order, None if frame.kind == ONE_WAY else due)
        try:
            if frame.kind != ONE_WAY:
                self._clear(due)
            inner = self._counted(frame)
            if inner is not None:
                self._send(inner, frame, due)
        finally:
            self._order.release()
        if self._owes:
            self.flush()

    def _send(self, inner: StreamChannel, frame: Frame, due: float | None) -> None:
        try:
            inner.send(frame, due)
        except BaseException as e:
            if self._line is None:
                raise
            # The next connection brings all of it, also if this was interrupted in the midst of it.
            self._lose(inner)
            if not isinstance(e, Disconnected):
                raise

    def _clear(self, due: float | None) -> None:
        """Have the frames before this one sent, as far as a connection has begun with them."""
        inner = self._inner
        if inner is not None and inner.unsent:
            try:
                inner.clear(due)
            except Stuck:
                raise
            except Disconnected:
                self._lose(inner)

    def _counted(self, frame: Frame) -> StreamChannel | None:
        """Where to send a frame; `None` if the next connection has to bring it."""
        with self._changed:
            self._check()
            if self._line is not None:
                self._window.sending(frame)
                frame.received = self._window.received
            return self._inner

    def flush(self) -> None:
        if self._line is None:
            return
        # Whoever is sending now looks again afterwards.
        self._owes = True
        while self._owes and self._order.acquire(blocking=False):
            try:
                self._owes = False
                inner = self._inner
                if inner is not None and not inner.unsent:
                    ack = Frame(ONE_WAY, 0, b"", received=self._window.received)
                    self._send(inner, ack, 0.0)
            finally:
                self._order.release()

    # Receiving

    def receive(self, timeout: float | None = None) -> Frame | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._reader:
                if self._early:
                    return self._early.popleft()
                inner = self._inner
                frame = None if inner is None else self._read(inner, left)
            if frame is not None:
                return frame
            broken = inner is None or inner is not self._inner
            if broken and self._connected_within(left):
                continue
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _read(self, inner: StreamChannel, limit: float | None) -> Frame | None:
        """The next frame, if a connection brings one before it breaks or the time is up."""
        try:
            frame = inner.receive(limit)
        except Disconnected:
            if self._line is None:
                raise
            self._lose(inner)
            return None
        except ProtocolError as e:
            self._end(e)
            raise
        if frame is None or self._line is None or self._arrived(inner, frame):
            return frame
        return None

    def _connected_within(self, limit: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._inner or self._error or self.closed, self.interrupts.limit(limit)
            )
            self.interrupts.check()
            self._check()
            return self._inner is not None

    def _arrived(self, inner: StreamChannel, frame: Frame) -> bool:
        """Count a frame, unless the next connection brings it again."""
        if frame.kind == ERROR and frame.request == 0:
            self._end(m.revived(m.decode_reply(frame.header)))
            return False
        with self._changed:
            if inner is not self._inner:
                return False
            self._window.arrived(frame.received)
        if any(frame.buffers):
            # Until it is known to have arrived, the server keeps its memory.
            self.flush()
        return True

    # Connections

    def tend(self) -> StreamChannel | None:
        """What the thread does: make another connection if there is none; `None` at the end."""
        inner = self._inner
        if inner is not None and not inner.alive():
            self._read_early(inner)
            self._lose(inner)
        if self._inner is None and self.alive():
            self._reconnect()
        if self.alive():
            return self._inner
        self._let_go()
        return None

    def _reconnect(self) -> None:
        with self._order:
            self._let_go()
        began = time.monotonic()
        refused: float | None = None
        pause = FIRST_PAUSE
        while self.alive():
            try:
                self._resume(self._dial(ATTEMPT))
                return
            except Disconnected as e:
                now = time.monotonic()
                if not isinstance(e.__cause__, ConnectionRefusedError):
                    refused = None
                elif refused is None:
                    refused = now
                if now - began > RECONNECT or (refused is not None and now - refused > REFUSED):
                    self._end(
                        Disconnected(f"the connection broke {now - began:.0f} s ago, and then: {e}")
                    )
            except (Refused, ProtocolError) as e:
                self._end(e)
            _listen(self._woken, None, pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _resume(self, inner: StreamChannel) -> None:
        """Go on over a new connection, beginning with what the other end has not had.

        Raises:
            Disconnected: it broke again.
        """
        line = self._line
        assert line is not None
        try:
            request = m.Rejoin(line.session, line.token, line.epoch, self._window.received)
            inner.send(Frame(REQUEST, 1, m.encode(request), session=line.session))
            answer = inner.receive(ATTEMPT)
            if answer is None:
                raise Disconnected(f"the server did not answer for {ATTEMPT:.0f} s")
            reply = m.decode_reply(answer.header)
            if answer.kind == ERROR:
                self._end(m.revived(reply))
                inner.close()
                return
            with self._order:
                for frame in self._window.missing(reply.received):
                    frame.received = self._window.received
                    inner.send(frame)
                with self._changed:
                    if not self.alive():
                        raise Disconnected("this connection was closed meanwhile")
                    inner.interrupts = self.interrupts
                    self._inner = inner
                    self._changed.notify_all()
        except BaseException:
            inner.close()
            raise

    def _lose(self, inner: StreamChannel) -> None:
        """A connection has broken; those who still use it notice."""
        inner.cut()
        with self._changed:
            if self._inner is inner:
                self._inner = None
                self._broken.append(inner)
        _wake(self._waker)

    def _end(self, error: PacelineError) -> None:
        """No connection will follow."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if self._inner is not None:
            self._lose(self._inner)
        _wake(self._waker)

    def _check(self) -> None:
        if self.closed:
            raise Disconnected("this connection is closed")
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _read_early(self, inner: StreamChannel) -> None:
        """Read what came before the end of a connection, unless somebody else does."""
        if not self._reader.acquire(timeout=READ_LIMIT):
            return
        try:
            while self._inner is inner and (frame := self._read(inner, 0)) is not None:
                self._early.append(frame)
        except PacelineError:
            # It has ended, and whoever receives next hears why.
            return
        finally:
            self._reader.release()

    def _let_go(self) -> None:
        """Close the connections before this one, when nobody uses them."""
        with self._reader:
            while self._broken:
                self._broken.pop().close()

    def close(self) -> None:
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
        self.on_end()
        inner = self._inner
        if inner is not None:
            inner.cut()
        _wake(self._waker)
        if self._thread is not None and self._thread is not threading.current_thread():
            # It may be calling a host that does not answer; then it ends by itself.
            self._thread.join(CLOSE_LIMIT)
        for one in (inner, *self._broken):
            if one is not None:
                one.close()
        if self._thread is None or not self._thread.is_alive():
            self._woken.close()
        self._waker.close()


def _tend(of: weakref.ref[LastingChannel], woken: socket.socket) -> None:
    """Look after a channel's connections for as long as there is the channel."""
    while (channel := of()) is not None:
        inner = channel.tend()
        del channel
        if inner is None:
            return
        descriptor = inner.fileno()
        del inner
        _listen(woken, descriptor, None)


def _listen(woken: socket.socket, descriptor: int | None, limit: float | None) -> None:
    """Wait until somebody wakes the thread, or a connection ends."""
    poll = select.poll()
    poll.register(woken.fileno(), select.POLLIN)
    if descriptor is not None and descriptor >= 0:
        poll.register(descriptor, ENDED)
    poll.poll(None if limit is None else limit * 1000)
    with suppress(BlockingIOError):
        woken.recv(4096)


def _wake(waker: socket.socket) -> None:
    with suppress(OSError):
        waker.send(b"x")
