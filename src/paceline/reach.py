"""How a session reaches the servers of its cluster."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from paceline import secret as secret_files
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import left
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    Refused,
    SchemaError,
    TimedOut,
)
from paceline.core.names import text
from paceline.core.numbers import int64
from paceline.core.spec import check_guest
from paceline.lines import Anew, Lines
from paceline.pending import within
from paceline.spec import ClusterSpec
from paceline.transports.base import Address, Arena, transport, ways
from paceline.transports.tls import Tls, found

T = TypeVar("T")

_log = logging.getLogger("paceline")

SAY_AFTER, SAY_AGAIN = 3.0, 10.0
"""Seconds after which it is said what a session waits for, and then again and again."""


class Waiting:
    """Says now and then in the log what a process waits for, and then that it `came`."""

    def __init__(self, what: str, came: str) -> None:
        self._what, self._came = what, came
        self._began = time.monotonic()
        self._next = self._began + SAY_AFTER
        self._said = False

    @property
    def spare(self) -> float:
        """Seconds until there is something to say."""
        return max(0.0, self._next - time.monotonic())

    def goes_on(self, why: object) -> None:
        """Say so, if it is time."""
        if not self.spare:
            self._said, self._next = True, time.monotonic() + SAY_AGAIN
            # As text: who keeps the record must not keep what an error's frames hold.
            _log.warning("%s: %s", self._what, str(why))

    def over(self) -> None:
        """Say so, if it was said what this waited for."""
        if self._said:
            _log.warning("%s, after %.0f s", self._came, time.monotonic() - self._began)

    def having(
        self,
        ask: Callable[[float | None], T],
        limit: float | None,
        why: Callable[[TimedOut], object] = str,
    ) -> T:
        """What `ask` says within `limit` seconds. It is asked again after each `TimedOut`."""
        return within(limit, self._having, ask, limit, why)

    def _having(
        self,
        ask: Callable[[float | None], T],
        limit: float | None,
        why: Callable[[TimedOut], object],
    ) -> T:
        while True:
            spare = left(limit, self._began)
            turn = self.spare if spare is None else min(self.spare, spare)
            try:
                found = ask(turn)
            except TimedOut as e:
                if turn == spare:
                    raise
                self.goes_on(why(e))
                continue
            self.over()
            return found


@dataclass
class Joining:
    """A process that wants to be in a cluster.

    `cluster` and `servers` are what it was given, `secret` is asked for at each attempt. `epochs`
    has those of the servers it has known, by address. What comes over TCP lies in its `arena`.
    """

    job: str
    index: int
    secret: Callable[[], bytes]
    cluster: dict[str, dict[int, str]] | None = None
    servers: tuple[str, ...] = ()
    tls: Tls | None = None
    arena: Arena | None = None
    epochs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job = text(self.job, "the job of a session")
        self.index = int64(self.index, "the index of a session's task")

    @property
    def task(self) -> str:
        """Its task, as people write it."""
        return self.job if self.index < 0 else f"{self.job}:{self.index}"

    def join(self, connection: Connection, token: bytes) -> m.Joined:
        """Become a member; the connection ends if that is refused.

        With one `token`, which is random, several attempts are the same joining.
        """
        request = m.Join(self.job, self.index, os.getpid(), token, self.cluster, self.servers)
        known = self.epochs.get(connection.address, -1)
        try:
            joined = connection.call(request)
            connection.outlive(joined, token)
            if joined.epoch <= known:
                # Its clock went back, or did not go on by a second.
                connection.call(m.Outlived(known))
        except BaseException:
            connection.close()
            raise
        self.epochs[connection.address] = max(joined.epoch, known + 1)
        return joined


def guest(
    target: str | None,
    job: str | None,
    index: int | None,
    secret: bytes | None,
    secret_file: str | os.PathLike[str] | None,
    tls: Tls | None,
) -> Joining:
    """Who a session is that has no spec, but the address of a server, or no target at all."""
    place = [] if target is None else [target]

    def known() -> bytes:
        if secret is None and secret_file is None:
            return secret_files.there(place)
        return secret_files.found(secret, secret_file, place, "this session")

    number = -1 if index is None else index
    return Joining(job or "session", number, known, tls=found(tls))


def member(
    spec: ClusterSpec,
    job: str | None,
    index: int | None,
    servers: Sequence[str] | None,
    secret: bytes | None,
    secret_file: str | os.PathLike[str] | None,
    tls: Tls | None,
) -> tuple[Joining, list[tuple[str, str]]]:
    """Who a session on a spec is, and the servers that it goes to.

    Raises:
        SchemaError: the spec does not say which task it is, or which servers there are.
        Refused: there is no secret, and other hosts could reach a server.
    """
    if job is None and spec.task is not None:
        job, index = spec.task.job, spec.task.number if index is None else index
    job = job or "session"
    if job in spec.jobs:
        if index is None:
            raise SchemaError(
                f"say which task of job '{job}' this is: index= one of {spec.task_indices(job)}"
            )
        spec.address(job, index)
    else:
        check_guest(spec, job)
    serving = spec.servers(servers)
    targets = [(str(task), spec.target(*task)) for task in serving]
    known = secret_files.found(
        secret, secret_file, [t for _, t in targets], f"the session of {job}"
    )
    joining = Joining(
        job,
        -1 if index is None else index,
        lambda: known,
        spec.numbered(),
        tuple(task for task, _ in targets),
        found(tls, spec.tls),
    )
    return joining, targets


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
        return Lines(connection, anew=_anew({"": target}, joining)), joined
    known = {str(address): connection}
    try:
        first, by_task, _ = _all(joined.servers, joining, until, known)
        return Lines(first, by_task, _anew(dict(joined.servers), joining)), joined
    except BaseException:
        connection.close()
        raise


def reached_all(
    servers: Iterable[tuple[str, str]], joining: Joining, timeout: float | None
) -> tuple[Lines, m.Joined]:
    """Join at all servers of a cluster, each given by its task and target; raises as `reached`."""
    targets = dict(servers)
    first, by_task, joined = _all(targets.items(), joining, _until(timeout), {})
    assert joined is not None
    return Lines(first, by_task, _anew(targets, joining)), joined


def _anew(targets: Mapping[str, str], joining: Joining) -> Anew:
    def join(task: str, timeout: float | None, given_up: threading.Event) -> Connection:
        address = Address.parse(targets[task])
        return _reach(address, joining, _until(timeout), task, given_up)[0]

    return join


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
    address: Address,
    joining: Joining,
    until: float | None,
    server: str = "",
    given_up: threading.Event | None = None,
) -> tuple[Connection, m.Joined]:
    """Connect and join, and try again until there is a server, or the time is up or it given up."""
    began = time.monotonic()
    token = secrets.token_bytes(16)
    where = f"{server} at {address}" if server else str(address)
    waiting = Waiting(
        f"{joining.task} waits for the server {where}",
        f"{joining.task}: the server {where} is there",
    )
    pause = 0.005
    while True:
        spare = None if until is None else until - time.monotonic()
        try:
            limit = 10.0 if spare is None else max(0.1, min(10.0, spare))
            connection = called(address, joining.secret(), joining.tls, limit, joining.arena)
            joined = joining.join(connection, token)
            waiting.over()
            return connection, joined
        except Disconnected as e:
            waited = time.monotonic() - began
            if given_up is not None and given_up.is_set():
                raise Closed("this session was closed") from e
            if spare is not None and spare <= pause:
                raise _nobody(address, waited, e) from e
            waiting.goes_on(e)
        if given_up is None:
            time.sleep(pause)
        else:
            given_up.wait(pause)
        pause = min(0.25, pause * 1.5)


def called(
    address: Address,
    secret: bytes,
    tls: Tls | None,
    timeout: float | None,
    arena: Arena | None = None,
) -> Connection:
    """A connection that has proved the secret, in the best way that there is."""
    *nearer, last = ways(address)
    missed = []
    for way in nearer:
        try:
            return _over(way, address, secret, tls, timeout, arena)
        except (Disconnected, Refused) as e:
            missed.append(e)
    try:
        return _over(last, address, secret, tls, timeout, arena)
    except Disconnected as e:
        raise type(e)("; ".join(map(str, [*missed, e]))) from e


def _over(
    way: Address,
    address: Address,
    secret: bytes,
    tls: Tls | None,
    timeout: float | None,
    arena: Arena | None,
) -> Connection:
    carrier = transport(way.transport)
    channel = carrier.connect(way.place, secret, timeout, **carrier.options(tls, arena))
    return Connection(channel, carrier.arena(), str(address))


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
    own = joining.task in [each.partition(" ")[0] for each in missing]
    how = (
        f"; {joining.task} is this process itself: `paceline serve` or paceline.Server serves it"
        if own
        else ""
    )
    causes = "; ".join(dict.fromkeys(str(e.__cause__) for e in missing.values()))
    return TimedOut(
        f"open the session of {joining.task}, after {waited:.1f} s: {' and '.join(missing)} cannot"
        f" be reached{there}: {causes}; starting what is missing ends the wait{how}"
    )
