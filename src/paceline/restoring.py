"""What a session's container has, into checkpoints and back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline import checkpoints
from paceline.checkpoints import Checkpoint, checked_folder
from paceline.core.errors import SchemaError, TimedOut
from paceline.core.names import key, label, parts
from paceline.core.numbers import int64, whole
from paceline.core.tree import decoded
from paceline.cuts import cut, told
from paceline.lines import Lines
from paceline.noting import Bringing, Variables, counters, things
from paceline.pending import within

_log = logging.getLogger("paceline")

PROBE = 0.5
"""Seconds within which what is whole can be read."""


class Sharing(Protocol):
    """A session, as far as saving and restoring need one."""

    task: str

    @property
    def lines(self) -> Lines: ...
    def key(self, name: str) -> str: ...
    def container(self, name: str) -> AbstractContextManager[None]: ...
    def resources(self) -> dict[str, Any]: ...
    def uninitialized(self, names: Iterable[str]) -> list[str]: ...

    @property
    def variable(self) -> Callable[..., Any]: ...
    @property
    def spread(self) -> Callable[..., Any]: ...


class Written(NamedTuple):
    """A checkpoint that was written: its folder, and the variables that it has."""

    path: Path
    variables: list[str]


class Restoring:
    """Saves a container; brings back what is not there of it, and has `init` make the rest.

    Counters of the names in `later` are made by somebody else.
    """

    def __init__(
        self, session: Sharing, init: Callable[[Any], object] | Mapping[str, Any] | None = None
    ) -> None:
        self._session = session
        self._init = init
        self.container = ""
        self.later: Collection[str] = ()

    def save(self, folder: str | os.PathLike[str], step: int, keep: int) -> Written:
        """Write all that there is at one moment into a new checkpoint.

        Raises:
            CheckpointError: it cannot be written; those that were there still are.
            TimedOut: not all is whole, or no moment could be had, or another process writes there.
        """
        session = self._session
        with session.container(self.container):
            # What a reset has removed may not be gone from every server yet.
            generation = parts(session.key("variables")).generation
        with cut(session.lines.again(), self.container) as taken:
            there = [each for each in taken.entries if parts(each.key).generation >= generation]
            variables = Variables(session.lines, taken, there)
            path = checkpoints.save(
                folder,
                step,
                variables,
                counters=counters(taken, there),
                things=things(taken, there),
                pause=taken.pause,
                nbytes=variables.nbytes,
                keep=keep,
            )
            _log.info("%s: saved %s; requests waited %.2g s", session.task, path, taken.pause)
            return Written(path, list(variables))

    def restore(self, found: Checkpoint | None, *, anew: bool = False) -> None:
        """Bring back what is missing; `anew`: all that was saved, whatever there is.

        What queues hold, and the like, comes back where no server has been saved yet nor had
        anything restored, for then the whole cluster was started again; or `anew`.

        Raises:
            SchemaError: what was saved differs from what is there; the message names the leaf.
            CheckpointError: the checkpoint is not what it was.
        """
        with self._session.container(self.container):
            if found is None:
                self._initialise({})
            else:
                self._restore(found, anew=anew)

    def _restore(self, found: Checkpoint, *, anew: bool) -> None:
        session, saved = self._session, found.manifest.variables
        fresh, epoch = told(session.lines.again(), self.container)
        bringing = Bringing(found, _epoch(found, epoch + 1))
        whole = anew or (fresh and not session.lines.mended)
        missing = session.uninitialized(saved)
        torn = [name for name in saved if name not in missing] if anew else self._torn(saved)
        for name in torn:
            self._assign(found, name)
        homes = session.resources()["homes"]
        at_home = [n for n in missing if f"variable {label(key(n, self.container))}" in homes]
        # Where it was it can be made at once: nobody sees what `init` would make first.
        self._make(bringing, found, at_home)
        self._initialise(set(missing))
        # What `init` has just made has the structure, and maybe the place, that is wanted.
        self._make(bringing, found, [name for name in missing if name not in at_home])
        self._make_others(bringing, found, whole=whole)
        if missing or torn:
            _log.info("%s: restored %s from %s", session.task, [*missing, *torn], found.path)

    def _initialise(self, restored: Collection[str]) -> None:
        if callable(self._init):
            self._init(self._session)
        elif self._init is not None:
            for name, value in self._init.items():
                if name not in restored:
                    self._session.variable(name, value)

    def _make(self, bringing: Bringing, found: Checkpoint, names: Iterable[str]) -> None:
        """Make variables, or replace the first value of those that are there."""
        lines, there = self._session.lines, self._spread()
        for name in names:
            saved = found.manifest.variables[name]
            if saved.spread or name in there:
                self._make_spread(found, name)
                continue
            key = self._session.key(name)
            bringing.variable(name, key, lines.home("variable", key, nbytes=_nbytes(found, name)))
        for _, name in bringing.revive(self.container):
            self._assign(found, name)

    def _make_spread(self, found: Checkpoint, name: str) -> None:
        """Make a variable over several servers: first the versions that have tags, in order."""
        saved = found.manifest.variables[name]
        made = None
        for version in (*(each.version for each in saved.kept), saved.version):
            tree = found.read(name, version)
            if made is None and name in self._session.uninitialized([name]):
                made = self._session.spread(name, tree)
            else:
                self._assign(found, name, version)
                made = self._session.variable(name)
            for tag in (tag for tag, tagged in saved.tags.items() if tagged == version):
                made.tag(tag)

    def _make_others(self, bringing: Bringing, found: Checkpoint, *, whole: bool) -> None:
        """Make what is no variable, if it is not there, or as it was made."""
        session = self._session
        lines = session.lines
        for name in found.manifest.counters:
            if name not in self.later:
                key = session.key(name)
                bringing.counter(name, key, lines.home("counter", key))
        for entry in found.manifest.things if whole else ():
            key, near = session.key(entry.name), None
            if entry.near is not None:
                near = lines.home("variable", session.key(entry.near), make=False)
            bringing.thing(entry, key, lines.home(entry.kind, key, near=near))
        for (kind, name), why in bringing.revive(self.container).items():
            _log.info("%s: %s '%s' is not restored: %s", session.task, kind, name, why)

    def _assign(self, found: Checkpoint, name: str, version: int | None = None) -> None:
        try:
            self._session.variable(name).assign(found.read(name, version))
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
        """The variables of the container that are over several servers."""
        content = self._session.resources()
        return {
            each["name"]
            for each in content["shared"]
            if each["kind"] == "variable"
            and each["container"] == self.container
            and label(key(each["name"], self.container)) in content.get("spread", {})
        }


def _nbytes(found: Checkpoint, name: str) -> int:
    return sum(size for *_, size in decoded(found.manifest.variables[name].layout()).places)


def _epoch(found: Checkpoint, least: int) -> int:
    """An epoch above `least`, above all that are known to the checkpoint, and to its folder."""
    known = [entry.epoch for entry in found.manifest.variables.values()]
    return checkpoints.new_epoch(found.path.parent, max([least, *(each + 1 for each in known)]))


class Saving:
    """A session's way to save its container's variables, and to bring them back."""

    def save(
        self: Sharing, folder: str | os.PathLike[str], *, step: int = 0, keep: int = 5
    ) -> Path:
        """Write what this session's container has at one moment into a new checkpoint; its folder.

        The checkpoint is there whole, on the disk, or not at all; then all but the `keep` newest in
        that folder are removed. `step` is noted in it. It has variables, also those that are
        spread, with their tags, counters, queues with their items, accumulators with what they
        hold, readers and barriers. On all servers requests wait while these take note, for
        milliseconds, and what was noted is written afterwards: of two things that somebody did one
        after the other it never has the second alone.

        Raises:
            CheckpointError: it cannot be written; those that were there still are.
            TimedOut: a variable is not whole, the servers had no time for this, or another process
                is writing there.
            SchemaError: `folder` is no path, or `step` or `keep` no such number.
        """
        root = checked_folder(folder, "save: folder")
        number, kept = int64(step, "save: step"), whole(keep, "save: keep")
        return _of(self).save(root, number, kept).path

    def restore(self: Sharing, folder: str | os.PathLike[str]) -> Checkpoint | None:
        """Bring back from the newest good checkpoint what is missing; the checkpoint, if any.

        A variable that has a value keeps it, unless it is spread and a server has lost its part.
        Counters come back unless they have been used; so do queues, readers, accumulators and
        barriers, but only where no server has anything yet that was saved or restored: then the
        whole cluster was started again. What is brought back has versions of a new epoch.

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
