"""Checkpoints: what variables were, in a folder that is there whole or not at all.

A checkpoint is the folder `checkpoint-000007-step-1200`: `manifest.json`, and a safetensors file
for each variable. The number grows with each that is written, so the highest is the newest. Who
writes holds a lock on the file `.lock`, which ends with its process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from paceline._version import __version__
from paceline.core import manifest as manifests
from paceline.core.errors import PacelineError, SchemaError, TimedOut, Unsupported
from paceline.core.manifest import CounterEntry, FileEntry, Manifest, VariableEntry
from paceline.core.tree import Tree, build, decoded, flatten
from paceline.core.versions import epoch_of

try:
    import fcntl
except ImportError:
    # Windows has no such locks.
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("paceline")

MANIFEST = "manifest.json"
WRITING, GOING = ".writing", ".going"
_NAME = re.compile(r"checkpoint-(\d+)-step-(-?\d+)")
_PART = 4 << 20
PAUSE = 0.02


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, or none of those there can be used; it says why."""


@dataclass(frozen=True)
class Saved:
    """A variable as it is written: one version and its tree, its bound, whether it is spread."""

    version: int
    tree: Tree
    bound: int | None = None
    spread: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in which every file was what its manifest says when it was found."""

    path: Path
    manifest: Manifest = field(repr=False)

    def read(self, name: str) -> Tree:
        """The tree of a variable; it owns its memory.

        Raises:
            CheckpointError: its file has changed since.
        """
        entry = self.manifest.variables[name]
        try:
            content = np.fromfile(self.path / entry.file, np.uint8)
            if hashlib.sha256(content.data).hexdigest() != self.manifest.files[entry.file].sha256:
                raise SchemaError(f"{entry.file} has another content than its digest says")
            layout = entry.layout()
            arrays = manifests.tensors(layout, content)
        except (OSError, SchemaError) as e:
            raise CheckpointError(f"variable '{name}' of {self.path}: {e}") from e
        plan, values = decoded(layout), manifests.plain_values(entry)
        return build(plan, values, arrays)


def save(
    folder: str | os.PathLike[str],
    step: int,
    variables: Mapping[str, Saved],
    *,
    counters: Mapping[str, CounterEntry] = MappingProxyType({}),
    keep: int = 5,
    timeout: float = 60.0,
) -> Path:
    """Write a checkpoint, then remove all but the `keep` newest; its folder.

    Atomic: it is there whole, on the disk, or not at all. What a writer that died left is removed.

    Raises:
        CheckpointError: it cannot be written, the message says how much it takes; those that were
            there still are, and nothing of this one is left.
        TimedOut: for `timeout` seconds another process was writing there.
    """
    root = Path(folder)
    needed = sum(flatten(each.tree).nbytes for each in variables.values())
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root, timeout):
            return _saved(root, step, variables, counters, keep)
    except TimedOut:
        raise
    except OSError as e:
        raise CheckpointError(
            f"checkpoint of step {step} in {root}: {e}; its {len(variables)} variables take"
            f" {needed} bytes; what was there is as it was"
        ) from e


def _saved(
    root: Path,
    step: int,
    variables: Mapping[str, Saved],
    counters: Mapping[str, CounterEntry],
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
        _write(made, step, variables, counters)
        made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _synced(root)
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


def checked_folder(folder: Any, what: str = "checkpoint") -> str:
    """`folder`, if it can be the path of one.

    Raises:
        SchemaError: it cannot; the message begins with `what`.
    """
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise SchemaError(f"{what}: the path of a folder, not {folder!r:.80}")
    return path


def found(root: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, good or not, the newest last."""
    if not root.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match)


def _write(
    made: Path, step: int, variables: Mapping[str, Saved], counters: Mapping[str, CounterEntry]
) -> None:
    files: dict[str, FileEntry] = {}
    entries: dict[str, VariableEntry] = {}
    for place, (name, saved) in enumerate(variables.items()):
        file = f"variable-{place:04d}.safetensors"
        flat = flatten(saved.tree)
        head, order = manifests.tensor_header(flat.layout)
        parts = [head, *(_bytes(flat.arrays[i]) for i in order)]
        files[file] = _stored(made / file, parts)
        structure, leaves = manifests.described(flat.layout)
        entries[name] = VariableEntry(
            saved.version,
            epoch_of(saved.version),
            saved.bound,
            structure,
            leaves,
            manifests.spelled(flat.layout, flat.values),
            file,
            saved.spread,
        )
    now = time.time()
    told = Manifest(manifests.FORMAT, __version__, step, now, files, entries, dict(counters))
    _stored(made / MANIFEST, [msgspec.json.format(msgspec.json.encode(told))])
    _synced(made)


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes else b""


def _stored(path: Path, parts: list[Any]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            size += left.nbytes
            while left.nbytes:
                # A disk that is nearly full may take less than it is given.
                taken = file.write(left[:_PART]) or 0
                digest.update(left[:taken])
                left = left[taken:]
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _checked(path: Path) -> Manifest:
    told = manifests.parse((path / MANIFEST).read_bytes())
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


def _synced(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(root: Path, timeout: float) -> Iterator[None]:
    if fcntl is None:
        raise Unsupported("checkpoints are locked as Linux and macOS do it: use WSL")
    deadline = time.monotonic() + timeout
    with (root / ".lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimedOut(
                        f"write a checkpoint in {root}, after {timeout:.1f} s: another process is"
                        " writing there; its end, or another folder, ends the wait"
                    ) from None
            time.sleep(PAUSE)
        yield
