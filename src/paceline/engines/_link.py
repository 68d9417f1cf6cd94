"""What runs in a task's process once that is set up: its end of the line, and its target."""

import contextlib
import pickle
import select
import socket
import sys
import threading
import time
import traceback

from paceline.core.clock import checked_timeout
from paceline.core.errors import TimedOut
from paceline.engines._child import FAILURE, HEADER, MESSAGE, PROTOCOL, Frames
from paceline.engines.base import Link, run_through


class ProcessLink(Link):
    """The task's end of the line; several threads may use it."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._frames = Frames()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send(self, message: object) -> None:
        self._write(MESSAGE, message)

    def fail(self, error: str) -> None:
        """Tell the launcher the traceback with which this task ends."""
        self._write(FAILURE, error)

    def _write(self, kind: int, message: object) -> None:
        body = pickle.dumps(message, PROTOCOL)
        try:
            with self._sending:
                self._line.sendall(HEADER.pack(kind, len(body)))
                self._line.sendall(body)
        except OSError as error:
            raise EOFError("the launcher is gone") from error

    def receive(self, timeout: float | None = None) -> object:
        timeout = checked_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        with self._receiving:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
                if not poll.poll(left):
                    raise TimedOut(f"receive from the launcher after {timeout} s: no message")
                if frame := self._frames.read(self._line):
                    return pickle.loads(frame[1])


def work(line: socket.socket) -> None:
    """Receive the target of this process and run it."""
    link = ProcessLink(line)
    try:
        target = link.receive()
        assert callable(target)
        run_through(target, link)
    except Exception as error:
        here = error.__traceback__
        lines = traceback.format_exception(error.with_traceback(here.tb_next if here else None))
        with contextlib.suppress(EOFError):
            link.fail("".join(lines))
        sys.exit(1)
