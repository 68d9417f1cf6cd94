"""Checkpoints: what a cluster had, in a folder that is there whole or not at all.

A checkpoint is the folder `checkpoint-000007-step-1200`: `manifest.json`, and a safetensors file
for each version of a variable and for each other thing. The number grows with each that is written,
so the highest is the newest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from paceline._version import __version__
from paceline.core import manifest as manifests
from paceline.core.errors import PacelineError, SchemaError, TimedOut, UnknownName
from paceline.core.manifest import (
    ContainerEntry,
    CounterEntry,
    FileEntry,
    KeptEntry,
    Manifest,
    ThingEntry,
    VariableEntry,
)
from paceline.core.messages import RunHead
from paceline.core.names import key, quoted
from paceline.core.tree import Tree, build, decoded, flatten
from paceline.core.versions import epoch_of
from paceline.disk import locked, stored, synced

_log = logging.getLogger("paceline")

MANIFEST = "manifest.json"
DIGEST = "manifest.json.sha256"
"""The manifest's own digest, as `sha256sum -c` reads it. Those written before have none."""

WRITING, GOING = ".writing", ".going"
_NAME = re.compile(r"checkpoint-(\d+)-step-(-?\d+)")

_Piece: TypeAlias = tuple[RunHead, Any, bool]
"""What a file says of a piece: its head, what else is said, and whether it has a block."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, or none of those there can be used; it says why."""


