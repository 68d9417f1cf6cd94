"""What a server knows of its cluster: who belongs to it, who has come and gone, whether it is done.

A cluster is done when every task that runs no server has come and said goodbye; or, once it was
asked to stop, when none of them is there. A chief that says goodbye asks it to stop. While a chief
is there it has the last word: until it leaves, being asked to stop ends nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import Disconnected, Refused, SchemaError, UnknownName
from paceline.core.spec import Spec, Task, check_guest
from paceline.core.waiting import NOT_YET, NotYet

CHIEFS = ("chief", "master")

RESTORER = "restore"
"""The job of the session that brings back what a server held that was started again."""


class Phase(enum.Enum):
    """How far a cluster is."""

    RUNNING = "goes on"
    ENDING = "was stopped"
    DONE = "is done"


class ClusterState:
    """The tasks of a cluster, and which server is the home of which name.

    Attributes:
        spec: its tasks; without one nobody is waited for, and it is never done.
        servers: those that run servers; the first keeps the homes.
        own: the task of the server that knows all this.
        reason: why it was asked to stop; `None` if it was not.
        failed: whether it was asked to because something failed.
        final: whether nobody's wait will end well any more, but a chief's.
        homes: for each kind and name the task that has it.
        ended: for each task without a server that ended before it was done, how often it did, and
            in words how it did the last time.
    """

    def __init__(
        self, spec: Spec | None = None, servers: Sequence[Task] = (), own: Task | None = None
    ) -> None:
        self.spec = spec
        self.servers = list(servers)
        self.own = own
        self.reason: str | None = None
        self.failed = self.final = False
        self.homes: dict[tuple[str, str], str] = {}
        self.ended: dict[Task, tuple[int, str]] = {}
        self.restoring = False
        """Whether this server was started again, and its launcher brings back what it held."""
        self._acting = [task for task in spec.tasks() if task not in servers] if spec else []
        self._alive: set[Task] = set()
        self._left: set[Task] = set()
        self._by_goodbye = False

    def targets(self) -> list[tuple[str, str]]:
        """All servers and what opens a session on them, where there are several."""
        if self.spec is None or len(self.servers) < 2:
            return []
        return [(str(task), self.spec.target(*task)) for task in self.servers]

    # Members

    def admit(self, task: Task, cluster: Mapping[str, Any] | None, servers: list[str]) -> None:
        """Check who wants to join, and what cluster they believe to be in, if they say so.

        Raises:
            Refused: the message has the first difference, or the tasks that there are.
            Disconnected: nobody may join yet; the next attempt may succeed.
        """
        if self.restoring and task.job != RESTORER:
            raise Disconnected("the server was started again, and what it held is brought back")
        if self.spec is None:
            return
        if cluster is not None:
            try:
                difference = self.spec.difference(Spec(cluster))
            except SchemaError as e:
                raise Refused(f"{task} has no cluster: {e}") from None
            mine = list(map(str, self.servers))
            if difference is None and servers != mine:
                difference = f"servers are {', '.join(mine)} here, {', '.join(servers)} there"
            if difference is not None:
                who = task if task.number >= 0 else "this process"
                raise Refused(
                    f"the cluster that {who} was given is not the one of this server,"
                    f" {self.own}: {difference}; give all processes the same"
                )
        if task.job in self.spec.jobs:
            there = self.spec.task_indices(task.job)
            if task.number < 0:
                raise Refused(f"say which task of job '{task.job}' this is: index= one of {there}")
            if task.number not in there:
                raise Refused(f"no task {task} in the cluster; job '{task.job}' has {there}")
        else:
            try:
                check_guest(self.spec, task.job)
            except UnknownName as e:
                raise Refused(str(e)) from None

    def joined(self, task: Task) -> None:
        """A task is there."""
        self._alive.add(task)
        self._left.discard(task)
        if task.job in CHIEFS and self._by_goodbye:
            # It has come back in time, and goes on.
            self.reason, self._by_goodbye = None, False
            self.failed = self.final = False

    def gone(self, task: Task, *, goodbye: bool, failed: str = "") -> None:
        """A task is not there any more; without a goodbye, or if it failed, it may come back.

        A chief that failed asks the others to stop.
        """
        self._alive.discard(task)
        if goodbye and not failed:
            self._left.add(task)
        elif task in self._acting:
            how = f"has failed: {failed}" if failed else "was lost"
            self.ended[task] = self.ended.get(task, (0, ""))[0] + 1, how
        chief = self.spec is not None and task in self._acting and task.job in CHIEFS
        if goodbye and chief and self.reason is None:
            self.reason = f"{task} failed: {failed}" if failed else f"{task} has left"
            self.failed, self._by_goodbye = bool(failed), True

    def stop(self, reason: str, *, failed: bool = False, final: bool = False) -> None:
        """Ask everybody to stop; the first reason stays."""
        self.final = self.final or final
        if self.reason is None or self._by_goodbye:
            self.reason, self.failed, self._by_goodbye = reason, failed, False

    def missing(self) -> list[Task]:
        """The tasks without a server that are not there and have not said goodbye."""
        return [t for t in self._acting if t not in self._alive and t not in self._left]

    def present(self) -> list[Task]:
        """The tasks without a server that are there."""
        return [task for task in self._acting if task in self._alive]

    @property
    def phase(self) -> Phase:
        """How far the cluster is."""
        if not self._acting:
            return Phase.RUNNING
        if not self.present() and (self.reason is not None or not self.missing()):
            return Phase.DONE
        if self.reason is None or any(task.job in CHIEFS for task in self._alive):
            return Phase.RUNNING
        return Phase.ENDING

    # Homes

    def locate(self, kind: str, name: str, proposal: str) -> str | NotYet:
        """The home of a name: what the first asker proposed; without any proposal not yet.

        Raises:
            UnknownName: it is proposed to be at a task that runs no server.
        """
        found = self.homes.get((kind, name))
        if found is not None:
            return found
        if not proposal:
            return NOT_YET
        servers = list(map(str, self.servers))
        if proposal not in servers:
            raise UnknownName(f"{kind} '{name}': {proposal} runs no server; there are {servers}")
        self.homes[kind, name] = proposal
        return proposal
