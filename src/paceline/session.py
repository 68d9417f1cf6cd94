"""A session: one process's line to the cluster. It finds and makes what all sessions share."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.closing import Closing
from paceline.core.errors import Disconnected, FunctionError, PacelineError, TimedOut
from paceline.resources import Resources
from paceline.server.loop import LocalServer
from paceline.transports.base import Address, Channel, transport


class Session(Resources, Closing):
    """A session on the server at `target`; without a target it is private and shares nothing.

    Any number of threads may use one session; a call that waits never holds up another thread's.

    Args:
        target: the server's address, such as `unix:/run/me/cluster`, `unix:@name` or
            `tcp:10.0.0.7:4032`.
        secret: what the cluster's processes know, and nobody else.
        job, index: the task this process is; an index of -1 takes the next free one.
        timeout: seconds to wait for the server to be there; the order of starting never matters.

    Raises:
        TimedOut: nobody listens at the target.
        Refused: the secret is another one, or a living process has that task already.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        secret: bytes = b"",
        job: str = "session",
        index: int = -1,
        timeout: float | None = 60.0,
        channel: Channel | None = None,
    ) -> None:
        limit = checked_timeout(timeout)
        token = secrets.token_bytes(16)
        join = m.Join(job, index, os.getpid(), token)
        if target is None:
            local = channel or LocalServer().connect()
            self._connection = Connection(local, transport("memory").arena(), "this process")
            joined = _joined(self._connection, join)
        else:
            self._connection, joined = _reach(Address.parse(target), secret, limit, join)
        self._connection.outlive(joined, token)
        self.task = f"{job}:{joined.index}"
        self._closed = False

    def __repr__(self) -> str:
        return f"<Session of {self.task} on {self._connection.address}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("session",)

    @property
    def connection(self) -> Connection:
        """The line that everything of this session speaks over."""
        return self._connection

    def _home(self, kind: str, name: str) -> Connection:
        return self._connection

    def resources(self) -> dict[str, Any]:
        """What is shared: variables with their versions, queues with their counters, members."""
        content: dict[str, Any] = self._connection.call(m.Resources()).content
        return content

    def handle(self, named: tuple[str, ...]) -> Any:
        """What a captured handle stands for in this session."""
        if named == ("session",):
            return self
        kind, name, *home = named
        if home and home[0] != self._connection.address:
            raise FunctionError(
                f"the {kind} '{name}' is on {home[0]}, this session on {self._connection.address}:"
                " a handle cannot be used in another cluster"
            )
        if kind == "variable":
            return self.variable(name)
        if kind == "queue":
            return self.queue(name)
        if kind == "counter":
            return self.counter(name, None)
        if kind == "barrier":
            return self.barrier(name)
        raise FunctionError(f"a {kind} cannot be used in another process than the one that made it")

    def close(self) -> None:
        """Leave the cluster and end the connection. What was shared stays. Idempotent."""
        if self._closed:
            return
        self._closed = True
        left = False
        try:
            left = self._connection.leave()
        except PacelineError:
            # It is gone, which is what was wanted.
            pass
        finally:
            self._connection.close(left=left)


def _reach(
    address: Address, secret: bytes, timeout: float | None, join: m.Join
) -> tuple[Connection, m.Joined]:
    """Connect and join, and try again until there is a server or the time is up."""
    began = time.monotonic()
    pause = 0.005
    while True:
        left = None if timeout is None else began + timeout - time.monotonic()
        try:
            channel = transport(address.transport).connect(
                address.place, secret, 10.0 if left is None else max(0.1, min(10.0, left))
            )
            arena = transport(address.transport).arena()
            connection = Connection(channel, arena, str(address))
            return connection, _joined(connection, join)
        except Disconnected as e:
            if left is not None and left <= pause:
                raise _nobody(address, time.monotonic() - began, e) from e
        time.sleep(pause)
        pause = min(0.25, pause * 1.5)


def _joined(connection: Connection, join: m.Join) -> m.Joined:
    try:
        return connection.call(join)
    except BaseException:
        connection.close()
        raise


def _nobody(address: Address, waited: float, error: PacelineError) -> PacelineError:
    return TimedOut(
        f"open a session on {address}, after {waited:.1f} s: {error}; starting the server there"
        " ends the wait"
    )
