"""Requests of every type, made from the types themselves: a new message is among them by itself.

Most of what is made fits together: few names, trees of few structures, numbers that a server gave.
All is drawn from a `random.Random`, so that a seed, or hypothesis, says it all.
"""

from __future__ import annotations

import functools
import math
from random import Random
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec import inspect

from paceline.core import messages as m
from paceline.core import names, spreading
from paceline.core.tree import flatten

KINDS: tuple[type, ...] = get_args(m.Requests)
CONTAINER = "broken"
NAMES = ["a", "b", "c"]
TREES: list[Any] = [
    {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)},
    [np.ones(3)],
    {"w": np.ones((4, 3000), np.float32)},
    0.5,
    {"n": 1, "t": "text", "k": None, "y": b"bytes", "x": True},
    [],
    {"$.w": np.ones((4, 2), np.float32)},
    [np.ones((2, 2), np.float32)],
]
FLAT = [flatten(tree) for tree in TREES]
PATHS = ["$", "$.w", "$.b", "$[0]", "$[1]", "$.'$.w'", "$['$.w']", "$['$[0]']"]
SMALL = [0, 1, 1, 1, 2, 2, 3, 4, 8, -1]
NUMBERS = [*SMALL, 1 << 31, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)]
SECONDS = [0.0, 0.0, 0.0, 0.001, 0.05, 1.0, 60.0, -1.0, 1e300, math.inf, math.nan]


