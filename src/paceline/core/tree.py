"""Trees of arrays: the only data that travels.

A tree is None, a bool, int, float, str or bytes, an array, or a dict, list or tuple of trees. Taken
apart it is a layout (structure, kinds, dtypes, shapes: bytes that compare equal when the structure
does), the plain values, and the arrays, which lie one after another in a single block of memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.bfloat16 import bfloat16, is_bfloat16
from paceline.core.elements import check_elements
from paceline.core.errors import SchemaError

Tree: TypeAlias = Any
Array: TypeAlias = NDArray[Any]
Convert: TypeAlias = Callable[[Any, str], Tree]

ALIGNMENT = 64
MAX_INT = (1 << 63) - 1
MAX_DEPTH = 64
MAX_DIMS = 64
MAX_LEAVES = 1 << 20
ALLOWED = "None, bool, int, float, str, bytes, arrays, and dict, list, tuple of them"

# None of 0 bytes: NumPy makes arrays of them longer, and takes memory that no layout has declared.
_KIND = re.compile(r"[<>|][biufcSUmM][1-9]\d*(\[\w+\])?")
PLAIN: dict[type, str] = {
    type(None): "none",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    bytes: "bytes",
}
_TYPES = {kind: plain for plain, kind in PLAIN.items()}


class Leaf(NamedTuple):
    """What is declared of one leaf: `kind` is a dtype for arrays, else the plain type's name."""

    kind: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return self.kind
        dtype = dtype_named(self.kind)
        name = dtype.name if dtype.isnative and self.kind != "bfloat16" else self.kind
        return f"{name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree taken apart; `arrays` still alias the caller's memory."""

    layout: bytes
    values: tuple[Any, ...]
    arrays: list[Array]
    nbytes: int

    @property
    def size(self) -> int:
        """The bytes of the arrays alone, without what lies between them."""
        return sum(array.nbytes for array in self.arrays)

    def write(self, block: memoryview) -> None:
        """Copy the arrays into `block`, `nbytes` long, each at its 64-byte aligned place."""
        offset = 0
        for array in self.arrays:
            size = array.nbytes
            if size:
                place: Array = np.frombuffer(block, array.dtype, array.size, offset)
                np.copyto(place.reshape(array.shape), array)
                offset += aligned(size)


class Layout(NamedTuple):
    """A decoded layout: the nested structure and its leaves in order.

    `plain` are the types of its plain values, `places` say where its arrays are in a block.
    """

    structure: Any
    leaves: tuple[Leaf, ...]
    plain: tuple[type, ...]
    places: tuple[tuple[np.dtype[Any], tuple[int, ...], int, int], ...]
    nbytes: int


def flatten(tree: Tree, convert: Convert | None = None) -> Flat:
    """Take `tree` apart.

    Values of other types are given to `convert(value, path)`, which returns a tree of known ones,
    or the value itself when it does not know it either.

    Raises:
        SchemaError: a leaf may not travel; the message has its path and what is allowed.
    """
    leaves: list[Any] = []
    values: list[Any] = []
    arrays: list[Array] = []
    structure = _take(tree, (), leaves, values, arrays, convert)
    if len(leaves) > MAX_LEAVES:
        raise SchemaError(f"a tree has at most {MAX_LEAVES} leaves, this one {len(leaves)}")
    nbytes = 0
    for array in arrays:
        nbytes += aligned(array.nbytes)
    return Flat(encoded(structure, leaves), tuple(values), arrays, nbytes)


def encoded(structure: Any, leaves: list[Any]) -> bytes:
    """The layout of a structure and its leaves, each a kind and a shape."""
    return _encode((structure, leaves))


def unflatten(layout: bytes, values: Sequence[Any], block: Array | None) -> Tree:
    """Put a tree together again; its arrays are views of `block` (uint8), sharing its flags.

    Raises:
        SchemaError: the bytes are not a layout, or there are more or fewer `values` than it says.
    """
    plan = decoded(layout)
    wanted = len(plan.plain)
    if len(values) != wanted:
        raise SchemaError(f"a tree of {wanted} plain values came with {len(values)}")
    arrays = views(plan, block)
    return build(plan, values, arrays)


def views(plan: Layout, block: Array | None) -> list[Array]:
    """The arrays of a layout as views of `block`, in order."""
    made = []
    for dtype, shape, offset, size in plan.places:
        if size and block is not None:
            made.append(block[offset : offset + size].view(dtype).reshape(shape))
        else:
            made.append(np.empty(shape, dtype))
    return made


