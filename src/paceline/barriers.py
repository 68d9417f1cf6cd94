"""Barriers: where tasks wait for each other."""

from __future__ import annotations

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.handles import Handle, lasting
from paceline.pending import limited


class Barrier(Handle):
    """A meeting of `n` calls of `wait`, round after round; each counts, of whatever task.

    A task that died while it waited, or whose wait timed out, is not in the round any more: when
    it comes back it arrives anew.
    """

    kind = "barrier"

    def __init__(self, connection: Connection, key: str, n: int) -> None:
        super().__init__(connection, key)
        self.n = n

    def __repr__(self) -> str:
        return f"<Barrier {self.called} of {self.n}, on {self._connection.address}>"

    @lasting
    @limited
    def wait(self, timeout: float | None = 60.0) -> int:
        """Wait until `n` are here; the place in the order of arrival, 0 to `n - 1`.

        All `n` go on together, and the next to arrive begins another round.

        Raises:
            TimedOut: fewer than `n` were here within `timeout` seconds; the message says who was,
                how many were missing, and whose tasks died while they waited.
            Closed: somebody aborted the round.
        """
        limit = checked_timeout(timeout)
        return int(self._connection.call(m.Arrive(self.key, limit), timeout=limit).content)

    @lasting
    @limited
    def abort(self, *, timeout: float | None = 60.0) -> None:
        """End the waits of those who have arrived with `Closed`; the next begins another round.

        Raises:
            Disconnected: the server said nothing within `timeout` seconds.
        """
        self._connection.call(m.AbortBarrier(self.key))

    def _made_at(self, line: Connection, timeout: float | None) -> None:
        line.call(m.DefineBarrier(self.key, self.n, 0.0))
