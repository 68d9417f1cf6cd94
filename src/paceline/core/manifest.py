"""What a checkpoint says of itself: a step, and for each resource what it is and where it lies."""

from __future__ import annotations

import base64
import itertools
import math
from typing import Any

import msgspec
import numpy as np

from paceline.core.errors import SchemaError
from paceline.core.names import checked_container, key, quoted
from paceline.core.tree import decoded, encoded, paths
from paceline.core.versions import epoch_of

FORMAT = 4
NAMELESS = (1, 2, 3)
"""Formats of one container each, which they do not name."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a checkpoint, beside its manifest."""

    size: int
    sha256: str


class KeptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An older version of a variable, which tags name."""

    version: int
    values: list[Any]
    file: str


class VariableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable at one version; its arrays are in `file`, under `tensor_names`.

    `kept` are the other versions that `tags` name, of the same layout.

    `structure` and `leaves` are its layout, `values` the plain leaves in order: bytes in base64,
    and as text the floats that JSON does not have.
    """

    version: int
    epoch: int
    bound: int | None
    structure: Any
    leaves: list[tuple[str, list[int] | None]]
    values: list[Any]
    file: str
    spread: bool = False
    tags: dict[str, int] = {}
    kept: list[KeptEntry] = []

    def at(self, version: int | None) -> VariableEntry | KeptEntry:
        """What is there of a version, of the current one for `None`."""
        if version is None or version == self.version:
            return self
        return next(each for each in self.kept if each.version == version)

    def layout(self) -> bytes:
        """The layout as it travels; raises `SchemaError` if it is none."""
        try:
            found = encoded(self.structure, [*map(list, self.leaves)])
        except OverflowError as e:
            raise SchemaError(f"a layout with an int of more than 64 bits: {e}") from e
        decoded(found)
        return found


class CounterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A counter: where it started, and what it was at."""

    start: int
    value: int


class ThingEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something of another kind: its facts, heads and pieces are in `file`, as bytes.

    `near` is the variable whose home is its own.
    """

    kind: str
    name: str
    file: str
    near: str | None = None


class ContainerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was in one container."""

    variables: dict[str, VariableEntry] = {}
    counters: dict[str, CounterEntry] = {}
    things: list[ThingEntry] = []

    @property
    def named(self) -> list[tuple[str, str]]:
        """The kinds and names of all of it."""
        return [
            *(("variable", name) for name in self.variables),
            *(("counter", name) for name in self.counters),
            *((thing.kind, thing.name) for thing in self.things),
        ]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint: `time` is of the clock, in seconds since 1970; `files` are all there are.

    `containers` are those that had something, by name; the default one's is empty. `pause` are the
    seconds for which the servers were frozen for it.
    """

    format: int
    paceline: str
    step: int
    time: float
    files: dict[str, FileEntry]
    containers: dict[str, ContainerEntry]
    pause: float = 0.0

    @property
    def named(self) -> bool:
        """Whether it says in which containers things were; else they were all in one."""
        return self.format not in NAMELESS

    @property
    def epochs(self) -> set[int]:
        """Those in which its variables were."""
        return {each.epoch for one in self.containers.values() for each in one.variables.values()}

    def of(self, container: str = "") -> ContainerEntry:
        """What was in a container, which may be nothing."""
        return self.containers.get(container, ContainerEntry())


