"""What a worker notes of itself where it can be read once the worker is dead."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from paceline.core.errors import SchemaError
from paceline.core.tree import Array, decoded, paths

SIZE = 64 << 10
"""Bytes of a black box."""

NAMES = 32
"""Variables whose versions it has, those that were read last."""

LEAVES = 32
"""Leaves of an item that are told."""

# Two words, the number of items and which half has been written last, and two halves.
_HEAD = 16
_HALF = (SIZE - _HEAD) // 2
_LENGTH = 4


class Seen(NamedTuple):
    """What a black box says: `versions` are those read last, by the variable's key."""

    items: int
    versions: dict[str, int]
    layout: bytes

    @property
    def shapes(self) -> str:
        """The leaves of the newest item, each with its path; empty if there was none."""
        if not self.layout:
            return ""
        leaves = decoded(self.layout).leaves
        told = [f"{p} {leaf}" for p, leaf in zip(paths(self.layout), leaves, strict=True)]
        more = f", and {len(told) - LEAVES} more" if len(told) > LEAVES else ""
        return ", ".join(told[:LEAVES]) + more


class BlackBox:
    """Notes into `memory`, of `SIZE` bytes, that starts as zeros and that others can read.

    Whenever the writer ends, what is read is as it was before or after its last note.
    """

    def __init__(self, memory: bytearray | memoryview) -> None:
        self._memory = memoryview(memory)
        self._words: Array = np.frombuffer(memory, np.int64, 2)
        self._versions: dict[str, int] = {}
        self._layout = b""

    def begin(self) -> None:
        """A function begins."""
        self._words[0] = 0
        self._layout = b""
        self._write()

    def read(self, key: str, version: int) -> None:
        """A version of a variable was read."""
        self._versions.pop(key, None)
        self._versions[key] = version
        while len(self._versions) > NAMES:
            del self._versions[next(iter(self._versions))]
        self._write()

    def made(self, layout: bytes) -> None:
        """An item was made."""
        if layout != self._layout:
            self._layout = layout
            self._write()
        self._words[0] += 1

    def _write(self) -> None:
        text = msgspec.msgpack.encode((self._versions, self._layout))
        if len(text) > _HALF - _LENGTH:
            # It has very many leaves.
            text = msgspec.msgpack.encode((self._versions, b""))
        half = 1 - int(self._words[1])
        start = _HEAD + half * _HALF
        self._memory[start : start + _LENGTH] = len(text).to_bytes(_LENGTH, "little")
        self._memory[start + _LENGTH : start + _LENGTH + len(text)] = text
        self._words[1] = half


def seen(content: bytes) -> Seen:
    """What a black box has; nothing where nothing was noted, or somebody else wrote there."""
    items, half = np.frombuffer(content, np.int64, 2).tolist()
    start = _HEAD + half * _HALF
    if half not in (0, 1):
        return Seen(0, {}, b"")
    length = int.from_bytes(content[start : start + _LENGTH], "little")
    try:
        text = content[start + _LENGTH : start + _LENGTH + length]
        versions, layout = msgspec.msgpack.decode(text, type=tuple[dict[str, int], bytes])
        if layout:
            decoded(layout)
    except (msgspec.MsgspecError, SchemaError):
        return Seen(max(0, items), {}, b"")
    return Seen(max(0, items), versions, layout)
