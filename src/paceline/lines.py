"""A session's lines to the servers of its cluster, and which of them is the home of a name."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import names
from paceline.core.account import Account
from paceline.core.clock import left
from paceline.core.errors import Closed, Disconnected, PacelineError, TimedOut, UnknownName, said_of
from paceline.core.spec import Task
from paceline.placement import Setter

R = TypeVar("R")

Anew: TypeAlias = Callable[[str, float | None, threading.Event], Connection]
"""Joins again at a task, within so many seconds or until it is given up."""

AGAIN = 0.5
"""Seconds for a server that was started again to answer one that asks all."""


class Lines:
    """A session's lines: one to each server, or a single one.

    `first` goes to the server that knows where names are at home. Where `anew` can join again at a
    task, a line whose server has ended is replaced when it is asked for by `line` or `mending`. The
    task of a single server is "".
    """

    lasting: bool = False
    """Whether a server that has ended is started again, so that handles go on."""

    def __init__(
        self,
        first: Connection,
        by_task: dict[str, Connection] | None = None,
        anew: Anew | None = None,
    ) -> None:
        self._first = first
        self._by_task = by_task or {}
        self.conduct = first.conduct
        for each in self.all:
            each.conduct = self.conduct
        for task, each in self._by_task.items():
            each.task = task
        self._anew = anew
        self.mended = False
        """Whether a server has ended and was joined again."""
        self.ending = threading.Event()
        """Set once no line is replaced any more."""
        self._why: PacelineError | None = None
        self._joining = {task: threading.Lock() for task in self._by_task or [""]}
        self.held: weakref.WeakSet[Any] = weakref.WeakSet()
        """What is made anew, as it was defined, on a server that was started again."""
        self.greet: Callable[[Connection], object] = lambda line: None
        """Says what a line is needed for, on each that has replaced another."""
        self.container = ""
        """The container of what a thread finds and makes, unless it is inside of another."""
        self._homes: dict[tuple[str, str], str] = {}
        self._generations: dict[str, int] = {}
        self.operations: dict[tuple[str, str], Connection] = {}
        """Which server has an operation, by its name and the task that was asked for."""
        self._device = threading.local()
        self._inside = threading.local()

    @property
    def first(self) -> Connection:
        """The line to the first server."""
        return next(iter(self._by_task.values()), self._first)

    @property
    def all(self) -> list[Connection]:
        """All lines, `first` the first."""
        return list(self._by_task.values()) or [self.first]

    def alive(self) -> bool:
        """Whether all servers are still there, or will be again, without asking them."""
        return self.lasting or all(line.alive() for line in self.all)

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

    def key(self, name: str, timeout: float | None = 0.0) -> str:
        """How a name travels that is found or made now.

        A reset after this ends what is done with the key.
        """
        container, generation = self.place
        if generation is None:
            generation = int(self._knows(timeout).call(m.Enter(container)).content)
            if generation != self._generations.setdefault(container, generation):
                # What there was has no homes any more.
                self._homes.clear()
                self._generations = {container: generation}
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
        began = time.monotonic()
        first = self._knows(timeout)
        if len(self._by_task) < 2:
            return first
        found = self._homes.get((kind, key))
        if found is None:
            limit = 0.0 if make else left(timeout, began)
            request = m.Locate(kind, key, proposal, limit)
            found = self._homes[kind, key] = first.call(request, timeout=limit).content
        return self.line(found, left(timeout, began))

    def now(self, tasks: Iterable[str]) -> dict[str, Connection]:
        """The lines to tasks as they are, dead or alive."""
        return {task: self._by_task[task] for task in tasks}

    def _knows(self, timeout: float | None) -> Connection:
        """The line to the server that knows where names are at home."""
        return self.line(next(iter(self._by_task), ""), timeout)

    def line(self, task: str, timeout: float | None) -> Connection:
        """The line to a task; another one if its server has ended, once there is a server again.

        Raises:
            TimedOut: there is none within `timeout` seconds.
            Refused: that server would not have this session.
        """
        found, began = self._at(task), time.monotonic()
        if not self._replaces(task) or found.alive() or found.forked:
            return found
        assert self._anew is not None
        lock = self._joining[task]
        if not lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimedOut(f"{found.where} cannot be reached; starting it ends the wait")
        try:
            if self._at(task) is not found:
                return self._at(task)
            made = self._anew(task, left(timeout, began), self.ending)
            made.conduct, made.explain, made.task = self.conduct, found.explain, task
            if self._by_task:
                self._by_task[task] = made
            else:
                self._first = made
            if self.lasting:
                made.successor = partial(self._succeed, task)
            self.mended = True
            self.operations = {
                asked: line for asked, line in self.operations.items() if line is not found
            }
            # Whoever still has it goes over, as it would not from a session that was closed.
            found.fail(Disconnected(f"the server at {found.address} was started again"))
            found.close()
            if self.ending.is_set():
                made.close()
            elif made is self.first:
                self._tell_homes(made)
            self.greet(made)
            for handle in list(self.held):
                handle._follow(found, made)
            return made
        finally:
            lock.release()

    def again(self, tasks: Iterable[str] | None = None) -> list[Connection]:
        """The lines, to all servers or to some; other ones where a server was started again.

        One that is not there keeps the line that it had.
        """
        for task in (self.tasks or [""]) if tasks is None else tasks:
            if not self._at(task).alive():
                with suppress(TimedOut, Disconnected):
                    self.line(task, AGAIN)
        return self.all

    def asked(self, request: m.Request[m.Text]) -> Iterator[tuple[Connection, Any]]:
        """What each server shows, and its line; once more where one was started again meanwhile.

        Raises:
            Disconnected: a server is not there.
        """
        for task in self.tasks or [""]:
            self.again([task])
            line = self._at(task)
            try:
                content = line.call(request).content
            except Disconnected:
                if line.alive() or line.forked or not self._replaces(task):
                    raise
                # Another thread may have heard of its end just now.
                self.again([task])
                line = self._at(task)
                content = line.call(request).content
            yield line, content

    def mending(
        self,
        attempt: Callable[[], R],
        tasks: Callable[[], Iterable[str]],
        what: str,
        timeout: float | None,
        began: float,
    ) -> R:
        """What an attempt gives; another is made when the lines to those tasks had to be replaced.

        Where none had ended, or none can be replaced, the attempt's own error is raised.

        Raises:
            TimedOut: `timeout` seconds after it `began` there is no other line; it names `what`.
        """
        while True:
            used = self.now(tasks())
            try:
                return attempt()
            except Disconnected:
                # Meanwhile they may be other tasks, and others may have replaced lines.
                pairs = [*used.items(), *self.now(tasks()).items()]
                gone = [task for task, line in pairs if not line.alive() and not line.forked]
                if not gone or self._anew is None or self.ending.is_set():
                    raise
            with said_of(what, TimedOut):
                for task in gone:
                    self.line(task, left(timeout, began))

    def last(self) -> None:
        """From now on each line has a successor, which handles go on with."""
        self.lasting = True
        for task in self.tasks or [""]:
            self._at(task).successor = partial(self._succeed, task)

    def end(self, why: PacelineError | None = None) -> None:
        """From now on no line is replaced; whoever waits for one gets what is there, or `why`."""
        self._why, self.lasting = self._why or why, False
        self.ending.set()
        if why is None:
            # They hold this, which a ring would keep beyond its end.
            for line in self.all:
                line.successor = lambda timeout: None

    def recover(self, timeout: float | None) -> bool:
        """Have all servers again that were away; whether there was one, and it is back.

        Raises:
            TimedOut: one is not there within `timeout` seconds.
        """
        began = time.monotonic()
        gone = [task for task in self.tasks or [""] if not self._at(task).alive()]
        return bool(gone) and all(self._succeed(task, left(timeout, began)) for task in gone)

    def _succeed(self, task: str, timeout: float | None) -> Connection | None:
        """The line that takes the place of one that has broken; `None` where none does."""
        with suppress(Closed):
            found = self.line(task, timeout)
            if found.alive():
                return found
        if self._why is not None:
            raise Disconnected(str(self._why))
        return None

    def _at(self, task: str) -> Connection:
        return self._by_task[task] if self._by_task else self._first

    def _replaces(self, task: str) -> bool:
        """Whether a line to that task is replaced when its server has ended."""
        return self._anew is not None and not self.ending.is_set() and bool(task or self.lasting)

    def know(self, other: Lines) -> None:
        """Bring to servers what another session, and the servers, know: homes of names, resets."""
        first, self.mended = self.first, True
        for container, generation in list(other._generations.items()):
            if generation > first.call(m.Enter(container)).content:
                first.call(m.Reset([container], generation))
        if not self._by_task:
            return
        self._homes |= dict(other._homes)
        for task, line in self._by_task.items():
            for kind, name, container, *_ in line.call(m.Resources()).content["shared"]:
                generation = int(first.call(m.Enter(container)).content)
                self._homes[kind, names.key(name, container, generation)] = task
        self._tell_homes(first)

    def _tell_homes(self, first: Connection) -> None:
        """The first server was started again: what this session knows of homes is proposed anew."""
        for (kind, key), task in list(self._homes.items()):
            self._homes[kind, key] = first.call(m.Locate(kind, key, task, 0.0)).content

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


def account(cause: str) -> Account:
    """The account of this thread's time, from now on."""
    thread = threading.get_ident()
    return Account(cause, mine=lambda: threading.get_ident() == thread)
