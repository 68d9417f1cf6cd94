"""A session: one process's line to the cluster. It finds and makes what all sessions share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Self

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout, left
from paceline.core.closing import Closing
from paceline.core.errors import Closed, FunctionError, PacelineError, TimedOut
from paceline.core.names import checked_container, key, label, parts, quoted, words
from paceline.core.names import containers as named_containers
from paceline.core.spec import Spec
from paceline.handles import PATIENCE
from paceline.lines import Lines
from paceline.lookout import Lookout
from paceline.mirrors import Mirror
from paceline.operations import Offer, Operations
from paceline.pending import limited
from paceline.placement import Setter
from paceline.reach import guest, member, reached, reached_all
from paceline.replicas import Replicas
from paceline.resources import Resources
from paceline.restoring import Saving
from paceline.server.local import LocalServer
from paceline.spec import ClusterSpec
from paceline.transports.base import Channel, transport
from paceline.transports.tls import Tls

FAILURE = 2000
"""Characters of an error that others are told of."""


class Stopped(NamedTuple):
    """Why a cluster was asked to stop, and whether that was an error of somebody's."""

    reason: str
    failed: bool


class Session(Resources, Replicas, Operations, Saving, Closing):
    """A session on a cluster's servers; without a target it is private and shares nothing.

    Any number of threads may use one session; a call that waits never holds up another thread's.

    Where a cluster has several servers, each name has one home: the server that its first maker
    proposed (`device`), the first of all by default. Every session finds it there. To every server
    the session says who it is, and goodbye.

    Args:
        target: a spec; or the address of one server, such as `unix:/run/me/cluster`, `unix:@name`
            or `tcp:10.0.0.7:4032`, which knows the others.
        secret: what the cluster's processes know, and nobody else.
        secret_file: a file of mode 0600 that has it. Without both it is in the file that
            PACELINE_SECRET_FILE names or, where only this host can reach the servers, in the user's
            own, ~/.paceline/secret, which a spec's first process makes.
        tls: the certificate files that what goes over TCP is encrypted with; by default those that
            the spec's file names, or the environment; without any nothing is encrypted.
        job, index: the task this process is; by default what the spec's file or the environment
            said. A session whose job is not in the spec is a guest, whom nobody waits for: without
            a job it is `session`. An index of -1 takes the next free one of such a job.
        servers: which jobs or tasks of the spec run servers, if the spec does not say it.
        container: what it finds and makes is in that container, and shares nothing with the same
            names in others.
        timeout: seconds to wait for the servers to be there; the order of starting never matters.

    Attributes:
        task: which task it is, such as `worker:0`.
        spec: the tasks of the cluster, where it was opened on a spec.

    Raises:
        TimedOut: a server is not there; the message says which.
        Refused: the secret or the spec is another one than the server's, or a living process has
            that task already; or the server's cluster has a job of nearly that name.
        UnknownName: there is no such task in the spec, or it has a job of nearly that name.
    """

    @limited
    def __init__(
        self,
        target: str | Spec | Mapping[str, Any] | None = None,
        *,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        tls: Tls | None = None,
        job: str | None = None,
        index: int | None = None,
        servers: Sequence[str] | None = None,
        container: str = "",
        timeout: float | None = 60.0,
        channel: Channel | None = None,
    ) -> None:
        limit = checked_timeout(timeout)
        container = checked_container(container)
        self.spec: ClusterSpec | None = None
        if target is None or isinstance(target, str):
            joining = guest(target, job, index, secret, secret_file, tls)
        if target is None:
            local = channel
            if local is None:
                server = LocalServer()
                local = server.connect()
                self._offer = Offer(server, "this process", lambda: self)
            self._lines = Lines(Connection(local, transport("memory").arena(), "this process"))
            joined = joining.join(self._lines.first, b"")
        elif isinstance(target, str):
            self._lines, joined = reached(target, joining, limit)
        else:
            self.spec = spec = ClusterSpec(target, servers=servers)
            joining, targets = member(spec, job, index, servers, secret, secret_file, tls)
            self._lines, joined = reached_all(targets, joining, limit)
        self._lines.container = container
        self.task = f"{joining.job}:{joined.index}"
        self._lookout = None if self.spec is None else Lookout(self._lines, self.task)
        addresses = [line.address for line in self._lines.all]
        self._mirror = Mirror(joining.secret, addresses, self.task, self._lines.conduct)
        self._closed = False
        self._failure = ""

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """A session of this process's task on the cluster that the environment tells of.

        The environment is that of `paceline run`, TF_CONFIG or Slurm; options are those of
        `Session`. Raises what `ClusterSpec.from_environment` and `Session` raise.
        """
        return cls(ClusterSpec.from_environment(), **options)

    def __repr__(self) -> str:
        return f"<Session of {self.task} on {self.connection.address}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("session",)

    @property
    def connection(self) -> Connection:
        """The line to the first server."""
        return self._lines.first

    @property
    def lines(self) -> Lines:
        """Its lines to all servers."""
        return self._lines

    def servers(self) -> list[str]:
        """The tasks that run servers, the first of them first.

        None for a private session, nor for one on the address of a server that is the only one.
        """
        return self._lines.tasks

    def mirror(self) -> dict[str, Any] | None:
        """Where the mirror is through which this session reads; `None` while there is none.

        It has the address (`at`), and how many `copies` and `bytes` were had from it.
        """
        return self._mirror.told()

    @contextmanager
    def device(self, task: str | Setter | None) -> Iterator[None]:
        """Propose a server as home of what this thread makes in the block.

        That is a task, such as `ps:1` or `/job:ps/task:1`; or a function of the kind, the name and
        the bytes of what is made that returns one, such as `replica_device_setter` makes; or `None`
        for the first server. A block inside another takes its place. What has a home already stays
        there.

        Raises:
            SchemaError: it is not written in one of these two ways.
            UnknownName: no server of the cluster is that task; the message lists those there are.
                What a function returns is checked when something is made.
        """
        chosen = task
        if task is not None and not callable(task):
            chosen = self._lines.server(task)
        with self._lines.proposing(chosen):
            yield

    @contextmanager
    def container(self, name: str) -> Iterator[None]:
        """Find and make in that container what this thread finds and makes in the block.

        The default one is `""`. Handles stay in the container where they were found.

        Raises:
            SchemaError: that is no name.
        """
        with self._lines.inside(checked_container(name)):
            yield

    def reset(self, containers: str | Iterable[str] | None = None) -> int:
        """Remove all that is in a container, or in several, on every server; `None` for all.

        Returns how many things there were. A container is there as soon as somebody names it, so
        one in which nothing was ever made is no error, and 0.

        Who waits for something in it, and whoever uses a handle from before, gets `WasReset`, which
        says who did it: a handle never reaches what is made anew under its name. Other containers
        are left alone. On each server it is one step. What is made in the container once this has
        returned is new, and its versions are above all those before.

        Raises:
            SchemaError: one of them is no container's name.
            Disconnected: a server is gone. The others may not have been reached: there, what was
                made before goes as soon as something in the container is asked for.
        """
        names = named_containers(containers)
        number, removed = None, 0
        for line in self._lines.again():
            # The first one counts the resets.
            number, there = line.call(m.Reset(names, number)).content
            removed += there
        return removed

    def resources(self) -> dict[str, Any]:
        """What is shared: variables with their versions, queues with their counters, members.

        What is in a container is listed as `name in container 'x'`. `shared` is a list of all that
        was made, in the order of making on each server: each with its `kind`, `name`, `container`,
        `where` it is (a task, or an address), `by` whom it was made, and the seconds since (`age`);
        and of a variable that is spread, the tasks that have `parts` of it. `ended` has the tasks
        that failed or were lost before they were done: how often, and how the last time.
        """
        content: dict[str, Any] = {}
        for line, shown in self._lines.asked(m.Resources()):
            for kind, found in shown.items():
                if kind == "operations" and self._lines.task(line):
                    # Each server may have one of that name.
                    there = self._lines.task(line)
                    found = {f"{name} on {there}": each for name, each in found.items()}
                if isinstance(found, dict):
                    content.setdefault(kind, {}).update(found)
                elif kind == "shared":
                    there = self._lines.task(line) or line.address
                    content.setdefault(kind, []).extend(_made(there, *each) for each in found)
                else:
                    content[kind] = list(dict.fromkeys([*content.get(kind, []), *found]))
        for each in content["shared"]:
            label_of = label(key(each["name"], each["container"]))
            if each["kind"] == "variable" and label_of in content["spread"]:
                each["parts"] = content["spread"][label_of]
        return content

    def uninitialized(self, names: Iterable[str]) -> list[str]:
        """Those of the names whose variables nobody has given a value yet."""
        container, _ = self._lines.place
        there: set[str] = set()
        for _, shown in self._lines.asked(m.Resources()):
            there |= set(shown["variables"])
        return [name for name in names if label(key(name, container)) not in there]

    def key(self, name: str) -> str:
        """How a name in this session's container travels."""
        return self._lines.key(name, PATIENCE if self._lines.lasting else 0.0)

    @limited
    def wait_until_initialized(self, names: Iterable[str], *, timeout: float | None = 60.0) -> None:
        """Wait until each of the names is a variable that somebody has given a value.

        Raises:
            TimedOut: some are not, after `timeout` seconds; the message says which.
            WouldBlock: everything is in this thread, so nobody can.
        """
        limit = checked_timeout(timeout)
        names, began = list(names), time.monotonic()
        for name in names:
            try:
                self.variable(name, timeout=left(limit, began))
            except TimedOut as e:
                missing = self.uninitialized(names)
                raise TimedOut(f"{missing} of {names} are not initialised: {e}") from e

    def should_stop(self) -> bool:
        """Whether anybody asked the cluster to stop, or its chief has left."""
        return self.stopped() is not None

    def stopped(self) -> Stopped | None:
        """Why the cluster was asked to stop; `None` while it goes on."""
        try:
            told = self._lines.again(self._lines.tasks[:1])[0].call(m.Stopping()).content
        except Closed as e:
            if self._closed:
                raise
            # The server had the time to say that the cluster is done.
            return Stopped(str(e), False)
        return None if told is None else Stopped(*told)

    def request_stop(self, reason: str = "", *, failed: bool = False, final: bool = False) -> None:
        """Ask all sessions of the cluster to stop: `should_stop()` is true from now on.

        Servers wait for the chief, if one is there, to say goodbye, and 2 s for the others. Of
        several reasons the first counts; `failed` says that it is an error. With `final` whoever
        waits for something gets `Closed` at once, all but the chief, which may still save.
        """
        said = words(reason, "the reason of a stop")
        request, gone = m.RequestStop(said, bool(failed), bool(final)), []
        for line in self._lines.again():
            try:
                line.call(request)
            except PacelineError as e:
                gone.append(e)
        for first in gone:
            # The others have heard it.
            raise first

    def handle(self, named: tuple[str, ...]) -> Any:
        """What a captured handle stands for in this session."""
        if named == ("session",):
            return self
        kind, name, *home = named
        places = [line.address for line in self._lines.all]
        if home and home[0] not in places:
            raise FunctionError(
                f"the {kind} {quoted(name)} is on {home[0]}, this session on {', '.join(places)}:"
                " a handle cannot be used in another cluster"
            )
        finders: dict[str, Callable[[str], Any]] = {
            "variable": self.variable,
            "queue": self.queue,
            "counter": partial(self.counter, start=None),
            "barrier": self.barrier,
            "reader": self.reader,
            "accumulator": self.accumulator,
        }
        if kind not in finders:
            raise FunctionError(
                f"a {kind} cannot be used in another process than the one that made it"
            )
        known = parts(name)
        with self._lines.inside(known.container, known.generation):
            return finders[kind](known.name)

    def _failing(self, error: BaseException) -> None:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self._failure = words(f"{type(error).__name__}: {error}"[:FAILURE], "what failed")

    def close(self) -> None:
        """Leave the cluster and end the connection. What was shared stays. Idempotent.

        Where an error ended a `with` block, the cluster hears of it: the task is not done and may
        come back, and if it is the chief, the others are asked to stop.
        """
        if self._closed:
            return
        self._closed = True
        self._lines.end()
        if self._lookout is not None:
            self._lookout.join()
        self._mirror.close()
        # All goodbyes before the first end: a chief's may end its servers.
        with ExitStack() as ends:
            for line in self._lines.all:
                left = False
                with suppress(PacelineError):
                    left = line.leave(self._failure)
                ends.callback(line.close, left=left)


def reset(
    target: str | Spec | Mapping[str, Any],
    containers: str | Iterable[str] | None = None,
    *,
    secret: bytes | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    tls: Tls | None = None,
    servers: Sequence[str] | None = None,
    timeout: float | None = 60.0,
) -> int:
    """Remove all that is in these containers of a cluster, in all of them for `None`.

    Opens a session for it, with these arguments, and calls its `reset`; returns how many things
    there were, and raises as they do.
    """
    with Session(
        target,
        secret=secret,
        secret_file=secret_file,
        tls=tls,
        servers=servers,
        timeout=timeout,
        job="reset",
    ) as session:
        return session.reset(containers)


def _made(where: str, kind: str, name: str, container: str, by: str, age: float) -> dict[str, Any]:
    return {
        "kind": kind, "name": name, "container": container, "where": where, "by": by, "age": age
    }  # fmt: skip
