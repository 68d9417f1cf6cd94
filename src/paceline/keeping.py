"""A launched cluster's checkpoints: what it begins with, and what it saves as it goes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import checkpoints, disk
from paceline.checkpoints import Checkpoint, CheckpointError
from paceline.core.clock import checked_timeout
from paceline.core.errors import Closed, PacelineError
from paceline.core.numbers import whole
from paceline.disk import checked_folder
from paceline.restoring import Restoring
from paceline.session import Session

_log = logging.getLogger("paceline")

TICK = 1.0
"""Seconds between two looks at whether there is something to save."""

SOON = ("variable", "reader", "accumulator")
"""Kinds of what is lost with a server, unless a checkpoint has it."""

LAUNCHES = "launches"
"""The file that counts the launches: a run that is resumed has other seeds than before."""


class Keeper:
    """Saves what a cluster shares into a folder, and brings it back.

    What is saved are all containers: every `every` seconds, within `TICK` once there is another
    thing of the kinds `SOON` than in the last checkpoint, and when `save` is called. `launch` is
    how often a cluster was launched with this folder before.

    Raises:
        SchemaError: that is no folder, or a number is out of bounds.
        CheckpointError: there are checkpoints and none of them is good.
    """

    def __init__(self, folder: str | os.PathLike[str], every: float | None, keep: int) -> None:
        self._every = checked_timeout(every, "save_every")
        self._keep = whole(keep, "keep")
        self.folder = Path(checked_folder(folder)).absolute()
        self.restored: Checkpoint | None = checkpoints.latest(self.folder)
        self.launch = _launched(self.folder)
        self._steps: Callable[[], int] = lambda: 0
        self._restoring: Restoring | None = None
        self._session: Session | None = None
        self._saving = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._saved: set[tuple[str, str, str]] = set()
        self._at = time.monotonic()

    @property
    def least_epoch(self) -> int:
        """An epoch above all those that the folder and the checkpoint know of."""
        known = set() if self.restored is None else self.restored.manifest.epochs
        return max([disk.last_epoch(self.folder), *known]) + 1

    @property
    def step(self) -> int:
        """The step of the checkpoint that this begins with."""
        return 0 if self.restored is None else self.restored.manifest.step

    def restore(self, session: Session) -> None:
        """Make what the newest checkpoint has, on servers that have nothing yet.

        Raises:
            CheckpointError: it is not what it was when it was found.
        """
        self._session, self._restoring = session, Restoring(session)
        found = self.restored
        if found is None:
            return
        self._restoring.restore(found)
        self._saved = {
            (kind, container, name)
            for container, content in found.manifest.containers.items()
            for kind, name in content.named
        }
        _log.info("resumed from step %d, %s", self.step, found.path)

    def restore_lost(self, session: Session) -> None:
        """Bring back what servers held that were started again; the rest stays as it is.

        Raises:
            CheckpointError: it cannot be read.
        """
        found = checkpoints.latest(self.folder)
        if found is None:
            return
        try:
            Restoring(session).restore(found)
        except CheckpointError:
            # Where one alone is kept, a newer one may just have taken its place.
            found = checkpoints.latest(self.folder)
            if found is None:
                raise
            Restoring(session).restore(found)
        _log.info("brought back what was saved at step %d, %s", found.manifest.step, found.path)

    def start(self, steps: Callable[[], int], *, beside: bool) -> None:
        """Save from now on, at the step that `steps` says: in a thread, or where `look` is called.

        Neither keeps what `steps` belongs to after `close`.
        """
        self._steps = steps
        if beside:
            self._thread = threading.Thread(target=self._tend, name="paceline-saver", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Save if it is time, unless a thread sees to that."""
        if self._thread is None and not self._over.is_set():
            self._save_if_due()

    def save(self) -> Path:
        """Write a checkpoint now; its folder.

        Raises:
            CheckpointError: it cannot be written; what was saved stays.
            Closed, Disconnected: the cluster has ended.
        """
        assert self._session is not None
        assert self._restoring is not None
        with self._saving:
            began = time.monotonic()
            path, self._saved = self._restoring.save(self.folder, self._steps(), self._keep)
            self._at = began
        return path

    def close(self, *, save: bool) -> None:
        """Save no more, but now if told; raises as `save`. Idempotent."""
        if self._over.is_set():
            return
        self._over.set()
        try:
            if self._thread is not None:
                self._thread.join()
            if save and self._session is not None:
                self.save()
        finally:
            # It is a part of what it saves, which would be kept by that.
            self._steps = _ended

    def _tend(self) -> None:
        while not self._over.wait(TICK if self._every is None else min(TICK, self._every)):
            try:
                self._save_if_due()
            except CheckpointError as e:
                # The one before is still there, and the disk may have room again.
                _log.error("%s", str(e))
                self._at = time.monotonic()
            except PacelineError as e:
                # Whoever trains hears of a lost server.
                _log.debug("no checkpoint: %s", str(e))

    def _save_if_due(self) -> None:
        assert self._session is not None
        late = self._every is not None and time.monotonic() - self._at >= self._every
        if late or not self._saved.issuperset(_soon(self._session.resources())):
            self.save()


def _soon(there: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What there is that is saved soon after it was made: kinds, containers and names."""
    shared = [(each["kind"], each["container"], each["name"]) for each in there["shared"]]
    return [each for each in shared if each[0] in SOON]


def _launched(folder: Path) -> int:
    """How often a cluster was launched with that folder before; now it is once more."""
    file = folder / LAUNCHES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        count = int(file.read_text()) if file.exists() else 0
        new = folder / f".{LAUNCHES}-{os.getpid()}"
        new.write_text(f"{count + 1}\n")
        new.rename(file)
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be counted up: {e}") from e
    return count


def _ended() -> int:
    raise Closed("the cluster is closed")