@functools.lru_cache(maxsize=256)
def decoded(layout: bytes) -> Layout:
    """Decode a layout, and check that it is one.

    Raises:
        SchemaError: the bytes are not a layout.
    """
    try:
        check_elements(layout, 8 * MAX_LEAVES, 4 * MAX_LEAVES)
        structure, raw = _decode(layout)
        if len(raw) > MAX_LEAVES:
            raise ValueError(f"it has {len(raw)} leaves, at most {MAX_LEAVES} are allowed")
        leaves = tuple(Leaf(kind, None if shape is None else tuple(shape)) for kind, shape in raw)
        if _count(structure, 0) != len(leaves):
            raise ValueError("its structure and its leaves do not agree")
        return _planned(structure, leaves)
    except (ValueError, TypeError, msgspec.MsgspecError, RecursionError) as e:
        raise SchemaError(f"{len(layout)} bytes are not a layout: {e}") from e


def are_plain(values: Sequence[Any], kinds: tuple[type, ...]) -> bool:
    """Whether values that came from elsewhere are of these types, and their ints of 64 bits."""
    if tuple(map(type, values)) != kinds:
        return False
    return int not in kinds or max(value for value in values if type(value) is int) <= MAX_INT


def check(found: bytes, declared: bytes, what: str) -> None:
    """Check that two layouts have equal leaves at equal paths, in whatever order.

    Raises:
        SchemaError: they do not; the message starts with `what` and names the first odd leaf.
    """
    if found == declared:
        return
    got, want = _by_path(found), _by_path(declared)
    for path, leaf in want.items():
        if path not in got:
            raise SchemaError(f"{what}: leaf {path} is missing, declared {leaf}")
        if got[path] != leaf:
            raise SchemaError(f"{what}: leaf {path} is {got[path]}, declared {leaf}")
    for path, leaf in got.items():
        if path not in want:
            raise SchemaError(f"{what}: leaf {path} is {leaf}, not declared at all")


def child(path: str, key: object) -> str:
    """The path of `key` under `path`: `$.obs`, `$[0]`, `$['fc.weight']`."""
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{key!r}]"


def paths(layout: bytes) -> list[str]:
    """The path of every leaf, in order."""
    found: list[str] = []
    _walk(decoded(layout).structure, "$", found)
    return found


def refuse(value: object, path: str) -> Tree:
    """Raise the error for a value that may not travel."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    article = "an" if name[0] in "aeiou" else "a"
    raise SchemaError(f"leaf {path} is {article} {name}; allowed are {ALLOWED}")


def dtype_named(kind: str) -> np.dtype[Any]:
    """The dtype of a leaf's kind."""
    return bfloat16() if kind == "bfloat16" else np.dtype(kind)


# The structure: a dict is ["d", keys, parts], a list ["l", parts], a tuple ["t", parts]; a leaf
# is None.


def _take(
    node: Any,
    path: tuple[object, ...],
    leaves: list[Any],
    values: list[Any],
    arrays: list[Array],
    convert: Convert | None,
) -> Any:
    kind = type(node)
    if kind is np.ndarray:
        leaves.append((kind_of(node, path), node.shape))
        arrays.append(node)
        return None
    plain = PLAIN.get(kind)
    if plain is not None:
        if plain == "int" and not -(1 << 63) <= node < 1 << 63:
            raise SchemaError(f"leaf {_spelled(path)} is an int of more than 64 bits: {node}")
        if plain == "str" and not node.isascii():
            _check_text(node, path)
        leaves.append((plain, None))
        values.append(node)
        return None
    if len(path) > MAX_DEPTH:
        raise SchemaError(f"{_spelled(path[:3])}... is nested over {MAX_DEPTH} deep (a cycle?)")
    if kind is dict:
        keys = tuple(node)
        for key in keys:
            if type(key) is not str and type(key) is not int:
                raise SchemaError(f"{_spelled(path)} has the key {key!r}; keys are str or int")
        parts = [
            _take(part, (*path, key), leaves, values, arrays, convert) for key, part in node.items()
        ]
        return ("d", keys, parts)
    if kind is list or kind is tuple:
        parts = [
            _take(part, (*path, i), leaves, values, arrays, convert) for i, part in enumerate(node)
        ]
        return ("l" if kind is list else "t", parts)
    return _take(_plainer(node, path, convert), path, leaves, values, arrays, convert)


def _check_text(node: str, path: tuple[object, ...]) -> None:
    try:
        node.encode()
    except UnicodeEncodeError as e:
        raise SchemaError(f"leaf {_spelled(path)} is a str that UTF-8 cannot hold: {e}") from e


