"""A mirror on each host where several workers are and no server, started as these are placed."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from contextlib import suppress

from paceline import mirroring
from paceline.core.budget import Budget
from paceline.core.errors import PacelineError
from paceline.engines.base import Engine, Exit, Listener, Stream, Task, TaskSpec, show
from paceline.engines.wishes import MIRROR

_log = logging.getLogger("paceline")

LEAST = 2
"""Workers of a host that make a mirror worth it."""

RESTARTS = 3
"""How often a host has another mirror within a minute."""


class Mirrors(Listener):
    """Starts and ends mirrors, all on the engine's thread.

    Without one workers read from the servers, so nobody waits for it.
    """

    def __init__(self, engine: Engine, secret: bytes) -> None:
        self.servers: tuple[tuple[str, str], ...] = ()
        """The servers, each by its task and target; no mirror is started without."""
        self._engine = engine
        self._secret = secret
        self._workers: defaultdict[str, dict[str, Task]] = defaultdict(dict)
        self._served: set[str] = set()
        self._mirrors: dict[str, Task] = {}
        self._budgets: defaultdict[str, Budget] = defaultdict(lambda: Budget(1 + RESTARTS))
        self._numbers = itertools.count()
        self._closed = False

    def close(self) -> None:
        """Start none from now on; the engine ends those that there are."""
        self._closed = True

    def placed(self, task: Task) -> None:
        """A task of the engine's is somewhere."""
        job = task.name.partition(":")[0]
        if job == "ps":
            self._served.add(task.host)
        elif job != MIRROR:
            for workers in self._workers.values():
                workers.pop(task.name, None)
            self._workers[task.host][task.name] = task
            self._look(task.host)

    def received(self, task: Task, message: object, /) -> None:
        """Readers can find it."""
        _log.info("%s is on the host of %s", task.name, ", ".join(self._workers[task.host]))

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        show(task, line, stream)

    def ended(self, task: Task, how: Exit, /) -> None:
        host = next(host for host, mirror in self._mirrors.items() if mirror is task)
        del self._mirrors[host]
        if not self._closed:
            _log.warning("%s %s: workers read from the servers", task.name, how.told)
            self._look(host)

    def _look(self, host: str) -> None:
        alive = [task for task in self._workers[host].values() if task.alive]
        lacks = self.servers and host not in self._served and host not in self._mirrors
        if self._closed or not lacks or len(alive) < LEAST:
            return
        if self._budgets[host].allow(time.monotonic()):
            name = f"{MIRROR}:{next(self._numbers)}"
            spec = TaskSpec(name, mirroring.run, node=alive[-1].node)
            with suppress(PacelineError):
                made = self._engine.start(spec, self)
                self._mirrors[host] = made
                made.send(mirroring.Setup(self.servers, self._secret))
