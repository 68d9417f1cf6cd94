"""What containers have, into checkpoints and back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline import checkpoints, disk
from paceline.checkpoints import Checkpoint
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import SchemaError, TimedOut
from paceline.core.facts import CollectionFacts, decoded
from paceline.core.manifest import ContainerEntry, VariableEntry
from paceline.core.names import containers as named
from paceline.core.names import key, label, parts, quoted
from paceline.core.numbers import int64, whole
from paceline.core.tree import decoded as planned
from paceline.cuts import cut, told
from paceline.disk import checked_folder
from paceline.lines import Lines
from paceline.noting import COLLECTION, Bringing, contents
from paceline.pending import within

_log = logging.getLogger("paceline")

GOING_ON = ("reader", "accumulator")
"""Kinds, beside variables and counters, that come back on a server that alone was started again."""

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
    """A checkpoint that was written: its folder, and what it has, by kind, container and name."""

    path: Path
    there: set[tuple[str, str, str]]


class Restoring:
    """Saves containers; brings back what is not there of them, and has `init` make the rest.

    They are `only` these, or all. Some things are told of one `container` alone, which is that of
    who restores: what `init` makes is in it, counters of the names in `later` are made there by
    somebody else, and checkpoints that name no containers come back into it.
    """

    def __init__(
        self, session: Sharing, init: Callable[[Any], object] | Mapping[str, Any] | None = None
    ) -> None:
        self._session = session
        self._init = init
        self.container = ""
        self.only: list[str] | None = None
        self.later: Collection[str] = ()

    def save(self, folder: str | os.PathLike[str], step: int, keep: int) -> Written:
        """Write all that there is at one moment into a new checkpoint.

        Raises:
            CheckpointError: it cannot be written; those that were there still are.
            TimedOut: not all is whole, or no moment could be had, or another process writes there.
        """
        session = self._session
        with cut(session.lines.again(), self.only) as taken:
            path = checkpoints.save(
                folder,
                step,
                contents(session.lines, taken),
                pause=taken.pause,
                nbytes=sum(each.nbytes for each in taken.entries),
                keep=keep,
            )
            _log.info("%s: saved %s; requests waited %.2g s", session.task, path, taken.pause)
            named = [(each.kind, parts(each.key)) for each in taken.entries]
            return Written(path, {(kind, of.container, of.name) for kind, of in named})

    def restore(self, found: Checkpoint | None, *, anew: bool = False) -> None:
        """Bring back what is missing; `anew`: all that was saved of `container`, whatever there is.

        What queues hold, and the like, comes back into a container of which no server has been
        saved yet nor had anything restored, for then the whole cluster was started again; or
        `anew`.

        Raises:
            SchemaError: what was saved differs from what is there; the message names the leaf.
            CheckpointError: the checkpoint is not what it was.
        """
        if found is None:
            with self._session.container(self.container):
                self._initialise({})
            return
        lines = self._session.lines
        saved = self._saved(found)
        servers = told(lines.again(), list(saved))
        bringing, whole_ones = Bringing(found, _epoch(found, servers.epoch + 1)), list[_Back]()
        for container, (source, content) in saved.items():
            mine = container == self.container
            whole = (anew and mine) or (container not in servers.marked and not lines.mended)
            back = _Back(self._session, found, bringing, container, source, content)
            with self._session.container(container):
                made = back.variables(anew=anew and mine, init=self._initialise if mine else None)
                back.others(self.later if mine else (), None if whole else servers.restoring)
            if made:
                _log.info("%s: restored %s from %s", self._session.task, made, found.path)
            if whole:
                whole_ones.append(back)
        for back in whole_ones:
            with self._session.container(back.container):
                back.collections()
        for line in lines.all:
            line.call(m.Revive(self.only))

    def _saved(self, found: Checkpoint) -> dict[str, tuple[str, ContainerEntry]]:
        """What goes into which container, and under which name the checkpoint has it.

        The container of who restores is the last: `init` may use what is in the others.
        """
        there = {name: (name, content) for name, content in found.manifest.containers.items()}
        if not found.manifest.named:
            there = {self.container: there[""]}
        if self.only is not None:
            there = {name: each for name, each in there.items() if name in self.only}
        mine = there.pop(self.container, (self.container, ContainerEntry()))
        return {**there, self.container: mine}

    def _initialise(self, restored: Collection[str]) -> None:
        if callable(self._init):
            self._init(self._session)
        elif self._init is not None:
            for name, value in self._init.items():
                if name not in restored:
                    self._session.variable(name, value)


class _Back:
    """The way back of what a checkpoint has of one container, in which this thread is."""

    def __init__(
        self,
        session: Sharing,
        found: Checkpoint,
        bringing: Bringing,
        container: str,
        source: str,
        content: ContainerEntry,
    ) -> None:
        self._session = session
        self._found = found
        self._bringing = bringing
        self.container = container
        self._source = source
        self._content = content

    def variables(self, *, anew: bool, init: Callable[[Collection[str]], None] | None) -> list[str]:
        """Bring back those that are missing, or all that were saved `anew`; which they were."""
        session, saved = self._session, self._content.variables
        missing = session.uninitialized(saved)
        torn = [name for name in saved if name not in missing] if anew else self._torn(saved)
        for name in torn:
            self._assign(name)
        homes = session.resources()["homes"]
        at_home = [n for n in missing if f"variable {label(key(n, self.container))}" in homes]
        # Where it was it can be made at once: nobody sees what `init` would make first.
        self._make(at_home)
        if init is not None:
            init(set(missing))
        # What `init` has just made has the structure, and maybe the place, that is wanted.
        self._make([name for name in missing if name not in at_home])
        return [*missing, *torn]

    def others(self, later: Collection[str], restoring: list[Connection] | None) -> None:
        """Make what is no variable, if it is not there, or as it was made.

        Where others went on meanwhile, these servers alone were started again: then readers and
        accumulators that were theirs come back, without the gradients, and queues do not.
        """
        session, bringing, lines = self._session, self._bringing, self._session.lines
        for name, counter in self._content.counters.items():
            if name not in later:
                key = session.key(name)
                bringing.counter(counter, key, lines.home("counter", key))
        for entry in self._content.things:
            if entry.kind == COLLECTION:
                continue
            if restoring is not None and not (restoring and entry.kind in GOING_ON):
                continue
            key, near = session.key(entry.name), None
            if entry.near is not None:
                near = lines.home("variable", session.key(entry.near), make=False)
            home = lines.home(entry.kind, key, near=near)
            if restoring is None or home in restoring:
                bringing.thing(entry, key, home, whole=restoring is None)
        self._revive()

    def collections(self) -> None:
        """Bring what collections had on their way to where they will be opened again.

        That is beside the variables that stamp them, which may be in any container. Their names
        have no home before that: a program that has changed may choose another one.
        """
        for entry in self._content.things:
            if entry.kind == COLLECTION:
                thing = self._found.thing(entry)
                stamps = decoded(CollectionFacts, thing.facts).variable
                key, variable, home = self._session.key(entry.name), None, self._session.lines.first
                if stamps is not None:
                    variable, home = self._stamping(stamps)
                self._bringing.collection(thing, key, variable, home)
        self._revive()

    def _stamping(self, saved: str) -> tuple[str, Connection]:
        """The key that a variable has now, and the line to its home, if there is one."""
        session, of = self._session, parts(saved)
        with session.container(of.container):
            key = session.key(of.name)
            if session.uninitialized([of.name]):
                return key, session.lines.first
            return key, session.lines.home("variable", key, make=False)

    def _revive(self) -> None:
        """Let what was brought be there; what is not is told in the log."""
        session = self._session
        for (kind, name), why in self._bringing.revive().items():
            _log.info("%s: %s '%s' is not restored: %s", session.task, kind, name, why)

    def _make(self, names: Iterable[str]) -> None:
        """Make variables, or replace the first value of those that are there."""
        lines, there = self._session.lines, self._spread()
        for name in names:
            saved = self._content.variables[name]
            if saved.spread or name in there:
                self._make_spread(name)
                continue
            key = self._session.key(name)
            home = lines.home("variable", key, nbytes=_nbytes(saved))
            self._bringing.variable(self._source, name, key, home)
        for _, name in self._bringing.revive():
            self._assign(name)

    def _make_spread(self, name: str) -> None:
        """Make a variable over several servers: first the versions that have tags, in order."""
        saved = self._content.variables[name]
        made = None
        for version in (*(each.version for each in saved.kept), saved.version):
            if made is None and name in self._session.uninitialized([name]):
                made = self._session.spread(name, self._read(name, version))
            else:
                self._assign(name, version)
                made = self._session.variable(name)
            for tag in (tag for tag, tagged in saved.tags.items() if tagged == version):
                made.tag(tag)

    def _assign(self, name: str, version: int | None = None) -> None:
        try:
            self._session.variable(name).assign(self._read(name, version))
        except SchemaError as e:
            of = quoted(key(name, self.container))
            raise SchemaError(f"restore {of} from {self._found.path}: {e}") from e

    def _read(self, name: str, version: int | None) -> Any:
        return self._found.read(name, version, container=self._source)

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


def _nbytes(saved: VariableEntry) -> int:
    return sum(size for *_, size in planned(saved.layout()).places)


def _epoch(found: Checkpoint, least: int) -> int:
    """An epoch above `least`, above all that are known to the checkpoint, and to its folder."""
    known = max([least, *(each + 1 for each in found.manifest.epochs)])
    return disk.new_epoch(found.path.parent, known)


class Saving:
    """A session's way to save what the cluster has, and to bring it back."""

    def save(
        self: Sharing,
        folder: str | os.PathLike[str],
        *,
        step: int = 0,
        keep: int = 5,
        containers: str | Iterable[str] | None = None,
    ) -> Path:
        """Write what all containers have at one moment into a new checkpoint; its folder.

        The checkpoint is there whole, on the disk, or not at all; then all but the `keep` newest in
        that folder are removed. `step` is noted in it. It has variables, also those that are
        spread, with their tags, counters, queues with their items, accumulators with what they
        hold, readers and barriers; of some `containers` alone, if told. On all servers requests
        wait while these take note, for milliseconds, and what was noted is written afterwards: of
        two things that somebody did one after the other it never has the second alone.

        Raises:
            CheckpointError: it cannot be written; those that were there still are.
            TimedOut: a variable is not whole, the servers had no time for this, or another process
                is writing there.
            SchemaError: `folder` is no path, `step` or `keep` no such number, or `containers` no
                names.
        """
        root = checked_folder(folder, "save: folder")
        number, kept = int64(step, "save: step"), whole(keep, "save: keep")
        return _of(self, containers).save(root, number, kept).path

    def restore(
        self: Sharing,
        folder: str | os.PathLike[str],
        *,
        containers: str | Iterable[str] | None = None,
    ) -> Checkpoint | None:
        """Bring back from the newest good checkpoint what is missing; the checkpoint, if any.

        All comes back into the container that it was in; with `containers`, what was in these. A
        variable that has a value keeps it, unless it is spread and a server has lost its part.
        Counters come back unless they have been used; so do queues, readers, accumulators and
        barriers, but only into containers that no server has saved or restored yet: then the whole
        cluster was started again. What is brought back has versions of a new epoch.

        Raises:
            CheckpointError: there are checkpoints and none of them is good.
            SchemaError: what was saved differs from what is there; the message names the leaf. Or
                `folder` is no path, or `containers` no names.
        """
        root, restoring = checked_folder(folder, "restore: folder"), _of(self, containers)
        found = checkpoints.latest(root)
        if found is not None:
            restoring.restore(found)
        return found


def _of(session: Sharing, containers: str | Iterable[str] | None) -> Restoring:
    made = Restoring(session)
    made.only = named(containers)
    made.container = parts(session.key("variables")).container
    return made
