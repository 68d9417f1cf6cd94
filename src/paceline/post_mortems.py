"""Post-mortems: a file with all it takes to run alone again what a worker ran when it failed.

A file is a zip: `report.txt` for people, `facts.json`, the function and its input as they travelled
to the worker, and for each variable a safetensors file and its structure. Whoever loads the
function runs code from the file, so one that others could have written is refused.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import tempfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.core import manifest as manifests
from paceline.core.errors import Refused, SchemaError
from paceline.core.names import quoted
from paceline.core.tree import Tree, build, decoded, flatten
from paceline.core.versions import count_of
from paceline.disk import checked_folder

FORMAT = 1
SUFFIX = ".post-mortem"
KEEP = 20
"""Files that stay in a folder."""

SMALL, LARGE = 64 << 20, 1 << 30
"""Bytes of variables that a file has at most: in the temporary directory, and elsewhere."""

AUTO = "auto"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a failure, without what takes much room.

    `item` is how many items the function had made, `None` for a call; `versions` are those that the
    worker had read last, `saved` those that the file has, both by the variables' keys, and `absent`
    says why others are not there. `environment` is what its process was started with.
    """

    format: int = FORMAT
    paceline: str
    at: float
    worker: str
    seed: int
    how: str
    function: str
    item: int | None
    shapes: str
    input: str | None
    versions: dict[str, int]
    saved: dict[str, int]
    absent: dict[str, str]
    output: list[str]
    environment: dict[str, str]
    path: list[str]
    argv: list[str]

    def told(self) -> str:
        """The same for people."""
        index = "" if self.item is None else f", item {self.item}"
        lines = [f"{self.worker}, in {self.function}{index}, with seed {self.seed}:", self.how, ""]
        if self.input is not None:
            lines.append(f"its input was {self.input}")
        if self.shapes:
            lines.append(f"its last item was {self.shapes}")
        for key in {**self.versions, **self.saved, **self.absent}:
            lines.append(f"variable {quoted(key)}: {self._variable(key)}")
        if self.output:
            lines += ["", "the last lines on its standard error:", *self.output]
        return "\n".join(lines)

    def _variable(self, key: str) -> str:
        read, saved = self.versions.get(key), self.saved.get(key)
        had = "it had read none" if read is None else f"it had read version {count_of(read)}"
        if saved is None:
            return f"{had}; none is here: {self.absent.get(key, 'it was not asked for')}"
        if saved == read:
            return f"{had}, which is here"
        return f"{had}; here is version {count_of(saved)}, the newest, as that one was gone"


@dataclass(frozen=True)
class PostMortem:
    """A file's content: the facts, the function and its input as bytes, the variables by key."""

    facts: Facts
    function: bytes
    input: bytes | None
    variables: Mapping[str, Tree]


class Folder:
    """Where post-mortems are kept, the newest `KEEP` of them.

    `auto` is a folder of the user's own in the temporary directory.

    Raises:
        SchemaError: that is no path of a folder.
    """

    def __init__(self, path: Any) -> None:
        path = checked_folder(path, "post_mortem")
        self._auto = path == AUTO
        self.limit = SMALL if self._auto else LARGE
        if self._auto:
            user = os.getuid() if hasattr(os, "getuid") else "user"
            path = os.path.join(tempfile.gettempdir(), f"paceline-post-mortems-{user}")
        self.path = Path(path).absolute()

    def place(self, worker: str) -> Path:
        """Where a post-mortem of that worker can be; no two are given the same."""
        now = time.strftime("%Y%m%d-%H%M%S")
        name = re.sub(r"[^\w.-]", "-", worker)
        return self.path / f"{name}-{now}-{secrets.token_hex(3)}{SUFFIX}"

    def write(
        self,
        path: Path,
        facts: Facts,
        function: bytes,
        given: bytes | None,
        variables: Mapping[str, Tree],
    ) -> None:
        """Write a file that only this user can read, whole or not at all; then remove old ones.

        Raises:
            OSError: it cannot be written, and nothing of it is left.
            Refused: the folder in the temporary directory is somebody else's.
        """
        if self._auto:
            _make_own(self.path)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.writing")
        try:
            number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(number, "wb") as file:
                _written(file, facts, function, given, variables)
            fresh.rename(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        there = sorted(self.path.glob(f"*{SUFFIX}"), key=_changed)
        for old in there[:-KEEP]:
            with suppress(OSError):  # another process was faster
                old.unlink()


def read(path: str | os.PathLike[str]) -> PostMortem:
    """What is in a file.

    Raises:
        Refused: somebody else than this user could have written it, or it cannot be read.
        SchemaError: it is no post-mortem, or damaged; the message says how.
    """
    try:
        with open(path, "rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            with zipfile.ZipFile(file) as zipped:
                return _content(zipped)
    except OSError as e:
        raise Refused(f"the post-mortem {path} cannot be read: {e.strerror or e}") from e
    except (zipfile.BadZipFile, KeyError, EOFError, msgspec.MsgspecError, SchemaError) as e:
        raise SchemaError(f"{path} is no whole post-mortem: {e}") from e


def _check_owner(path: object, about: os.stat_result) -> None:
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        raise Refused(
            f"the post-mortem {path} belongs to user {about.st_uid}: to run it is to run their code"
        )
    mode = stat.S_IMODE(about.st_mode)
    if mode & 0o022:
        raise Refused(
            f"the post-mortem {path} has mode {mode:o}: others may have written it, and to run it"
            " is to run their code; if nobody has, chmod 600 it"
        )


def _make_own(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    about = path.lstat()
    owned = not hasattr(os, "geteuid") or about.st_uid == os.geteuid()
    if not stat.S_ISDIR(about.st_mode) or not owned or about.st_mode & 0o022:
        raise Refused(f"{path} is not a folder of this user's alone")


def _written(
    file: Any, facts: Facts, function: bytes, given: bytes | None, variables: Mapping[str, Tree]
) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as zipped:
        zipped.writestr("report.txt", facts.told() + "\n")
        zipped.writestr("facts.json", msgspec.json.format(msgspec.json.encode(facts)))
        zipped.writestr("function", function)
        if given is not None:
            zipped.writestr("input", given)
        zipped.writestr("variables.json", json.dumps(list(variables)))
        for place, tree in enumerate(variables.values()):
            flat = flatten(tree)
            structure = msgspec.msgpack.encode((flat.layout, flat.values))
            zipped.writestr(f"variable-{place:04d}.structure", structure)
            head, order = manifests.tensor_header(flat.layout)
            with zipped.open(f"variable-{place:04d}.safetensors", "w", force_zip64=True) as part:
                part.write(head)
                for n in order:
                    part.write(np.ascontiguousarray(flat.arrays[n]).reshape(-1).view(np.uint8).data)


def _content(zipped: zipfile.ZipFile) -> PostMortem:
    facts = msgspec.json.decode(zipped.read("facts.json"), type=Facts)
    if facts.format != FORMAT:
        raise SchemaError(f"its format is {facts.format}, paceline {facts.paceline} wrote it")
    trees = {}
    for place, key in enumerate(json.loads(zipped.read("variables.json"))):
        structure = zipped.read(f"variable-{place:04d}.structure")
        layout, values = msgspec.msgpack.decode(structure, type=tuple[bytes, list[Any]])
        content = np.frombuffer(
            bytearray(zipped.read(f"variable-{place:04d}.safetensors")), np.uint8
        )
        trees[key] = build(decoded(layout), values, manifests.tensors(layout, content))
    given = zipped.read("input") if "input" in zipped.namelist() else None
    return PostMortem(facts, zipped.read("function"), given, trees)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
