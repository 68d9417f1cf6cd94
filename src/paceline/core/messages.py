"""What travels in a frame's header. A request carries the type of its reply."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from paceline.core import errors

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
    version: int = NO_VERSION
    metrics: dict[str, list[float]] | None = None


class Request(Message, Generic[R], frozen=True, gc=False):
    """A question to a server; `R` is what it answers with."""


# Replies


class Done(Message, tag=100, frozen=True, gc=False):
    """It has been done."""


class Version(Message, tag=101, frozen=True, gc=False):
    """The version that now is."""

    version: int


class Value(Message, tag=102, frozen=True, gc=False):
    """A variable's tree at one version; its arrays are in the frame's buffer."""

    version: int
    layout: bytes
    values: list[Any]


class Defined(Message, tag=103, frozen=True, gc=False):
    """A variable is there. `word` is its place on the board, which may come as a buffer."""

    version: int
    word: int
    fresh: bool


class Items(Message, tag=104, frozen=True, gc=False):
    """Items taken from a queue, to be receipted under `delivery`; buffers in the same order."""

    delivery: int
    items: list[Head]
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
    """The session is a member; the number is its own."""

    session: int
    index: int
    epoch: int


Reply: TypeAlias = Done | Version | Value | Defined | Items | Granted | Text | Failed | Joined


# Requests


class Join(Request[Joined], tag=0, frozen=True, gc=False):
    """Become a member of the cluster under a job and an index."""

    job: str
    index: int
    pid: int


class Leave(Request[Done], tag=1, frozen=True, gc=False):
    """End the membership: what ends afterwards is no death."""


class Cancel(Request[Done], tag=2, frozen=True, gc=False):
    """Stop waiting for request `number`; one way, its own reply is the verdict."""

    number: int


class Resources(Request[Text], tag=3, frozen=True, gc=False):
    """List what is shared."""


class Stop(Request[Done], tag=4, frozen=True, gc=False):
    """End the server."""


class Define(Request[Defined], tag=10, frozen=True, gc=False):
    """Give a variable its first value, or find the one it has."""

    name: str
    head: Head
    overwrite: bool = False


class Await(Request[Defined], tag=11, frozen=True, gc=False):
    """Wait until a variable is initialised."""

    name: str
    timeout: float | None


class Assign(Request[Version], tag=12, frozen=True, gc=False):
    """Replace the whole tree."""

    name: str
    head: Head


class Add(Request[Version], tag=13, frozen=True, gc=False):
    """Add a tree to the current one, leaf by leaf."""

    name: str
    head: Head


class Read(Request[Value], tag=14, frozen=True, gc=False):
    """The current tree, once its version is above `newer_than`."""

    name: str
    newer_than: int
    timeout: float | None


class DefineQueue(Request[Done], tag=20, frozen=True, gc=False):
    """Make a queue, or find the one of the same definition."""

    name: str
    capacity: int
    capacity_bytes: int


class FindQueue(Request[Text], tag=21, frozen=True, gc=False):
    """Wait until a queue is there; its definition."""

    name: str
    timeout: float | None


class Enqueue(Request[Done], tag=22, frozen=True, gc=False):
    """Add items, all or none, once there is room for all."""

    name: str
    items: list[Head]
    timeout: float | None


class Dequeue(Request[Items], tag=23, frozen=True, gc=False):
    """Take `least` to `most` items in one step, once `least` are there."""

    name: str
    least: int
    most: int
    timeout: float | None


class Receipt(Request[Done], tag=24, frozen=True, gc=False):
    """One way: what became of a delivery. `returned` puts its items back at the head."""

    name: str
    delivery: int
    returned: bool = False


class CloseQueue(Request[Done], tag=25, frozen=True, gc=False):
    """No new items; with `cancel` pending enqueues end too."""

    name: str
    cancel: bool


class QueueStats(Request[Text], tag=26, frozen=True, gc=False):
    """A queue's counters."""

    name: str


class OpenCollection(Request[Done], tag=30, frozen=True, gc=False):
    """Make the queue and the pace of one collection."""

    name: str
    variable: str | None
    batch_size: int
    max_lag: int | None
    capacity: int
    capacity_bytes: int


class Offer(Request[Granted], tag=31, frozen=True, gc=False):
    """Hand in finished items and ask to start up to `want` more.

    `abandoned` counts admissions that ended without an item. The items are taken at once; the
    reply waits until at least one more may start, or for `timeout`.
    """

    name: str
    items: list[Head]
    want: Count
    abandoned: Count
    timeout: float | None


class Next(Request[Items], tag=32, frozen=True, gc=False):
    """The trainer asks for its next batch; with `retry` it still asks for the same one."""

    name: str
    retry: bool
    timeout: float | None


class EndCollection(Request[Done], tag=33, frozen=True, gc=False):
    """Stop its workers and drop what is left."""

    name: str


class Drain(Request[Done], tag=35, frozen=True, gc=False):
    """Every worker's function has returned: what is left is all there will be."""

    name: str


class Delivered(Request[Done], tag=36, frozen=True, gc=False):
    """One way: the trainer has its batch, or gives it back."""

    name: str
    delivery: int
    returned: bool = False


class CollectionStats(Request[Text], tag=34, frozen=True, gc=False):
    """A collection's counters."""

    name: str


Requests: TypeAlias = (
    Join
    | Leave
    | Cancel
    | Resources
    | Stop
    | Define
    | Await
    | Assign
    | Add
    | Read
    | DefineQueue
    | FindQueue
    | Enqueue
    | Dequeue
    | Receipt
    | CloseQueue
    | QueueStats
    | OpenCollection
    | Offer
    | Next
    | Drain
    | Delivered
    | EndCollection
    | CollectionStats
)

encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Requests)
_reply = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request[Any]:
    """Decode a request's header.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _request.decode(data)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise errors.ProtocolError(f"{len(data)} bytes are not a request: {e}") from e


def decode_reply(data: bytes) -> Any:
    """Decode a reply's header.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _reply.decode(data)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise errors.ProtocolError(f"{len(data)} bytes are not a reply: {e}") from e


def failure(error: Exception) -> Failed:
    """An error as it travels: its class by name, and its text."""
    known = type(error).__name__
    if isinstance(error, errors.PacelineError):
        return Failed(known, str(error))
    return Failed("PacelineError", f"{known}: {error}")


def revived(failed: Failed) -> errors.PacelineError:
    """The error that a reply stands for."""
    kind = getattr(errors, failed.code, errors.PacelineError)
    if not (isinstance(kind, type) and issubclass(kind, errors.PacelineError)):
        kind = errors.PacelineError
    return kind(failed.text)
