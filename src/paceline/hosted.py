"""A server of a cluster whose processes are started by hand."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from paceline import secret as secrets
from paceline.core.clock import checked_timeout
from paceline.core.closing import Closing
from paceline.core.cluster_state import ClusterState, Phase
from paceline.core.errors import Closed, Refused, SchemaError, TimedOut
from paceline.core.names import those
from paceline.core.numbers import whole
from paceline.core.spec import Spec, Task
from paceline.operations import Offer
from paceline.server import loop
from paceline.server.cluster_desk import ClusterDesk
from paceline.session import Session
from paceline.spec import ClusterSpec
from paceline.transports.base import Address, transport
from paceline.transports.tls import Tls, found

_log = logging.getLogger("paceline")

F = TypeVar("F", bound=Callable[..., Any])

GRACE = 2.0
"""Seconds that a stopped cluster's processes have to say goodbye."""


LOOK = 0.5
"""Seconds after which `join` looks whether it was interrupted."""


class Server(Closing):
    """Serves a task of a cluster at its address, and at no other, in a thread of this process.

    In a process that does nothing else it answers within microseconds; in one that trains it takes
    turns with the training. Every connection proves the cluster's secret.

    Args:
        cluster: the tasks and their addresses; the same in all processes.
        job_name, task_index: which of them this is; by default what the spec's file or the
            environment said; the first task of a job that has one alone.
        servers: which jobs or tasks run servers, if the spec does not say it; this is one of them.
        secret: what the cluster's processes know, and nobody else.
        secret_file: a file of mode 0600 that has it. Without both it is in the file that
            PACELINE_SECRET_FILE names or, where only this host can reach the cluster's servers, in
            the user's own, ~/.paceline/secret, which is made if there is none.
        tls: the certificate files that what goes over TCP is encrypted with; by default those that
            the spec's file names, or the environment; without any nothing is encrypted.
        max_connections: how many connections it has at once; new sessions are refused then.
        on_news: hears, a line each, who comes and goes; by default the log does.

    Raises:
        Refused: the address is in use, or other hosts can reach it and there is no secret.
        SchemaError, UnknownName: the spec is malformed, or has no such task.
    """

    def __init__(
        self,
        cluster: Spec | Mapping[str, Any],
        *,
        job_name: str | None = None,
        task_index: int | None = None,
        servers: Sequence[str] | None = None,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        tls: Tls | None = None,
        max_connections: int = loop.MAX_CONNECTIONS,
        on_news: Callable[[str], None] = _log.info,
    ) -> None:
        self.cluster = ClusterSpec(cluster)
        self.task = _task(self.cluster, job_name, task_index)
        most = whole(max_connections, "max_connections", 1)
        address = Address.parse(self.cluster.target(*self.task))
        tasks = _serving(self.cluster, self.task, servers)
        targets = [self.cluster.target(*task) for task in tasks]
        known = secrets.found(secret, secret_file, targets, f"the server {self.task}")
        if not known:
            raise Refused(f"the server {self.task} has an empty secret")
        self._tls = found(tls, self.cluster.tls)
        carrier = transport(address.transport)
        try:
            listener = carrier.listen(address.place, **carrier.options(self._tls))
        except Refused as e:
            raise _in_use(self.task, address, e) from e
        self.target = f"{address.transport}:{listener.place}"
        """What opens a session on it."""
        self._news = on_news
        self._changed = threading.Condition()
        self._phase, self._since = Phase.RUNNING, 0.0
        self._closed = False
        self._error: BaseException | None = None
        try:
            self._server = loop.Server(
                [listener], known, max_connections=most, on_note=_log.warning
            )
        except BaseException:
            listener.close()
            raise
        self._state = ClusterState(self.cluster, tasks, self.task)
        self._server.service.cluster = self._state
        desk: ClusterDesk = self._server.service.desk(ClusterDesk)
        desk.on_change = self._hear
        self._tasks, self._secret = [str(task) for task in tasks], known
        self._offer = Offer(self._server, str(self.task), self._open)
        self._thread = threading.Thread(target=self._run, name="paceline-server", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Server {self.task} at {self.target}>"

    def join(self, timeout: float | None = None) -> None:
        """Serve until the cluster is done; closing the server is the next step.

        It is done when all tasks that run no server have been there and closed their sessions. One
        that died has not: it may come back. When a chief closes its session, or one asked to stop
        (`request_stop`) and no chief is there, the others have 2 s for it: whoever waits for
        something gets `Closed`, and then it is done.

        Raises:
            TimedOut: it is not, after `timeout` seconds; the message says who is there.
        """
        limit = checked_timeout(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        with self._changed:
            while not self._closed and self._thread.is_alive():
                now = time.monotonic()
                left = None if deadline is None else deadline - now
                if self._phase is Phase.DONE:
                    break
                if self._phase is Phase.ENDING:
                    grace = self._since + GRACE - now
                    if grace <= 0:
                        break
                    left = grace if left is None else min(left, grace)
                if deadline is not None and now >= deadline:
                    raise TimedOut(f"join {self.task} after {limit} s: {self.told()}")
                # Another thread may have been given the signal of a Ctrl-C, which wakes none here.
                self._changed.wait(LOOK if left is None else min(left, LOOK))
        if self._error is not None:
            raise self._error

    def operation(
        self,
        name: str,
        *,
        threads: int | None = None,
        batch: int | None = None,
        wait: float | None = None,
    ) -> Callable[[F], F]:
        """Register a function of this process, as a decorator: `session.run(name, tree)` calls it.

        It is given the tree, whose arrays are its own and may be written, if it has a parameter for
        it; and, if it has a parameter of that name, the keyword `session`: a session of this
        process on the cluster, the same for all. It returns a tree, or what an adapter makes one
        of, such as torch's modules and tensors. It may be registered at any time.

        All operations of a server run on one thread, one at a time and in the order of arrival,
        unless they have threads of their own. Nothing else of the server waits for them. So an
        operation may use the server's variables and queues, but none that needs its own thread.

        Args:
            threads: how many threads this operation has for itself.
            batch: as many calls, of any sessions and of one structure, are made in one: arrays and
                numbers have a new leading axis, other plain values are lists. Each array that is
                returned has a row for each call; plain values are given to all. An error is every
                caller's.
            wait: the seconds, 0.002 unless told, that a batch which is not full waits for more. It
                goes at once when all living sessions that have called wait for an answer.

        Raises:
            SchemaError: there is an operation of that name, an option is out of bounds, or it is no
                function.
            Closed: the server has ended.
        """
        return self._offer.operation(name, threads=threads, batch=batch, wait=wait)

    def told(self) -> str:
        """How far the cluster is, who is there, and who is missing, in one line."""
        here, missing = those(self._state.present()), those(self._state.missing())
        return f"the cluster {self._state.phase.value}; {here} here, {missing} missing"

    def close(self) -> None:
        """End the server and every session on it. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._offer.opened is not None:
            # What operations wait for in it ends.
            self._offer.opened.close()
        if self._thread.is_alive():
            self._server.stop()
            self._thread.join()
        done = self._phase is not Phase.RUNNING
        reason = self._state.reason or "every task has left"
        self._server.close(Closed(f"the cluster is done: {reason}") if done else None)

    def _run(self) -> None:
        try:
            self._server.serve()
        except BaseException as e:
            self._error = e
        finally:
            with self._changed:
                self._changed.notify_all()

    def _open(self) -> Session:
        """The session that operations use, a guest of the cluster."""
        cluster = self.cluster if len(self._tasks) > 1 else self.target
        job, index = f"{self.task.job}.operations", self.task.number
        return Session(
            cluster, secret=self._secret, tls=self._tls, job=job, index=index,
            servers=self._tasks if len(self._tasks) > 1 else None,
        )  # fmt: skip

    def _hear(self, said: str) -> None:
        """On the server's thread."""
        if said:
            self._news(f"{self.task}: {said}; {self.told()}")
        phase = self._state.phase
        with self._changed:
            if phase is not self._phase:
                self._phase, self._since = phase, time.monotonic()
                self._changed.notify_all()


def _task(cluster: ClusterSpec, job: str | None, index: int | None) -> Task:
    if job is None and cluster.task is not None:
        job, index = cluster.task.job, cluster.task.number if index is None else index
    if job is None:
        raise SchemaError(f"say which task this is: job_name= one of {cluster.jobs}, task_index=")
    if index is None:
        there = cluster.task_indices(job)
        if len(there) > 1:
            raise SchemaError(f"say which task of job '{job}' this is: task_index= one of {there}")
        index = there[0]
    cluster.address(job, index)
    return Task(job, index)


def _serving(cluster: ClusterSpec, own: Task, servers: Sequence[str] | None) -> list[Task]:
    try:
        found = cluster.servers(servers)
    except SchemaError:
        # No job's name says that it runs servers: this one does.
        found = cluster.tasks([own.job])
    if own not in found:
        if servers is not None:
            raise SchemaError(f"{own} runs a server, but servers={[*map(str, found)]} lack it")
        raise SchemaError(
            f"{own} runs a server, and by their jobs only {[*map(str, found)]} do: tell all"
            f" processes, as servers={[*map(str, [*found, own])]}"
        )
    return found


def _in_use(task: Task, address: Address, error: Refused) -> Refused:
    text = f"{task} {error}"
    if "in use" in text:
        port = address.place.rpartition(":")[2]
        how = f"`ss -ltnp 'sport = :{port}'` says which" if address.transport == "tcp" else "end it"
        text += (
            f"; another process listens there, maybe {task} of an earlier run: {how}; or give"
            f" {task} another address in the cluster's spec"
        )
    return Refused(text)