class Maker:
    """Makes requests. `seen` are numbers that a server has answered with."""

    def __init__(self, random: Random, container: str = CONTAINER) -> None:
        self.random = random
        self.seen: list[int] = []
        self.generation = 0
        self._container = container
        self._buffers: list[bytes] = []

    def request(self, kind: type | None = None) -> tuple[Any, list[bytes]]:
        """A request, of that type if one is told, and its buffers."""
        self._buffers = []
        if kind is None:
            kind = self.random.choice(KINDS)
        made = self._struct(kind)
        return made, self._buffers

    def name(self) -> str:
        """The key of something that may be there."""
        name = self.random.choice(NAMES)
        return names.key(name, self._container, self.generation)

    def _struct(self, kind: type) -> Any:
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(self)
        info = _described(kind)
        fields: dict[str, Any] = {}
        for field in info.fields:
            if not field.required and self.random.random() < 0.5:
                continue
            fields[field.name] = self._field(kind, field.name, field.type)
        made = kind(**fields)
        self._indices(made)
        return made

    def _indices(self, made: Any) -> None:
        """The places of rows come as a buffer, before the rows or after them."""
        if isinstance(made, m.Gather | m.ScatterAdd):
            count = math.prod(made.shape)
            place = 0
        elif isinstance(made, m.GatherHome | m.GatherPart):
            count, place = sum(count for _, count in made.pieces), 0
        elif isinstance(made, m.Commit | m.Stage) and made.pieces is not None:
            count, place = sum(count for _, count in made.pieces), 1
        else:
            return
        few = [self.random.randrange(5) for _ in range(min(count, 8))]
        self._buffers.insert(place, np.array(few, np.int64).tobytes())

    def _field(self, kind: type, name: str, info: Any) -> Any:
        random = self.random
        if name in ("name", "variable") and not (
            isinstance(info, inspect.UnionType) and random.random() < 0.3
        ):
            return self.name()
        if name == "container":
            return self._container
        if name == "containers":
            return [self._container]
        if name == "layout":
            return random.choice(FLAT).layout
        if name == "shape":
            return tuple(random.choice([1, 2, 3]) for _ in range(random.randrange(3)))
        if name == "pieces" and kind is not m.DefineReader and kind is not m.FeedReader:
            return [(random.choice(PATHS), random.randrange(4)) for _ in range(random.randrange(3))]
        if name == "order":
            return random.choice(["fifo", "shuffle", "priority", "lifo"])
        if name == "index":
            return random.choice([-1, -1, -1, 0, 1, 1 << 63])
        return self._of(info)

    def _of(self, info: Any) -> Any:
        random = self.random
        if isinstance(info, inspect.UnionType):
            return self._of(random.choice(info.types))
        if isinstance(info, inspect.StructType):
            return self._struct(info.cls)
        if isinstance(info, inspect.IntType):
            return self._number(-(1 << 63) if info.ge is None else info.ge)
        if isinstance(info, inspect.ListType):
            return [self._of(info.item_type) for _ in range(1 + random.randrange(3))]
        if isinstance(info, inspect.VarTupleType):
            return tuple(self._of(info.item_type) for _ in range(random.randrange(3)))
        if isinstance(info, inspect.TupleType):
            return tuple(map(self._of, info.item_types))
        if isinstance(info, inspect.NamedTupleType):
            return info.cls(*(self._of(field.type) for field in info.fields))
        if isinstance(info, inspect.DictType):
            return {self._of(info.key_type): self._of(info.value_type) for _ in range(2)}
        if isinstance(info, inspect.LiteralType):
            return random.choice(info.values)
        return self._plain(info)

    def _plain(self, info: Any) -> Any:
        random = self.random
        if isinstance(info, inspect.FloatType):
            return random.choice(SECONDS)
        if isinstance(info, inspect.BoolType):
            return random.random() < 0.5
        if isinstance(info, inspect.StrType):
            return random.choice([*NAMES, "$.w", "", "x" * 300, "ps:0", "\0"])
        if isinstance(info, inspect.BytesType):
            return random.randbytes(random.choice([0, 8, 16]))
        if isinstance(info, inspect.NoneType):
            return None
        return random.choice([None, True, 1, 0.5, "text", b"bytes", [], {"a": [1]}, (1 << 64) - 1])

    def _number(self, least: int) -> int:
        if self.seen and self.random.random() < 0.4:
            found = self.random.choice(self.seen)
        else:
            found = self.random.choice(NUMBERS)
        return max(found, least)

    def _head(self) -> m.Head:
        flat = self.random.choice(FLAT)
        if flat.nbytes:
            self._buffers.append(self.random.choice([b"\0", b"\x3f"]) * flat.nbytes)
        elif self.random.random() < 0.5:
            self._buffers.append(b"")
        return m.Head(flat.layout, list(flat.values))

    def _run(self) -> m.RunHead:
        flat = self.random.choice(FLAT)
        count = 1 + self.random.randrange(3)
        self._buffers.append(bytes(flat.nbytes * count))
        metrics: list[dict[str, list[float]]] = []
        if self.random.random() < 0.1:
            metrics = [{"loss": [0.5]}] * count
        version = self._number(-(1 << 63)) if self.random.random() < 0.5 else m.NO_VERSION
        columns = [[value] * count for value in flat.values]
        return m.RunHead(flat.layout, count, columns, version, metrics)

    def _spreading(self) -> m.Spreading:
        layout = self.random.choice(FLAT).layout
        tasks = ["ps:0", "ps:1"]
        return spreading.spread(layout, "ps:0", tasks, None, "a sample")

    def _part(self) -> m.Part:
        kind = self.random.choice(get_args(m.Joinable))
        before = len(self._buffers)
        request = self._struct(kind)
        return m.Part(request, len(self._buffers) - before)


_SPECIAL: dict[type, Any] = {
    m.Head: Maker._head,
    m.RunHead: Maker._run,
    m.Spreading: Maker._spreading,
    m.Part: Maker._part,
}


@functools.cache
def _described(kind: type) -> Any:
    return inspect.type_info(kind)


def numbers_in(reply: Any) -> list[int]:
    """The numbers that a reply gives: versions, stages, deliveries."""
    if isinstance(reply, int) and not isinstance(reply, bool):
        return [reply]
    if isinstance(reply, msgspec.Struct):
        found: list[int] = []
        for field in reply.__struct_fields__[:5]:
            found += numbers_in(getattr(reply, field))
        return found
    return []