class _Nameless(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    paceline: str
    step: int
    time: float
    files: dict[str, FileEntry]
    variables: dict[str, VariableEntry]
    counters: dict[str, CounterEntry] = {}
    things: list[ThingEntry] = []
    pause: float = 0.0


class _Numbered(msgspec.Struct, frozen=True):
    format: int
    paceline: str = "another version"


def parse(text: bytes) -> Manifest:
    """A manifest, checked through.

    Raises:
        SchemaError: it is none, or of a newer format; the message says what is wrong.
    """
    try:
        head = msgspec.json.decode(text, type=_Numbered)
        if head.format not in (*NAMELESS, FORMAT):
            raise SchemaError(
                f"its format is {head.format}, written by paceline {head.paceline}; this paceline"
                f" reads formats up to {FORMAT}"
            )
        if head.format in NAMELESS:
            old = msgspec.json.decode(text, type=_Nameless)
            content = ContainerEntry(old.variables, old.counters, old.things)
            found = Manifest(
                old.format, old.paceline, old.step, old.time, old.files, {"": content}, old.pause
            )
        else:
            found = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise SchemaError(f"its manifest is malformed: {e}") from e
    for name in found.files:
        if not name or "/" in name or "\\" in name or "\0" in name or name.startswith("."):
            raise SchemaError(f"its manifest names the file {name!r}, which is not beside it")
    for container, content in found.containers.items():
        checked_container(container)
        _check(found, content, container)
    return found


def _check(found: Manifest, content: ContainerEntry, container: str) -> None:
    for thing in content.things:
        _listed(found, f"{thing.kind} {quoted(key(thing.name, container))}", thing.file)
    for name, counter in content.counters.items():
        for value in (counter.start, counter.value):
            if not -(1 << 63) <= value < 1 << 63:
                what = f"counter {quoted(key(name, container))}"
                raise SchemaError(f"{what} has {value}, of more than 64 bits")
    for name, entry in content.variables.items():
        what = f"variable {quoted(key(name, container))}"
        plain = [kind for kind, shape in decoded(entry.layout()).leaves if shape is None]
        if epoch_of(entry.version) != entry.epoch:
            raise SchemaError(f"{what} has version {entry.version}, none of epoch {entry.epoch}")
        all_: list[VariableEntry | KeptEntry] = [entry, *entry.kept]
        if entry.bound is not None and entry.bound < 1:
            raise SchemaError(f"{what} has a bound of {entry.bound} bytes")
        for each in all_:
            _listed(found, what, each.file)
            if not 0 <= each.version <= entry.version < 1 << 63:
                raise SchemaError(f"{what} has version {each.version}, of {entry.version} so far")
            if len(plain) != len(each.values):
                raise SchemaError(
                    f"{what} has {len(plain)} plain leaves and {len(each.values)} values"
                )
            for kind, value in zip(plain, each.values, strict=True):
                _value(kind, value)
        if not {entry.version, *(each.version for each in entry.kept)} >= {*entry.tags.values()}:
            raise SchemaError(f"{what} has tags of versions that are not there")


def _listed(told: Manifest, what: str, file: str) -> None:
    if file not in told.files:
        raise SchemaError(f"{what} is in {file!r}, which it does not list")


def described(layout: bytes) -> tuple[Any, list[tuple[str, list[int] | None]]]:
    """The structure and leaves of a layout, as a manifest has them."""
    plan = decoded(layout)
    return plan.structure, [
        (kind, None if shape is None else list(shape)) for kind, shape in plan.leaves
    ]


def spelled(layout: bytes, values: Any) -> list[Any]:
    """Plain leaves as JSON has them."""
    kinds = [kind for kind, shape in decoded(layout).leaves if shape is None]
    made: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == "bytes":
            made.append(base64.b64encode(value).decode())
        elif kind == "float" and not math.isfinite(value):
            made.append(str(value))
        else:
            made.append(value)
    return made


def plain_values(layout: bytes, values: list[Any]) -> list[Any]:
    """Plain leaves of that layout, as they were."""
    kinds = [kind for kind, shape in decoded(layout).leaves if shape is None]
    return [_value(kind, value) for kind, value in zip(kinds, values, strict=True)]


_JSON: dict[str, tuple[type, ...]] = {
    "none": (type(None),),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int, str),
    "str": (str,),
    "bytes": (str,),
}


def _value(kind: str, value: Any) -> Any:
    try:
        if type(value) not in _JSON[kind]:
            raise ValueError(f"a {type(value).__name__}")
        if kind == "bytes":
            return base64.b64decode(value, validate=True)
        if kind == "int" and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("it has more than 64 bits")
        return float(value) if kind == "float" else value
    except (ValueError, OverflowError) as e:
        raise SchemaError(f"its manifest has {value!r} for a leaf of {kind}: {e}") from e


