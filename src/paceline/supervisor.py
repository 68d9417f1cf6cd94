"""Who initialises, who waits, when to stop, and what is saved: a training process's frame."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

from paceline import checkpoints
from paceline.checkpoints import CheckpointError
from paceline.connection import Connection
from paceline.core.clock import checked_timeout
from paceline.core.cluster_state import CHIEFS
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    SchemaError,
    TimedOut,
    WorkerFailed,
    WouldBlock,
)
from paceline.core.names import parts, text, those
from paceline.core.numbers import whole
from paceline.counters import Counter
from paceline.disk import checked_folder
from paceline.pending import within
from paceline.reach import Waiting
from paceline.restoring import PROBE, Restoring
from paceline.session import FAILURE, Session

_log = logging.getLogger("paceline")

Init: TypeAlias = Callable[[Session], object] | Mapping[str, Any]

GOODBYES = 30.0
"""Seconds that the chief waits for the others to leave, before it saves."""

LOOK = 0.05
TICK = 1.0
"""Seconds between two looks at the servers."""


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
        if not isinstance(session, Session):
            raise SchemaError(f"Supervisor: the first argument is a session, not {session!r:.80}")
        if is_chief is not None and not isinstance(is_chief, bool):
            raise SchemaError(f"is_chief: True, False or None, not {is_chief!r:.80}")
        self.session = session
        self.is_chief = _is_chief(session) if is_chief is None else is_chief
        self._step: Counter | None = None
        self.restored: checkpoints.Checkpoint | None = None
        """What the chief found on entering."""
        self._restoring = Restoring(session, _checked(init))
        self._folder = None if checkpoint is None else checked_folder(checkpoint)
        self._every = checked_timeout(save_every, "save_every")
        self._keep = whole(keep, "keep")
        self._steps = None if steps is None else whole(steps, "steps")
        self._name = text(step, "step")
        self._timeout = checked_timeout(timeout)
        self._saving = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Supervisor of {self.session.task}{', the chief' if self.is_chief else ''}>"

    def __enter__(self) -> Self:
        self._restoring.container = parts(self.session.key(self._name)).container
        # It says that all is there, so it comes last.
        self._restoring.later = (self._name,)
        if not self.is_chief:
            self._step = self._waited()
            return self
        try:
            self._step = self._begun()
        except BaseException as e:
            self._stop(e)
            raise
        if self._folder is not None:
            self._thread = threading.Thread(
                target=self._tend, args=(self._folder,), name="paceline-saver", daemon=True
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
        # Who is interrupted by hand leaves; the others go on, unless that is the chief.
        leaves = isinstance(error, KeyboardInterrupt | SystemExit) and not self.is_chief
        if error is not None and not quiet and not leaves:
            self._stop(error)
        if self.is_chief:
            self._end(None if quiet else error)
        return quiet

    # While it trains

    @property
    def step(self) -> Counter:
        """The counter of global steps.

        Raises:
            SchemaError: the block has not been entered.
        """
        if self._step is None:
            raise SchemaError(
                "the global step is there within the block, with Supervisor(...) as sv:"
            )
        return self._step

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
        """Write a checkpoint now, as `Session.save`.

        Raises:
            CheckpointError: it cannot be written, or there is no folder; what was saved stays.
        """
        if self._folder is None:
            raise CheckpointError("save: say in which folder: Supervisor(..., checkpoint=)")
        with self._saving:
            self._restoring.save(self._folder, self.step.value, self._keep)

    # Beginning

    def _begun(self) -> Counter:
        """Restore, and make what is not there yet; the counter of steps comes last."""
        found = None if self._folder is None else checkpoints.latest(self._folder)
        self.restored = found
        step: Counter | None = None
        with suppress(TimedOut, WouldBlock):
            step = within(None, self.session.counter, self._name, start=None, timeout=0.0)
        # Without it nobody has trained: what there is comes from who died before all was there.
        self._restoring.restore(found, anew=step is None)
        if step is not None:
            return step
        return self.session.counter(self._name, start=0 if found is None else found.manifest.step)

    def _waited(self) -> Counter:
        task, name = self.session.task, self._name
        what = f"{task} waits for the chief to initialise: it makes '{name}'"
        said: PacelineError
        try:
            return Waiting(what, f"{task}: the chief has initialised").having(
                lambda timeout: self.session.counter(name, start=None, timeout=timeout),
                self._timeout,
                lambda _: self._missing(),
            )
        except TimedOut as e:
            said = TimedOut(f"{what}; {within(0.0, self._missing)}: {e}")
        except Closed as e:
            said = type(e)(f"{what}: {e}")
        # It is of no interest where that was.
        raise said

    def _missing(self) -> str:
        members = self.session.resources()["members"]
        chiefs = [name for name in members if name.partition(":")[0] in CHIEFS]
        return f"{those(chiefs)} here" if chiefs else f"no chief is here: {members}"

    # Ending

    def _end(self, error: BaseException | None) -> None:
        """What the chief does last. An error of its own is raised after this as it is."""
        stopped = None
        saves = error is None or isinstance(error, KeyboardInterrupt | SystemExit)
        try:
            if error is None:
                stopped = self.session.stopped()
                reason = f"{self.session.task} has ended its training"
                self.session.request_stop(reason, final=True)
                self._goodbyes()
            if self._folder is not None and saves:
                self.save()
        except PacelineError as e:
            if stopped is None or not stopped.failed:
                raise
            # That is why, and what followed from it.
            raise WorkerFailed(f"{stopped.reason}; nothing was saved: {e}") from e
        if error is None:
            self._raise()
            if stopped is not None and stopped.failed:
                raise WorkerFailed(stopped.reason)

    def _goodbyes(self) -> None:
        """Wait until the other tasks of the cluster have left."""
        deadline = time.monotonic() + GOODBYES
        while time.monotonic() < deadline:
            present = self.session.resources()["present"]
            others = [task for task in present if task != self.session.task]
            if not others:
                return
            time.sleep(LOOK)
        _log.warning("%s saves although others are still here: %s", self.session.task, others)

    def _asked_to_stop(self) -> bool:
        try:
            return self.session.should_stop()
        except Closed:
            # Its servers have ended, and have said that all is done.
            return True
        except PacelineError:
            return False

    def _stop(self, error: BaseException) -> None:
        said = f"{self.session.task} failed: {type(error).__name__}: {error}"[:FAILURE]
        with suppress(PacelineError):
            self.session.request_stop(said, failed=True)

    # Saving

    def _tend(self, folder: str | os.PathLike[str]) -> None:
        """What the chief's thread does: save, and bring back what servers that died had."""
        lines = self.session.lines
        known = lines.now(lines.tasks)
        saved = time.monotonic()
        while not self._over.wait(TICK if self._every is None else min(TICK, self._every)):
            try:
                if known != (known := self._joined(known)):
                    self._restoring.restore(checkpoints.latest(folder))
                if self._every is not None and time.monotonic() - saved >= self._every:
                    self.save()
                    saved = time.monotonic()
            except (Closed, Disconnected):
                if self._over.is_set() or self._asked_to_stop():
                    return
            except TimedOut as e:
                _log.warning("%s: %s", self.session.task, e)
            except BaseException as e:
                self._error = e
                return

    def _joined(self, known: Mapping[str, Connection]) -> dict[str, Connection]:
        """The lines to the servers, those started again too."""
        lines = self.session.lines
        for task, line in known.items():
            if not line.alive():
                with suppress(TimedOut, Disconnected):
                    lines.line(task, PROBE)
        return lines.now(known)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _is_chief(session: Session) -> bool:
    return session.task.partition(":")[0] in CHIEFS or not session.connection.address.startswith(
        ("unix:", "tcp:")
    )


def _checked(init: Init | None) -> Init | None:
    if init is None or isinstance(init, Mapping):
        return init
    try:
        inspect.signature(init).bind(None)
    except (TypeError, ValueError) as e:
        raise SchemaError(
            f"init: a dict of values by the names of their variables, or a function of the session,"
            f" not {init!r:.80}: {e}"
        ) from e
    return init
