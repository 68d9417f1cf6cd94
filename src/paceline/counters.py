"""Counters: one whole number for all sessions, such as the global step."""

from __future__ import annotations

from typing import SupportsIndex

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.numbers import int64
from paceline.handles import Handle, lasting
from paceline.pending import limited
from paceline.requests import Request


class Counter(Handle):
    """An int64 that all sessions add to. What was added stays, whoever dies."""

    kind = "counter"

    def __init__(self, connection: Connection, key: str, start: int) -> None:
        super().__init__(connection, key)
        self.start = start

    def __repr__(self) -> str:
        return f"<Counter {self.called} from {self.start}, on {self._connection.address}>"

    @lasting
    @limited
    def add(self, n: SupportsIndex = 1, *, timeout: float | None = 60.0) -> int:
        """Add `n`, which may be negative, in one step; the value right after it.

        So no two sessions that add 1 get the same number.

        Raises:
            SchemaError: `n` is no whole number, or the sum no int64; nothing was added.
            Disconnected: the server said nothing within `timeout` seconds; whether it was or will
                be added is unknown.
        """
        request = m.AddToCounter(self.key, int64(n, f"counter {self.called}: n"))
        return int(self._connection.call(request).content)

    def _made_at(self, line: Connection, timeout: float | None) -> None:
        line.call(m.DefineCounter(self.key, self.start, 0.0))

    def adding(self, n: SupportsIndex = 1) -> Request[int]:
        """As `add`, for `session.run` together with others."""
        message = m.AddToCounter(self.key, int64(n, f"counter {self.called}: n"))
        return Request(self._connection, message, (), lambda reply, _: int(reply.content))

    @property
    @lasting
    def value(self) -> int:
        """What it is at now."""
        return int(self._connection.call(m.AddToCounter(self.key, 0)).content)

    @lasting
    @limited
    def wait_for(self, at_least: SupportsIndex, timeout: float | None = 60.0) -> int:
        """Wait until it is at `at_least` or more; what it is at then.

        Raises:
            TimedOut: it was not within `timeout` seconds; the message says what it was at.
        """
        limit = checked_timeout(timeout)
        wanted = int64(at_least, f"counter {self.called}: at_least")
        request = m.AwaitCounter(self.key, wanted, limit)
        return int(self._connection.call(request, timeout=limit).content)