def tensor_names(layout: bytes) -> list[str]:
    """What the arrays of a layout are called in a file, in order: their keys, joined with dots.

    A PyTorch module's are those of its state dict. Where two would be the same, all are paths.
    """
    plan = decoded(layout)
    names: list[str] = []
    _joined(plan.structure, (), names)
    if len({*names}) != len(names):
        names = paths(layout)
    return [name for name, leaf in zip(names, plan.leaves, strict=True) if leaf.shape is not None]


def _joined(structure: Any, keys: tuple[Any, ...], found: list[str]) -> None:
    if structure is None:
        found.append(".".join(map(str, keys)) or "value")
        return
    there = structure[1] if structure[0] == "d" else range(len(structure[1]))
    for each, part in zip(there, structure[-1], strict=True):
        _joined(part, (*keys, each), found)


# The safetensors format: the length of a header, the header in JSON, and the arrays.

_TENSORS = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<i2": "I16",
    "<u2": "U16",
    "<f2": "F16",
    "bfloat16": "BF16",
    "<i4": "I32",
    "<u4": "U32",
    "<f4": "F32",
    "<f8": "F64",
    "<i8": "I64",
    "<u8": "U64",
}


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def tensor_header(layout: bytes) -> tuple[bytes, list[int]]:
    """The beginning of a file with the arrays of a layout, and the order in which they follow.

    What safetensors has no dtype for, such as complex numbers and dates, lies there as bytes.
    """
    plan = decoded(layout)
    names = tensor_names(layout)
    kinds = [leaf.kind for leaf in plan.leaves if leaf.shape is not None]
    # The widest first: then each lies at a multiple of its width.
    order = sorted(range(len(names)), key=lambda i: -plan.places[i][0].itemsize)
    entries: dict[str, Any] = {}
    offset = 0
    for i in order:
        _, shape, _, size = plan.places[i]
        known = _TENSORS.get(kinds[i])
        entries[names[i]] = _Tensor(
            known or "U8", list(shape if known else (size,)), (offset, offset + size)
        )
        offset += size
    return _header(entries), order


def _header(entries: dict[str, Any]) -> bytes:
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def blocks_header(sizes: dict[str, int]) -> bytes:
    """The beginning of a file with blocks of bytes of these names, which follow in order."""
    ends = list(itertools.accumulate(sizes.values()))
    return _header(
        {
            name: _Tensor("U8", [size], (end - size, end))
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
    )


def blocks(content: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, Any]:
    """The blocks of such a file, as views of its content.

    Raises:
        SchemaError: it is none.
    """
    try:
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        entries = msgspec.json.decode(content[8:start].tobytes(), type=dict[str, _Tensor])
    except msgspec.MsgspecError as e:
        raise SchemaError(f"its header is malformed: {e}") from e
    sizes = {name: entry.shape[0] for name, entry in entries.items() if len(entry.shape) == 1}
    head = blocks_header(sizes)
    if head != content[:start].tobytes() or content.nbytes != start + sum(sizes.values()):
        raise SchemaError("its blocks are not those that its header tells of")
    made = {}
    for name, size in sizes.items():
        made[name] = content[start : start + size]
        start += size
    return made


def tensors(layout: bytes, content: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Any]:
    """The arrays of a layout, in order, as views of the content of a file.

    Raises:
        SchemaError: the file is not the one that belongs to the layout.
    """
    head, order = tensor_header(layout)
    plan = decoded(layout)
    total = len(head) + sum(size for *_, size in plan.places)
    if content.nbytes != total or content[: len(head)].tobytes() != head:
        raise SchemaError("its arrays are not those that its manifest tells of")
    made: list[Any] = [None] * len(order)
    offset = len(head)
    for i in order:
        dtype, shape, _, size = plan.places[i]
        made[i] = content[offset : offset + size].view(dtype).reshape(shape)
        offset += size
    return made
