"""Who initialises, who waits, when to stop, and what is saved: a training process's frame."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from paceline import checkpoints
from paceline.checkpoints import CheckpointError
from paceline.core.clock import checked_timeout, left
from paceline.core.cluster_state import CHIEFS
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    TimedOut,
    WorkerFailed,
    WouldBlock,
)
from paceline.core.names import parts, text
from paceline.core.numbers import whole
from paceline.counters import Counter
from paceline.session import FAILURE, Session

_log = logging.getLogger("paceline")

SAY_AFTER = 3.0
"""Seconds after which it is said what a process waits for."""

GOODBYES = 30.0
"""Seconds that the chief waits for the others to leave, before it saves."""

LOOK = 0.05

Init = Callable[[Session], object] | Mapping[str, Any]


class Supervisor:
    """A `with` block around a process's training loop.

    On entering, the chief restores the newest checkpoint, or initialises; the others wait for it. A
    variable that has a value keeps it, so a chief that was started again goes on with what lives.
    An error that ends the block of one process stops the others: theirs end quietly, the chief's
    with `WorkerFailed`, and the error itself is raised where it happened. At the end the chief
    waits until the others have closed their sessions, and saves last.

    Args:
        session: this process's. It stays open.
        is_chief: who initialises and saves; by default the job `chief` or `master`, and whoever has
            a private session.
        init: makes what the checkpoint did not have: a function of the session, or values by the
            names of their variables. It is called by the chief alone.
        checkpoint: the folder of the checkpoints, on the chief's machine; without one nothing is
            saved.
        save_every: seconds from one checkpoint to the next; `None` saves at the end alone.
        keep: how many checkpoints stay.
        steps: the global step at which all stop; `None` for no limit.
        step: the name of the counter of global steps, which is made when all is initialised.
        timeout: seconds to wait for the chief.

    Raises:
        TimedOut: the chief has not initialised in time; the message says whom this waited for.
        CheckpointError: there are checkpoints and none of them is good.
        SchemaError: what was restored differs from what is there; the message names the leaf.
    """

    def __init__(
        self,
        session: Session,
        *,
        is_chief: bool | None = None,
        init: Init | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: float | None = 600.0,
        keep: int = 5,
        steps: int | None = None,
        step: str = "global_step",
        timeout: float | None = 60.0,
    ) -> None:
        self.session = session
        self.is_chief = _is_chief(session) if is_chief is None else is_chief
        self.step: Counter
        """The global step, once the block is entered."""
        self.restored: checkpoints.Checkpoint | None = None
        """What the chief found on entering."""
        self._init = init
        self._folder = checkpoint
        self._every = checked_timeout(save_every, "save_every")
        self._keep = whole(keep, "keep")
        self._steps = None if steps is None else whole(steps, "steps")
        self._name = text(step, "step")
        self._timeout = checked_timeout(timeout)
        self._saving = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._container = ""

    def __repr__(self) -> str:
        return f"<Supervisor of {self.session.task}{', the chief' if self.is_chief else ''}>"

    def __enter__(self) -> Self:
        self._container = parts(self.session.key(self._name)).container
        if not self.is_chief:
            self.step = self._waited()
            return self
        try:
            self.step = self._begun()
        except BaseException as e:
            self._stop(e)
            raise
        if self._folder is not None and self._every is not None:
            self._thread = threading.Thread(
                target=self._save_on, args=(self._every,), name="paceline-saver", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        quiet = isinstance(error, Closed | Disconnected) and self._asked_to_stop()
        if error is not None and not quiet:
            self._stop(error)
        if self.is_chief:
            self._end(None if quiet else error)
        return quiet

    # While it trains

    def should_stop(self) -> bool:
        """Whether to leave the loop: all were asked to stop, the chief has left, or the limit of
        steps is reached.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        self._raise()
        if self.session.should_stop():
            return True
        return self._steps is not None and self.step.value >= self._steps

    def request_stop(self, reason: str = "") -> None:
        """Ask all processes to stop, for a reason that they can read."""
        self.session.request_stop(reason)

    def loop(self) -> Iterator[int]:
        """Global steps, from 1 on: each number once, whoever takes it, until it is time to stop.

        With a limit there are exactly as many. A number that a process took counts, although it may
        die before it has done its work.
        """
        while not self.should_stop():
            number = self.step.add()
            if self._steps is not None and number > self._steps:
                self.step.add(-1)
                return
            yield number

    def save(self) -> None:
        """Write a checkpoint now: of every variable of the session's container one version.

        Each variable's is whole; together they are no cut of one moment.

        Raises:
            CheckpointError: it cannot be written, or there is no folder; what was saved stays.
        """
        if self._folder is None:
            raise CheckpointError("save: say in which folder: Supervisor(..., checkpoint=)")
        with self._saving, self.session.container(self._container):
            step = self.step.value
            saved = {}
            for name in self._variables():
                variable = self.session.variable(name, timeout=0.0)
                found = variable.read()
                bound = variable.memory()["bound"]
                saved[name] = checkpoints.Saved(found.version, found.tree, bound)
            checkpoints.save(self._folder, step, saved, keep=self._keep)

    # Beginning

    def _begun(self) -> Counter:
        """Restore, and make what is not there yet; the counter of steps comes last."""
        session = self.session
        found = None if self._folder is None else checkpoints.latest(self._folder)
        self.restored = found
        saved = {} if found is None else found.manifest.variables
        missing = session.uninitialized(saved)
        if callable(self._init):
            self._init(session)
        elif self._init is not None:
            for name, value in self._init.items():
                if name not in missing:
                    session.variable(name, value)
        made = [name for name in missing if name not in session.uninitialized(missing)]
        for name in missing:
            # What `init` has just made has the structure, and maybe the place, that is wanted.
            assert found is not None
            if name in made:
                session.variable(name).assign(found.read(name))
            else:
                session.variable(name, found.read(name), memory=saved[name].bound)
        if found is not None and missing:
            _log.info("%s: restored %s from %s", session.task, sorted(missing), found.path)
        try:
            return session.counter(self._name, start=None, timeout=0.0)
        except (TimedOut, WouldBlock):
            return session.counter(self._name, start=0 if found is None else found.manifest.step)

    def _waited(self) -> Counter:
        began = time.monotonic()
        wait = left(self._timeout, began)
        first = SAY_AFTER if wait is None else min(SAY_AFTER, wait)
        what = f"{self.session.task} waits for the chief to initialise: it makes '{self._name}'"
        try:
            return self.session.counter(self._name, start=None, timeout=first)
        except TimedOut:
            _log.warning("%s; %s", what, self._missing())
        try:
            wait = left(self._timeout, began)
            return self.session.counter(self._name, start=None, timeout=wait)
        except TimedOut as e:
            raise TimedOut(f"{what}; {self._missing()}: {e}") from e

    def _missing(self) -> str:
        members = self.session.resources()["members"]
        chiefs = [name for name in members if name.partition(":")[0] in CHIEFS]
        return f"{', '.join(chiefs)} is here" if chiefs else f"no chief is here: {members}"

    # Ending

    def _end(self, error: BaseException | None) -> None:
        """What the chief does last. An error of its own is raised after this as it is."""
        stopped = None
        if error is None:
            stopped = self.session.stopped()
            reason = f"{self.session.task} has ended its training"
            self.session.request_stop(reason, final=True)
            self._goodbyes()
        saves = error is None or isinstance(error, KeyboardInterrupt | SystemExit)
        if self._folder is not None and saves:
            self.save()
        if error is None:
            self._raise()
            if stopped is not None and stopped.failed:
                raise WorkerFailed(stopped.reason)

    def _goodbyes(self) -> None:
        """Wait until the other tasks of the cluster have left."""
        deadline = time.monotonic() + GOODBYES
        while time.monotonic() < deadline:
            members = self.session.resources()["members"]
            others = [name for name in members if not self._is_guest(name)]
            if not others:
                return
            time.sleep(LOOK)
        _log.warning("%s saves although others are still here: %s", self.session.task, others)

    def _is_guest(self, member: str) -> bool:
        """Whether it is not waited for: this process, or a session that is no task's."""
        job = member.partition(":")[0]
        return member == self.session.task or job in ("session", "reset", "look")

    def _asked_to_stop(self) -> bool:
        try:
            return self.session.should_stop()
        except PacelineError:
            # Its servers have ended.
            return True

    def _stop(self, error: BaseException) -> None:
        said = f"{self.session.task} failed: {type(error).__name__}: {error}"[:FAILURE]
        with suppress(PacelineError):
            self.session.request_stop(said, failed=True)

    # Saving

    def _save_on(self, every: float) -> None:
        """What the saver's thread does."""
        while not self._over.wait(every):
            try:
                self.save()
            except (Closed, Disconnected):
                return
            except BaseException as e:
                self._error = e
                return

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _variables(self) -> list[str]:
        return [
            each["name"]
            for each in self.session.resources()["shared"]
            if each["kind"] == "variable" and each["container"] == self._container
        ]


def _is_chief(session: Session) -> bool:
    return session.task.partition(":")[0] in CHIEFS or not session.connection.address.startswith(
        ("unix:", "tcp:")
    )
