"""How a session reaches the servers of its cluster, and which of them is the home of a name."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import names
from paceline.core.errors import Disconnected, PacelineError, TimedOut, UnknownName
from paceline.core.spec import Task
from paceline.placement import Setter
from paceline.transports.base import Address, transport

_log = logging.getLogger("paceline")

LOOK_LIMIT = 2.0
SAY_AFTER = 3.0
"""Seconds after which it is said what a session waits for."""


@dataclass
class Joining:
    """A process that wants to be in a cluster.

    `cluster` and `servers` are what it was given, `secret` is asked for at each attempt.
    """

    job: str
    index: int
    secret: Callable[[], bytes]
    cluster: dict[str, dict[int, str]] | None = None
    servers: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """Its task, as people write it."""
        return self.job if self.index < 0 else f"{self.job}:{self.index}"

    def join(self, connection: Connection, token: bytes) -> m.Joined:
        """Become a member; the connection ends if that is refused.

        With one `token`, which is random, several attempts are the same joining.
        """
        request = m.Join(self.job, self.index, os.getpid(), token, self.cluster, self.servers)
        try:
            joined = connection.call(request)
        except BaseException:
            connection.close()
            raise
        connection.outlive(joined, token)
        return joined


class Lines:
    """A session's lines: one to each server, or a single one.

    `first` goes to the server that knows where names are at home.
    """

    def __init__(self, first: Connection, by_task: dict[str, Connection] | None = None) -> None:
        self.first = first
        self._by_task = by_task or {}
        self.container = ""
        """The container of what a thread finds and makes, unless it is inside of another."""
        self._homes: dict[tuple[str, str], Connection] = {}
        self._generations: dict[str, int] = {}
        self.operations: dict[tuple[str, str], Connection] = {}
        """Which server has an operation, by its name and the task that was asked for."""
        self._device = threading.local()
        self._inside = threading.local()

    @property
    def all(self) -> list[Connection]:
        """All lines, `first` the first."""
        return list(self._by_task.values()) or [self.first]

    @property
    def tasks(self) -> list[str]:
        """The tasks at their other ends, where there are several."""
        return list(self._by_task)

    def task(self, line: Connection) -> str | None:
        """The task at the other end of a line, where there are several servers."""
        return next((task for task, each in self._by_task.items() if each is line), None)

    def of_servers(self, task: str = "") -> list[Connection]:
        """The lines to all servers, or to the one that is `task`, if there is a choice.

        Raises:
            UnknownName: no server of the cluster is that task; the message lists those there are.
        """
        if not task or not self._by_task:
            return self.all
        if task not in self._by_task:
            raise UnknownName(f"{task} runs no server; there are {self.tasks}")
        return [self._by_task[task]]

    @property
    def device(self) -> str | Setter | None:
        """What this thread proposes as home of what it makes: a task, or who chooses one."""
        found: str | Setter | None = getattr(self._device, "task", None)
        return found

    @device.setter
    def device(self, task: str | Setter | None) -> None:
        self._device.task = task

    @contextmanager
    def proposing(self, task: str | Setter | None) -> Iterator[None]:
        """Let that be what this thread proposes within the block."""
        before, self.device = self.device, task
        try:
            yield
        finally:
            self.device = before

    def server(self, task: str) -> str:
        """The task, as people write it.

        Raises:
            SchemaError: it is no task.
            UnknownName: it runs no server of this cluster.
        """
        wanted = str(Task.parse(task))
        if self._by_task and wanted not in self._by_task:
            raise UnknownName(f"{wanted} runs no server; there are {self.tasks}")
        return wanted

    @contextmanager
    def inside(self, container: str, generation: int | None = None) -> Iterator[None]:
        """Let this thread be in that container within the block; of that generation, if told."""
        before, self._inside.place = self.place, (container, generation)
        try:
            yield
        finally:
            self._inside.place = before

    @property
    def place(self) -> tuple[str, int | None]:
        """The container that this thread is in, and its generation if that was told."""
        found: tuple[str, int | None] = getattr(self._inside, "place", (self.container, None))
        return found

    def key(self, name: str) -> str:
        """How a name travels that is found or made now.

        A reset after this ends what is done with the key.
        """
        container, generation = self.place
        if generation is None:
            generation = int(self.first.call(m.Enter(container)).content)
            if generation != self._generations.setdefault(container, generation):
                # What there was has no homes any more.
                self._homes.clear()
                self._generations.clear()
        return names.key(name, container, generation)

    def home(
        self,
        kind: str,
        key: str,
        *,
        make: bool = True,
        near: Connection | None = None,
        nbytes: int = 0,
        timeout: float | None = 0.0,
    ) -> Connection:
        """The line to the home of a key, which is chosen now if it is to be made.

        Then it is at the other end of `near`, if that is given, else where `device` wants a thing
        of that many bytes. What is not to be made is waited for, for `timeout` seconds.
        """
        proposal = self._proposal(kind, names.parts(key).name, near, nbytes) if make else ""
        if len(self._by_task) < 2:
            return self.first
        found = self._homes.get((kind, key))
        if found is None:
            limit = 0.0 if make else timeout
            request = m.Locate(kind, key, proposal, limit)
            task = self.first.call(request, timeout=limit).content
            found = self._homes[kind, key] = self._by_task[task]
        return found

    def _proposal(self, kind: str, name: str, near: Connection | None, nbytes: int) -> str:
        beside = None if near is None else self.task(near)
        if beside is not None:
            return beside
        wanted = self.device
        if callable(wanted):
            # It is asked for what has a home, too: so it counts the same in every process.
            wanted = wanted(kind, name, nbytes)
            try:
                wanted = None if wanted is None else self.server(wanted)
            except PacelineError as e:
                raise type(e)(f"device: the {kind} '{name}': {e}") from e
        return wanted or next(iter(self._by_task), "")


def reached(target: str, joining: Joining, timeout: float | None) -> tuple[Lines, m.Joined]:
    """Join at one server, and at the others of its cluster.

    Raises:
        TimedOut: one is not there in time; the message says which.
        Refused: the secret is another one, or a living process has that task already.
    """
    until = _until(timeout)
    address = Address.parse(target)
    connection, joined = _reach(address, joining, until)
    if not joined.servers:
        return Lines(connection), joined
    known = {str(address): connection}
    try:
        return Lines(*_all(joined.servers, joining, until, known)[:2]), joined
    except BaseException:
        connection.close()
        raise


def reached_all(
    servers: Iterable[tuple[str, str]], joining: Joining, timeout: float | None
) -> tuple[Lines, m.Joined]:
    """Join at all servers of a cluster, each given by its task and target; raises as `reached`."""
    first, by_task, joined = _all(servers, joining, _until(timeout), {})
    assert joined is not None
    return Lines(first, by_task), joined


def _all(
    servers: Iterable[tuple[str, str]],
    joining: Joining,
    until: float | None,
    known: dict[str, Connection],
) -> tuple[Connection, dict[str, Connection], m.Joined | None]:
    made: dict[str, Connection] = {}
    missing: dict[str, PacelineError] = {}
    first: m.Joined | None = None
    began = time.monotonic()
    try:
        for task, target in servers:
            address = Address.parse(target)
            if str(address) in known:
                made[task] = known[str(address)]
                continue
            try:
                made[task], joined = _reach(address, joining, until, task)
            except TimedOut as e:
                # The others are asked once, so that the message names all that are missing.
                missing[f"{task} at {address}"] = e
                continue
            first = first or joined
        if missing:
            raise _incomplete(joining, missing, made, time.monotonic() - began)
    except BaseException:
        for connection in made.values():
            if connection not in known.values():
                connection.close()
        raise
    return next(iter(made.values())), made, first


def _reach(
    address: Address, joining: Joining, until: float | None, server: str = ""
) -> tuple[Connection, m.Joined]:
    """Connect and join, and try again until there is a server or the time is up."""
    began = time.monotonic()
    token = secrets.token_bytes(16)
    said = False
    pause = 0.005
    while True:
        left = None if until is None else until - time.monotonic()
        try:
            channel = transport(address.transport).connect(
                address.place, joining.secret(), 10.0 if left is None else max(0.1, min(10.0, left))
            )
            arena = transport(address.transport).arena()
            connection = Connection(channel, arena, str(address))
            return connection, joining.join(connection, token)
        except Disconnected as e:
            waited = time.monotonic() - began
            if left is not None and left <= pause:
                raise _nobody(address, waited, e) from e
            if waited > SAY_AFTER and not said:
                said = True
                where = f"{server} at {address}" if server else str(address)
                _log.warning("%s waits for the server %s: %s", joining.task, where, e)
        time.sleep(pause)
        pause = min(0.25, pause * 1.5)


def look(target: str, secret: bytes) -> list[str]:
    """The members that a server knows, asked by a guest.

    Raises:
        Disconnected: nobody is there.
        Refused: its secret is another one.
    """
    address = Address.parse(target)
    channel = transport(address.transport).connect(address.place, secret, LOOK_LIMIT)
    connection = Connection(channel, transport(address.transport).arena(), str(address))
    left = False
    try:
        Joining("look", -1, lambda: secret).join(connection, b"")
        members: list[str] = connection.call(m.Resources()).content["members"]
        left = connection.leave()
        return [name for name in members if not name.startswith("look:")]
    finally:
        connection.close(left=left)


def _until(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _nobody(address: Address, waited: float, error: PacelineError) -> PacelineError:
    return TimedOut(
        f"open a session on {address}, after {waited:.1f} s: {error}; starting the server there"
        " ends the wait"
    )


def _incomplete(
    joining: Joining,
    missing: dict[str, PacelineError],
    made: dict[str, Connection],
    waited: float,
) -> PacelineError:
    there = f"; {', '.join(made)} answered" if made else ""
    causes = "; ".join(dict.fromkeys(str(e.__cause__) for e in missing.values()))
    return TimedOut(
        f"open the session of {joining.task}, after {waited:.1f} s: {' and '.join(missing)} cannot"
        f" be reached{there}: {causes}; starting what is missing ends the wait"
    )
