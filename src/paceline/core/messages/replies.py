"""What a server answers with, and what all messages have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from paceline.core.account import SERVER

R = TypeVar("R")

NO_VERSION = -1

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
"""A number that would turn a ledger around if a peer sent it with a minus; decoding refuses it."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages: compact on the wire, immutable in memory."""


class Head(Message, frozen=True, gc=False):
    """A tree without its arrays, which lie in the buffer at the same place of the frame's list."""

    layout: bytes
    values: list[Any]


Some: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
"""How many there are of what there is."""


class RunHead(Message, frozen=True, gc=False):
    """`count` items of one layout without their arrays, which lie in the buffer, row after row.

    `columns` has for each plain leaf the values of all items. All have one stamp; `metrics` are
    what was logged with each item, or empty.
    """

    layout: bytes
    count: Some
    columns: list[list[Any]]
    version: int = NO_VERSION
    metrics: list[dict[str, list[float]]] = []


class Request(Message, Generic[R], frozen=True, gc=False):
    """A question to a server; `R` is what it answers with.

    `cause` is what the time of a wait for it goes to.
    """

    cause: ClassVar[str] = SERVER


class Done(Message, tag=100, frozen=True, gc=False):
    """It has been done."""


class Version(Message, tag=101, frozen=True, gc=False):
    """The version that now is."""

    version: int


class Value(Message, tag=102, frozen=True, gc=False):
    """A variable's tree at one version; its arrays are in the frame's buffer.

    Of one that is spread it is the home's share, and `stage` is what the others have theirs under.
    """

    version: int
    layout: bytes
    values: list[Any]
    stage: int = 0


class Spreading(Message, frozen=True, gc=False):
    """The layout of a tree that is spread over servers, and which task has what of it.

    The first part is the home's. A piece is the number of a leaf, the first of its rows, and the
    one after the last; -1 for all of the leaf.
    """

    layout: bytes
    parts: list[tuple[str, list[tuple[int, int, int]]]]


class Defined(Message, tag=103, frozen=True, gc=False):
    """A variable is there. `word` is its place on the board, which may come as a buffer."""

    version: int
    word: int
    fresh: bool
    bounded: bool = False
    spread: Spreading | None = None


class Items(Message, tag=104, frozen=True, gc=False):
    """Items taken from a queue, to be receipted under `delivery`; buffers in the same order.

    For each run there is one producer, and one lag where anything is stamped.
    """

    delivery: int
    runs: list[RunHead]
    lags: list[int] = []
    producers: list[str] = []


class Granted(Message, tag=105, frozen=True, gc=False):
    """How many more items may be started; 0 when the wait ended without one."""

    items: int


class Text(Message, tag=106, frozen=True, gc=False):
    """Names or counters, as JSON would hold them."""

    content: Any


class Failed(Message, tag=107, frozen=True, gc=False):
    """The request failed; `code` is the error's class."""

    code: str
    text: str


class Joined(Message, tag=108, frozen=True, gc=False):
    """The session is a member; the number is its own.

    `linger` is for how many seconds it stays one when its connection has broken. Of several servers
    `servers` has all tasks and targets, to a session that was not given them. `incarnation` is
    another one each time that a server is started.
    """

    session: int
    index: int
    epoch: int
    linger: float = 0.0
    servers: list[tuple[str, str]] = []
    incarnation: int = 0


class Rejoined(Message, tag=109, frozen=True, gc=False):
    """The session goes on; `received` counts the frames of its own that the server has had."""

    received: int


class PieceHead(Message, tag=140, frozen=True, gc=False):
    """A piece of a reader's work, held under `delivery`; 0 when there will be no more.

    `number` is its place among all pieces, `attempt` how often it has been handed out.
    """

    delivery: int
    epoch: int = 0
    number: int = 0
    attempt: int = 0
    layout: bytes = b""
    values: list[Any] = []


class Mean(Message, tag=150, frozen=True, gc=False):
    """The mean of gradients; its arrays are in the frame's buffer.

    `version` is the variable's at that moment, if there is one; there is a producer and a lag for
    each gradient.
    """

    version: int
    layout: bytes
    values: list[Any]
    producers: list[str]
    lags: list[int]


class Result(Message, tag=155, frozen=True, gc=False):
    """What an operation returned; its arrays are in the frame's buffer."""

    layout: bytes
    values: list[Any]


class Staging(Message, tag=160, frozen=True, gc=False):
    """A write may begin, to be staged under `stage`; 0 when there is nothing to write.

    `base` is the stage of the current `version`. Parts need the stages of `keep`, and of all others
    none below `below`.
    """

    stage: int
    base: int = 0
    version: int = NO_VERSION
    keep: list[int] = []
    below: int = 0


class Answers(Message, tag=157, frozen=True, gc=False):
    """What each of several requests is answered with, and how many buffers are its own."""

    replies: list[Version | Value | Text | Done | Items]
    buffers: list[Count]


class Fetched(Message, tag=161, frozen=True, gc=False):
    """Some of what was noted of one thing; the arrays are in the frame's buffers.

    `facts` come with the first piece; `about` says of each piece what its head does not.
    """

    facts: bytes
    heads: list[RunHead]
    about: list[Any]
    more: bool


Reply: TypeAlias = (
    Done
    | Version
    | Value
    | Defined
    | Items
    | Granted
    | Text
    | Failed
    | Joined
    | Rejoined
    | PieceHead
    | Mean
    | Result
    | Staging
    | Answers
    | Fetched
)