def _plainer(node: Any, path: tuple[object, ...], convert: Convert | None) -> Any:
    """Turn a relative of a known type into that type."""
    if isinstance(node, (np.ndarray, np.generic)) and not isinstance(node, np.ma.MaskedArray):
        return np.asarray(node)
    if isinstance(node, tuple):
        return tuple(node)
    bases: tuple[Any, ...] = (int, float, str, bytes, list, dict)
    for base in bases:
        if isinstance(node, base):
            # Not `str(node)`: an enum's would be the name of its member.
            return str.__str__(node) if base is str else base(node)
    if isinstance(node, Mapping):
        return dict(node)
    made = node if convert is None else convert(node, _spelled(path))
    if made is not node:
        return made
    if is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in fields(node)}
    return refuse(node, _spelled(path))


def kind_of(array: Array, path: tuple[object, ...] = ()) -> str:
    """The kind of an array's leaf; raises `SchemaError` for one that may not travel."""
    dtype = array.dtype
    if is_bfloat16(dtype):
        return "bfloat16"
    # Types that others added to NumPy, float8 among them, do not all have a kind of their own.
    if dtype.kind not in "biufcSUmM" or dtype.isbuiltin == 2 or not dtype.itemsize:
        raise SchemaError(f"leaf {_spelled(path)} is an array of {dtype}; allowed are {ALLOWED}")
    return dtype.str


def build(plan: Layout, values: Iterable[Any], arrays: Iterable[Any]) -> Tree:
    """A tree of that layout, of what goes into its leaves, in order; nothing is copied."""
    return _built(plan.structure, iter(plan.leaves), iter(values), iter(arrays))


def _built(structure: Any, leaves: Any, values: Any, arrays: Any) -> Tree:
    if structure is None:
        return next(values) if next(leaves).shape is None else next(arrays)
    if structure[0] == "d":
        parts = [_built(part, leaves, values, arrays) for part in structure[2]]
        return dict(zip(structure[1], parts, strict=True))
    parts = [_built(part, leaves, values, arrays) for part in structure[1]]
    return parts if structure[0] == "l" else tuple(parts)


def _planned(structure: Any, leaves: tuple[Leaf, ...]) -> Layout:
    plain = []
    places = []
    nbytes = 0
    for kind, shape in leaves:
        if shape is None:
            if kind not in _TYPES:
                raise ValueError(f"unknown kind {kind!r}")
            plain.append(_TYPES[kind])
            continue
        if kind != "bfloat16" and _KIND.fullmatch(kind) is None:
            raise ValueError(f"unknown kind {kind!r}")
        dtype = dtype_named(kind)
        if len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"a leaf of {kind}{list(shape)}")
        # What NumPy can make no array of, also where a length of 0 means that none has bytes.
        if dtype.itemsize * math.prod(n or 1 for n in shape) >= 1 << 62:
            raise ValueError(f"a leaf of {kind}{list(shape)} is too big")
        size = dtype.itemsize * math.prod(shape)
        places.append((dtype, shape, nbytes, size))
        nbytes += aligned(size)
    return Layout(structure, leaves, tuple(plain), tuple(places), nbytes)


def _count(structure: Any, depth: int) -> int:
    if structure is None:
        return 1
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested over {MAX_DEPTH} deep")
    if type(structure) is not list or [type(part) for part in structure[1:]] != (
        [list, list] if structure[:1] == ["d"] else [list]
    ):
        raise ValueError("it has a node of another form")
    tag, parts = structure[0], structure[-1]
    if tag == "d":
        keys = structure[1]
        odd = any(type(key) not in (str, int) for key in keys)
        if odd or not len(keys) == len(parts) == len(set(keys)):
            raise ValueError(f"it has a dict of {len(parts)} parts with the keys {keys}")
    elif tag not in ("l", "t"):
        raise ValueError(f"it has a node {tag!r}")
    return sum(_count(part, depth + 1) for part in parts)


def _walk(structure: Any, path: str, found: list[str]) -> None:
    if structure is None:
        found.append(path)
        return
    keys = structure[1] if structure[0] == "d" else range(len(structure[1]))
    for key, part in zip(keys, structure[-1], strict=True):
        _walk(part, child(path, key), found)


def _by_path(layout: bytes) -> dict[str, Leaf]:
    return dict(zip(paths(layout), decoded(layout).leaves, strict=True))


def _spelled(path: tuple[object, ...]) -> str:
    return functools.reduce(child, path, "$")


def aligned(size: int) -> int:
    """The room that an array of `size` bytes takes in a block."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
