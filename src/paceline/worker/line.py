"""What a launcher and a worker tell each other over their private line."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.black_box import SIZE, BlackBox
from paceline.core.schedule import ScheduleName
from paceline.core.tree import Array
from paceline.transports.base import Channel


@dataclass(frozen=True, slots=True)
class Setup:
    """A worker's first message: who it is, and where the server is.

    `alone`: in an interpreter of its own, whose random numbers it may seed. `lasting`: its launcher
    starts a server again that has ended. `box` is where it notes what it is at: memory, or a
    descriptor of some. What it had read when its function fails is told up to `keeps` bytes.
    """

    target: str | None
    secret: bytes
    job: str
    index: int
    seed: int
    channel: Callable[[], Channel] | None = None
    alone: bool = False
    box: int | bytearray | None = None
    keeps: int = 0
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Collect:
    """Run a generator function, and offer what it yields. `payload` is (fn, resources).

    A worker with quick items may have up to `ahead` of them admitted at a time. In lockstep a
    worker that fails is not started again. `name` is the function's, `variables` the keys of those
    among its resources.
    """

    collection: str
    payload: bytes
    version_of: str | None
    ahead: int = 1
    schedule: ScheduleName = "lag"
    name: str = ""
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopJob:
    """End the function of that collection at its next step; nobody waits for that call any more."""

    work: str | int


@dataclass(frozen=True, slots=True)
class Started:
    """The worker is a member and runs."""


@dataclass(frozen=True, slots=True)
class Held:
    """The version of a variable that a function had when it failed: a tree taken apart."""

    key: str
    version: int
    layout: bytes
    values: tuple[Any, ...]
    content: Array


@dataclass(frozen=True, slots=True)
class Ended:
    """How a function ended: of itself, because its collection did, or with an error.

    `hopeless` says that it would end in the same way again. `held` is what it had read last.
    """

    collection: str
    items: int
    error: str | None = None
    hopeless: bool = False
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Warned:
    """What the user should know of the worker that makes items for that collection."""

    collection: str
    text: str


@dataclass(frozen=True, slots=True)
class Load:
    """Keep a function to be called later. `payload` is (fn, resources), `key` says which it is.

    A worker keeps the newest `KEPT` of them, and the launcher knows which these are.
    """

    key: bytes
    payload: bytes


KEPT = 32

FILES = 3
"""Post-mortems that there are at most of calls of one function that raised."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Call a loaded function, with an input or without. `timed`: say when it begins."""

    number: int
    key: bytes
    input: bytes | None
    timed: bool


@dataclass(frozen=True, slots=True)
class Began:
    """The function of a timed call is loaded and begins."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function returned, a tree taken apart; or the class and the text of its error."""

    number: int
    layout: bytes = b""
    values: tuple[Any, ...] = ()
    content: Array | None = None
    error: tuple[str, str] | None = None
    held: tuple[Held, ...] = ()


def black_box(place: int | bytearray | None) -> BlackBox:
    """Where a worker notes what it is at, as its `Setup` says; without a place nobody reads it."""
    if isinstance(place, int):
        memory = mmap.mmap(place, SIZE)
        os.close(place)
        return BlackBox(memoryview(memory))
    return BlackBox(bytearray(SIZE) if place is None else place)