@dataclass(frozen=True)
class Saved:
    """A variable as it is written: its version and tree, its bound, whether it is spread.

    `kept` are the trees of the other versions that have `tags`.
    """

    version: int
    tree: Tree
    bound: int | None = None
    spread: bool = False
    tags: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[int, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class Thing:
    """Something of another kind, as facts and pieces: of each its head, what else is said, bytes.

    What they say is known to `core.facts` and whoever noted it. `near` is the variable whose home
    is its own.
    """

    kind: str
    name: str
    facts: bytes
    heads: list[RunHead]
    about: list[Any]
    blocks: list[Any]
    near: str | None = None


@dataclass(frozen=True)
class Contents:
    """What there is in one container. Variables and things are asked for one by one."""

    variables: Mapping[str, Saved] = field(default_factory=dict)
    counters: Mapping[str, CounterEntry] = field(default_factory=dict)
    things: Iterable[Thing] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in which every file was what its manifest says when it was found."""

    path: Path
    manifest: Manifest = field(repr=False)

    def read(self, name: str, version: int | None = None, *, container: str = "") -> Tree:
        """The tree of a variable, at an older version if told; it owns its memory.

        Raises:
            UnknownName: there is no such variable in it; the message has those there are.
            CheckpointError: its file has changed since.
        """
        there = self.manifest.of(container).variables
        if name not in there:
            raise UnknownName(
                f"no variable {quoted(key(name, container))} in {self.path}; it has {sorted(there)}"
            )
        layout, of = there[name].layout(), there[name].at(version)
        with self._said_of(f"variable {quoted(key(name, container))}"):
            arrays = manifests.tensors(layout, self._content(of.file))
        return build(decoded(layout), manifests.plain_values(layout, of.values), arrays)

    def thing(self, entry: ThingEntry) -> Thing:
        """What there is of another kind; it owns its memory; raises as `read`."""
        with self._said_of(f"{entry.kind} '{entry.name}'"):
            found = manifests.blocks(self._content(entry.file))
            try:
                pieces = msgspec.msgpack.decode(found["pieces"], type=list[_Piece])
                blocks = [found[_block(n)] if has else None for n, (*_, has) in enumerate(pieces)]
                facts = found["facts"].tobytes()
            except (msgspec.MsgspecError, KeyError) as e:
                raise SchemaError(f"{entry.file} has other blocks: {e}") from e
            heads, about = [head for head, _, _ in pieces], [said for _, said, _ in pieces]
            return Thing(entry.kind, entry.name, facts, heads, about, blocks)

    def _content(self, file: str) -> Any:
        content = np.fromfile(self.path / file, np.uint8)
        if hashlib.sha256(content.data).hexdigest() != self.manifest.files[file].sha256:
            raise SchemaError(f"{file} has another content than its digest says")
        return content

    @contextmanager
    def _said_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SchemaError) as e:
            raise CheckpointError(f"{what} of {self.path}: {e}") from e


def save(
    folder: str | os.PathLike[str],
    step: int,
    contents: Mapping[str, Contents],
    *,
    pause: float = 0.0,
    nbytes: int | None = None,
    keep: int = 5,
    timeout: float = 60.0,
) -> Path:
    """Write a checkpoint of these containers, then remove all but the `keep` newest; its folder.

    Atomic: it is there whole, on the disk, or not at all. What a writer that died left is removed.
    Variables and things are asked for one by one, each when its turn comes. `nbytes` are those of
    all variables, where that is known without asking.

    Raises:
        CheckpointError: it cannot be written, the message says how much it takes; those that were
            there still are, and nothing of this one is left.
        TimedOut: for `timeout` seconds another process was writing there.
    """
    root = Path(folder)
    if nbytes is None:
        there = (each for one in contents.values() for each in one.variables.values())
        nbytes = sum(flatten(each.tree).nbytes for each in there)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root, timeout):
            return _saved(root, step, contents, pause, keep)
    except TimedOut:
        raise
    except OSError as e:
        count = sum(len(each.variables) for each in contents.values())
        raise CheckpointError(
            f"checkpoint of step {step} in {root}: {e}; its {count} variables take"
            f" {nbytes} bytes; what was there is as it was"
        ) from e


def _saved(
    root: Path,
    step: int,
    contents: Mapping[str, Contents],
    pause: float,
    keep: int,
) -> Path:
    for leftover in (*root.glob(WRITING), *root.glob(f"{GOING}-*")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    there = found(root)
    path = root / f"checkpoint-{there[-1][0] + 1 if there else 1:06d}-step-{step}"
    made = root / WRITING
    try:
        made.mkdir()
        _write(made, step, contents, pause)
        made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    synced(root)
    try:
        _thin(root, keep)
    except OSError as e:
        _log.warning("checkpoints in %s beyond the newest %d are still there: %s", root, keep, e)
    return path


def latest(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest good checkpoint; `None` where there is none at all.

    One that is damaged or unfinished is left out, with a line in the log.

    Raises:
        CheckpointError: none of those there is good; the message has each, and why.
    """
    reasons = []
    for _, path in reversed(found(Path(folder))):
        try:
            return Checkpoint(path, _checked(path))
        except (OSError, SchemaError) as e:
            reasons.append(f"{path.name}: {e}")
            _log.warning("checkpoint %s is not used: %s", path, e)
    if reasons:
        raise CheckpointError(f"no checkpoint in {folder} is good: {'; '.join(reasons)}")
    return None


def found(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, good or not, the newest last."""
    if not root.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def _write(made: Path, step: int, contents: Mapping[str, Contents], pause: float) -> None:
    files: dict[str, FileEntry] = {}
    told = Manifest(
        manifests.FORMAT, __version__, step, time.time(), files,
        {name: _written(made, content, files) for name, content in contents.items()}, pause,
    )  # fmt: skip
    entry = stored(made / MANIFEST, [msgspec.json.format(msgspec.json.encode(told))])
    stored(made / DIGEST, [f"{entry.sha256}  {MANIFEST}\n".encode()])
    synced(made)


def _written(made: Path, content: Contents, files: dict[str, FileEntry]) -> ContainerEntry:
    """Write what is in a container, and list its files."""
    entries: dict[str, VariableEntry] = {}
    things: list[ThingEntry] = []

    def write(kind: str, parts: list[Any]) -> str:
        # Names may have characters that those of files have not.
        file = f"{kind}-{len(files):04d}.safetensors"
        files[file] = stored(made / file, parts)
        return file

    def version_of(tree: Tree, version: int) -> KeptEntry:
        flat = flatten(tree)
        head, order = manifests.tensor_header(flat.layout)
        file = write("variable", [head, *(_bytes(flat.arrays[i]) for i in order)])
        return KeptEntry(version, manifests.spelled(flat.layout, flat.values), file)

    for name, saved in content.variables.items():
        structure, leaves = manifests.described(flatten(saved.tree).layout)
        of = version_of(saved.tree, saved.version)
        kept = [version_of(tree, version) for version, tree in saved.kept.items()]
        entries[name] = VariableEntry(
            saved.version, epoch_of(saved.version), saved.bound, structure, leaves,
            of.values, of.file, saved.spread, dict(saved.tags), kept,
        )  # fmt: skip
    for thing in content.things:
        file = write(thing.kind, _parts(thing))
        things.append(ThingEntry(thing.kind, thing.name, file, thing.near))
    return ContainerEntry(entries, dict(content.counters), things)


def _parts(thing: Thing) -> list[Any]:
    """What the file of a thing consists of."""
    pieces = zip(thing.heads, thing.about, thing.blocks, strict=True)
    told = msgspec.msgpack.encode([(head, about, b is not None) for head, about, b in pieces])
    parts = {"facts": thing.facts, "pieces": told}
    parts |= {_block(n): block for n, block in enumerate(thing.blocks) if block is not None}
    sizes = {name: memoryview(part).nbytes for name, part in parts.items()}
    return [manifests.blocks_header(sizes), *parts.values()]


def _block(n: int) -> str:
    return f"piece-{n:06d}"


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes else b""


def _checked(path: Path) -> Manifest:
    text = (path / MANIFEST).read_bytes()
    told = manifests.parse(text)
    if (path / DIGEST).exists():
        said = (path / DIGEST).read_bytes().split()[:1]
        if said != [hashlib.sha256(text).hexdigest().encode()]:
            raise SchemaError(f"{MANIFEST} has another content than {DIGEST} says")
    for name, entry in told.files.items():
        with (path / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                raise SchemaError(f"{name} has {size} bytes, its manifest says {entry.size}")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise SchemaError(f"{name} has another content than its digest says")
    return told


def _thin(root: Path, keep: int) -> None:
    for number, path in found(root)[:-keep]:
        # Under another name first: half of one must not look like a checkpoint.
        going = path.rename(root / f"{GOING}-{number}")
        shutil.rmtree(going)
