"""What is noted of something shared, to be made again elsewhere: facts, and pieces of memory.

A state says its facts in one step. What they refer to is never changed afterwards, so it can be
written down while the state goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from paceline.core.errors import ProtocolError
from paceline.core.messages.replies import NO_VERSION, RunHead, Spreading
from paceline.core.queue_orders import Definition
from paceline.core.waiting import Stored

F = TypeVar("F", bound="Facts")


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain data about one thing."""


class Piece(NamedTuple):
    """Trees of one layout; `about` is what their head does not say, for whoever noted it."""

    head: RunHead
    about: Any
    memory: Any


def _no_pieces() -> Sequence[Piece]:
    return ()


@dataclass(frozen=True, slots=True)
class Noted:
    """One thing as it was; `pieces` puts together, later and once, what was noted by reference.

    `settling`: numbers are being added to a piece itself, which has its version already.
    """

    facts: Facts
    pieces: Callable[[], Sequence[Piece]] = _no_pieces
    nbytes: int = 0
    settling: bool = False


class CounterFacts(Facts, frozen=True):
    """A counter: where it started, and what it was at."""

    start: int
    value: int


class VariableFacts(Facts, frozen=True):
    """A variable; its pieces are the versions that were kept, `about` each is its stage."""

    bound: int | None
    current: int
    tags: dict[str, int]
    spread: Spreading | None = None


class PartFacts(Facts, frozen=True):
    """What another server than the home has; its pieces are its shares under these stages."""

    stages: list[int]


class QueueFacts(Facts, frozen=True):
    """A queue; `draws` is how far the draws of one with a seed have got.

    Its pieces are its items in an order in which they can be put in again; `about` each are their
    producer and their priority.
    """

    definition: Definition
    delivered: int
    dropped: dict[str, int]
    closed: bool
    draws: list[int] | None = None


class CollectionFacts(Facts, frozen=True):
    """A collection; its pieces are the items that it had on their way, as those of queues.

    `variable` is the key of what stamps them.
    """

    batch_size: int
    max_lag: int | None
    variable: str | None
    capacity: int
    capacity_bytes: int
    delivered: int
    dropped: dict[str, int]

    @property
    def terms(self) -> tuple[Any, ...]:
        """What it was opened with."""
        return (
            self.batch_size,
            self.max_lag,
            self.variable,
            self.capacity,
            self.capacity_bytes,
        )


class BarrierFacts(Facts, frozen=True):
    """A barrier: who waited there arrives again."""

    n: int


class AccumulatorFacts(Facts, frozen=True):
    """An accumulator; its pieces are the gradients that it held, `about` each is whose it was."""

    layout: bytes
    variable: str | None
    max_lag: int | None
    capacity: int
    applied: int
    taken: int
    dropped: dict[str, int]
    taken_at: int | None


class ReaderFacts(Facts, frozen=True):
    """A reader; its pieces are those that it may hand out, and `numbers` which they are, in order.

    `fresh` are those of a stream to be handed out next. What was in somebody's hands is one of
    `returned`, as its epoch, place, number and attempt. `epochs` has the counters of each.
    """

    terms: tuple[int | None, bool, int, float | None, bool]
    given: int
    digest: str
    closed: bool
    epoch: int
    last: int | None
    count: int
    place: int
    fresh: list[int]
    numbers: list[int]
    returned: list[tuple[int, int, int, int]]
    epochs: dict[int, tuple[int, int, int, int]]


def encoded(facts: Facts) -> bytes:
    """Facts as they travel, and as they are written down."""
    return msgspec.msgpack.encode(facts)


def decoded(kind: type[F], data: bytes) -> F:
    """Facts that came with a request or from a file.

    Raises:
        ProtocolError: they are none of that kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ProtocolError(f"{len(data)} bytes are no {kind.__name__}: {e}") from e


def tree_piece(tree: Stored, version: int = NO_VERSION, about: Any = None) -> Piece:
    """A tree as the one item of a piece."""
    head = RunHead(tree.layout, 1, [[value] for value in tree.values], version)
    return Piece(head, about, tree.memory)
