"""Requests that were sent and whose replies are taken later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from paceline.core import messages as m

Undo: TypeAlias = Callable[[Any], m.Request[Any] | None]
"""What is told the server to take back what a reply says that it did."""


class Taker(Protocol):
    """The line on which requests were sent."""

    def take(self, pending: Pending, /) -> tuple[Any, Any]: ...

    def cancel(self, pending: Pending, /) -> bool: ...

    def forget(self, pending: Pending, /) -> None: ...


class Pending:
    """A request that was sent and whose reply has not been taken yet."""

    __slots__ = ("_line", "cause", "deadline", "frame", "number", "undo", "wake")

    def __init__(
        self,
        line: Taker,
        number: int,
        cause: str,
        deadline: float | None,
        undo: Undo | None,
    ) -> None:
        self._line = line
        self.number = number
        self.cause = cause
        self.deadline = deadline
        self.undo = undo
        self.frame: Any = None
        self.wake: threading.Lock | None = None

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
