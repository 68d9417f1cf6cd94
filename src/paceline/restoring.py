"""The variables of a session's container, into checkpoints and back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from paceline import checkpoints
from paceline.checkpoints import Checkpoint, Saved, checked_folder
from paceline.core.errors import SchemaError, TimedOut
from paceline.core.names import key, label, parts
from paceline.core.numbers import int64, whole
from paceline.pending import within

_log = logging.getLogger("paceline")

PROBE = 0.5
"""Seconds within which what is whole can be read."""


class Sharing(Protocol):
    """A session, as far as saving and restoring need one."""

    task: str

    def key(self, name: str) -> str: ...
    def container(self, name: str) -> AbstractContextManager[None]: ...
    def resources(self) -> dict[str, Any]: ...
    def uninitialized(self, names: Iterable[str]) -> list[str]: ...

    @property
    def variable(self) -> Callable[..., Any]: ...
    @property
    def spread(self) -> Callable[..., Any]: ...


class Restoring:
    """Brings back what is not there, or not all of it, and has `init` make the rest."""

    def __init__(
        self, session: Sharing, init: Callable[[Any], object] | Mapping[str, Any] | None = None
    ) -> None:
        self._session = session
        self._init = init
        self.container = ""

    def saved(self) -> dict[str, Saved]:
        """Of every variable one version, each as it is when its turn comes."""
        found = {}
        spread = self._spread()
        with self._session.container(self.container):
            for name in self._variables():
                variable = within(None, self._session.variable, name, timeout=0.0)
                snapshot, bound = variable.read(), variable.memory()["bound"]
                found[name] = Saved(snapshot.version, snapshot.tree, bound, name in spread)
        return found

    def restore(self, found: Checkpoint | None, *, anew: bool = False) -> None:
        """Bring back what is missing; `anew`: all that was saved, whatever there is.

        Raises:
            SchemaError: what was saved differs from what is there; the message names the leaf.
            CheckpointError: the checkpoint is not what it was.
        """
        with self._session.container(self.container):
            self._restore(found, anew=anew)

    def _restore(self, found: Checkpoint | None, *, anew: bool) -> None:
        session = self._session
        saved = {} if found is None else found.manifest.variables
        missing = session.uninitialized(saved)
        torn = [name for name in saved if name not in missing] if anew else self._torn(saved)
        for name in torn:
            self._assign(found, name)
        homes = session.resources()["homes"]
        at_home = [n for n in missing if f"variable {label(key(n, self.container))}" in homes]
        for name in at_home:
            # Where it was it can be made at once: nobody sees what `init` would make first.
            self._make(found, name)
        if callable(self._init):
            self._init(session)
        elif self._init is not None:
            for name, value in self._init.items():
                if name not in missing:
                    session.variable(name, value)
        left = session.uninitialized(missing)
        for name in missing:
            if name in left:
                self._make(found, name)
            elif name not in at_home:
                # What `init` has just made has the structure, and maybe the place, that is wanted.
                self._assign(found, name)
        if found is not None and (missing or torn):
            _log.info("%s: restored %s from %s", session.task, [*missing, *torn], found.path)

    def _make(self, found: Checkpoint | None, name: str) -> None:
        assert found is not None
        saved = found.manifest.variables[name]
        if saved.spread:
            self._session.spread(name, found.read(name))
        else:
            self._session.variable(name, found.read(name), memory=saved.bound)

    def _assign(self, found: Checkpoint | None, name: str) -> None:
        assert found is not None
        try:
            self._session.variable(name).assign(found.read(name))
        except SchemaError as e:
            raise SchemaError(f"restore '{name}' from {found.path}: {e}") from e

    def _torn(self, saved: Iterable[str]) -> list[str]:
        """The spread variables of which a server that was started again has lost its part."""
        torn = []
        for name in self._spread().intersection(saved):
            try:
                variable = self._session.variable(name)
                within(None, variable.read, timeout=PROBE)
            except TimedOut:
                torn.append(name)
        return torn

    def _spread(self) -> set[str]:
        there = self._session.resources().get("spread", {})
        return {name for name in self._variables() if label(key(name, self.container)) in there}

    def _variables(self) -> list[str]:
        return [
            each["name"]
            for each in self._session.resources()["shared"]
            if each["kind"] == "variable" and each["container"] == self.container
        ]


class Saving:
    """A session's way to save its container's variables, and to bring them back."""

    def save(
        self: Sharing, folder: str | os.PathLike[str], *, step: int = 0, keep: int = 5
    ) -> Path:
        """Write every variable of this session's container into a new checkpoint; its folder.

        The checkpoint is there whole, on the disk, or not at all; then all but the `keep` newest in
        that folder are removed. `step` is noted in it. Of each variable one version is written,
        also where it is spread; together they are no cut of one moment. Tags, queues, counters,
        readers and accumulators are not in it.

        Raises:
            CheckpointError: it cannot be written; those that were there still are.
            TimedOut: a variable cannot be read whole, or another process is writing there.
            SchemaError: `folder` is no path, or `step` or `keep` no such number.
        """
        root = checked_folder(folder, "save: folder")
        number, kept = int64(step, "save: step"), whole(keep, "save: keep")
        return checkpoints.save(root, number, _of(self).saved(), keep=kept)

    def restore(self: Sharing, folder: str | os.PathLike[str]) -> Checkpoint | None:
        """Bring back from the newest good checkpoint what is missing; the checkpoint, if any.

        A variable that has a value keeps it, unless it is spread and a server has lost its part.
        What is brought back has a new version, of the epoch of the server where it is.

        Raises:
            CheckpointError: there are checkpoints and none of them is good.
            SchemaError: what was saved differs from what is there; the message names the leaf. Or
                `folder` is no path.
        """
        found = checkpoints.latest(checked_folder(folder, "restore: folder"))
        if found is not None:
            _of(self).restore(found)
        return found


def _of(session: Sharing) -> Restoring:
    made = Restoring(session)
    made.container = parts(session.key("variables")).container
    return made
