"""What a session has in its hands of something shared."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from paceline.connection import Connection
from paceline.core.clock import checked_timeout, left
from paceline.core.errors import Disconnected
from paceline.core.names import parts, quoted

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 60.0
"""Seconds that what has no timeout of its own waits for a server that is started again."""


class Moving(Protocol):
    """Who asks a server, and goes on with another that took its place."""

    def _asks(self) -> Any:
        """The line or lines that are asked now: equal, while they are the same."""

    def _move(self, timeout: float | None) -> bool:
        """Go over to the successor of the line that has broken; whether there is one.

        Raises:
            TimedOut: it is not there within `timeout` seconds.
        """


M = TypeVar("M", bound=Moving)


def lasting(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Have a method ask again where its server has ended and is started again by its launcher.

    It has its `timeout` for all of it. What was asked of the server that has ended is gone with it,
    so what is asked again is done once.
    """
    signature = inspect.signature(method)
    timed = "timeout" in signature.parameters

    def asked(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        began, before = time.monotonic(), self._asks()
        try:
            return method(self, *args, **kwargs)
        except Disconnected:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            limit = checked_timeout(bound.arguments["timeout"] if timed else PATIENCE)
            # Another thread may have moved it already.
            if self._asks() == before and not self._move(left(limit, began)):
                raise
        while True:
            if timed:
                bound.arguments["timeout"] = left(limit, began)
            before = self._asks()
            try:
                return method(*bound.args, **bound.kwargs)
            except Disconnected:
                if self._asks() == before and not self._move(left(limit, began)):
                    raise

    update_wrapper(asked, method)
    return asked


class Handle:
    """Something shared: its name, its container, and the line to its home.

    Attributes:
        key: how the name travels. After a reset of the container it is a key no more, and a name
            made anew has another.
        called: name and container, as messages say it.
    """

    kind: ClassVar[str]

    def __init__(self, connection: Connection, key: str) -> None:
        self.key = key
        self.name, self.container, _ = parts(key)
        self.called = quoted(key)
        self._connection = connection

    def __paceline_handle__(self) -> tuple[str, ...]:
        return (self.kind, self.key, self._connection.address)

    def _asks(self) -> Connection:
        return self._connection

    def _move(self, timeout: float | None) -> bool:
        """Go over to a server that was started again, and find it there, or make it anew."""
        began, before = time.monotonic(), self._connection
        line = before.succeeded(timeout)
        if line is None:
            return False
        self._made_at(line, left(timeout, began))
        self._connection = line
        return True

    def _follow(self, before: Connection, line: Connection) -> None:
        """Make it anew on a server that was started again, if that was its home."""
        if self._connection is before:
            self._made_at(line, 0.0)
            self._connection = line

    def _made_at(self, line: Connection, timeout: float | None) -> Any:
        """See that it is there, as it was defined; what it held is empty if it was not saved."""
        raise NotImplementedError
