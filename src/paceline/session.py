"""A session: one process's line to the cluster. It finds and makes what all sessions share."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any, TypeVar, overload

import numpy as np

from paceline.connection import Connection
from paceline.connection import memory as buffer
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.closing import Closing
from paceline.core.errors import Disconnected, FunctionError, PacelineError, SchemaError, TimedOut
from paceline.core.numbers import whole
from paceline.core.tree import Array
from paceline.packing import pack
from paceline.queues import Queue
from paceline.server.loop import LocalServer
from paceline.transports.base import Address, Buffers, Channel, transport
from paceline.variables import Variable

T = TypeVar("T")

CAPACITY_BYTES = 1 << 30
_UNSET: Any = object()


class Session(Closing):
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
        self._board: Array | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Session of {self.task} on {self._connection.address}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("session",)

    @property
    def connection(self) -> Connection:
        """The line that everything of this session speaks over."""
        return self._connection

    @overload
    def variable(self, name: str, *, timeout: float | None = 60.0) -> Variable[Any]: ...

    @overload
    def variable(
        self,
        name: str,
        value: T,
        *,
        overwrite: bool = False,
        memory: int | None = None,
        timeout: float | None = 60.0,
    ) -> Variable[T]: ...

    def variable(
        self,
        name: str,
        value: Any = _UNSET,
        *,
        overwrite: bool = False,
        memory: int | None = None,
        timeout: float | None = 60.0,
    ) -> Variable[Any]:
        """The variable of that name. Whoever first gives it a value initialises it.

        A value given later is not taken, unless told to `overwrite`; its structure must agree.
        Without a value this waits until somebody has initialised the variable.

        With `memory`, the versions that are stored, and the one about to be, take that many bytes
        at most: the current version, tagged ones, and those that a reader on the server's host
        still looks at. `assign` and `assign_add` then wait until there is room. Not counted are
        what a process has copied for itself, a new tree while it waits for room, and the memory
        that a writer keeps to use it again.

        Raises:
            SchemaError: it exists with another structure or bound, the message says where they
                differ; or the bound is too small for two versions.
            TimedOut: nobody initialised it, or made room, within `timeout` seconds.
            OutOfMemory: as `Variable.assign`.
        """
        limit = checked_timeout(timeout)
        name = _named("variable", name)
        if value is _UNSET:
            if memory is not None:
                raise SchemaError(f"variable '{name}': memory={memory!r} comes with a first value")
            request = m.Await(name, limit)
            defined, buffers = self._connection.exchange(request, timeout=limit)
        else:
            defined, buffers = self._define(name, value, overwrite, memory, limit)
        board = buffer(buffers)
        if board is not None:
            self._board = board.lasting().view(np.int64)
        word = None if self._board is None else self._board[defined.word : defined.word + 1]
        return Variable(self._connection, name, word, bounded=defined.bounded)

    def _define(
        self, name: str, value: Any, overwrite: bool, bound: int | None, limit: float | None
    ) -> tuple[m.Defined, Buffers]:
        if bound is not None:
            bound = whole(bound, f"variable '{name}': memory", hint=" bytes")
        head, block = pack(self._connection.arena, value, f"variable '{name}'")
        request = m.Define(name, head, overwrite, bound, limit)
        # Only what replaces another version may have to wait for room.
        patience = limit if overwrite else 0.0
        return self._connection.exchange(request, [block], patience)

    def queue(
        self,
        name: str,
        capacity: int | None = None,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        per_producer: int | None = None,
        timeout: float | None = 60.0,
    ) -> Queue[Any]:
        """The queue of that name: made with `capacity`, or waited for without one.

        It holds at most `capacity` items and `capacity_bytes` bytes. With `per_producer`, each
        session may have at most that many items in it that were accepted and are not delivered
        yet: its next enqueue waits for a consumer, and no other session waits behind it.

        Raises:
            SchemaError: it exists with another definition; the message shows both.
            TimedOut: nobody made it within `timeout` seconds.
        """
        limit = checked_timeout(timeout)
        name = _named("queue", name)
        if capacity is None:
            found = self._connection.call(m.FindQueue(name, limit), timeout=limit).content
            return Queue(self._connection, name, *found)
        capacity = whole(capacity, f"queue '{name}': capacity")
        capacity_bytes = whole(capacity_bytes, f"queue '{name}': capacity_bytes")
        if per_producer is not None:
            per_producer = whole(per_producer, f"queue '{name}': per_producer", hint=", or None")
        self._connection.call(m.DefineQueue(name, capacity, capacity_bytes, per_producer))
        return Queue(self._connection, name, capacity, capacity_bytes, per_producer)

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


def _named(kind: str, name: Any) -> str:
    if not isinstance(name, str):
        raise SchemaError(f"the name of a {kind} is a str, not {name!r}")
    return name


def _nobody(address: Address, waited: float, error: PacelineError) -> PacelineError:
    return TimedOut(
        f"open a session on {address}, after {waited:.1f} s: {error}; starting the server there"
        " ends the wait"
    )
