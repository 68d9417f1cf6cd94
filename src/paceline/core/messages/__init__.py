"""What travels in a frame's header. A request carries the type of its reply."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from paceline.core import errors
from paceline.core.elements import check_elements
from paceline.core.messages.accumulators import (
    AccumulatorStats,
    Apply,
    Contribute,
    DefineAccumulator,
    Take,
)
from paceline.core.messages.cluster import Locate, RequestStop, Stopping
from paceline.core.messages.collections import (
    CollectionStats,
    Delivered,
    Drain,
    EndCollection,
    Free,
    Make,
    Next,
    Offer,
    OpenCollection,
)
from paceline.core.messages.containers import Enter, Reset
from paceline.core.messages.cuts import Bring, Fetch, Freeze, Note, Noticed, Revive, Thaw
from paceline.core.messages.members import (
    Cancel,
    Dead,
    Join,
    Leave,
    Outlived,
    Rejoin,
    Report,
    Resources,
    Restored,
    Stats,
    Stop,
)
from paceline.core.messages.mirrors import Mirrored, ReadAt
from paceline.core.messages.operations import FindOperation, RunOperation
from paceline.core.messages.parts import (
    Abandon,
    Begin,
    Commit,
    CommitFirst,
    GatherHome,
    GatherPart,
    LetGo,
    Pieces,
    ReadPart,
    Stage,
)
from paceline.core.messages.program import BeginWork, EndPart, EndWork, TakePart, TakeResult
from paceline.core.messages.queues import (
    CloseQueue,
    DefineQueue,
    Dequeue,
    Enqueue,
    FindQueue,
    QueueStats,
    Receipt,
)
from paceline.core.messages.replies import (
    NO_VERSION,
    Answers,
    Count,
    Defined,
    Done,
    Failed,
    Fetched,
    Granted,
    Head,
    Items,
    Joined,
    Mean,
    Message,
    PieceHead,
    R,
    Rejoined,
    Reply,
    Request,
    Result,
    RunHead,
    Spreading,
    Staging,
    Text,
    Value,
    Version,
)
from paceline.core.messages.rows import Gather, ScatterAdd
from paceline.core.messages.together import Joinable, Part, Together
from paceline.core.messages.variables import (
    Add,
    Assign,
    Await,
    Define,
    Read,
    ReadTag,
    Tag,
    Tags,
    Untag,
    Usage,
)
from paceline.core.messages.work import (
    AbortBarrier,
    AddToCounter,
    Arrive,
    AwaitCounter,
    DefineBarrier,
    DefineCounter,
    DefineReader,
    EndPiece,
    FeedReader,
    NextPiece,
)
from paceline.core.names import shown

__all__ = [
    "NO_VERSION",
    "Abandon",
    "AbortBarrier",
    "AccumulatorStats",
    "Add",
    "AddToCounter",
    "Answers",
    "Apply",
    "Arrive",
    "Assign",
    "Await",
    "AwaitCounter",
    "Begin",
    "BeginWork",
    "Bring",
    "Cancel",
    "CloseQueue",
    "CollectionStats",
    "Commit",
    "CommitFirst",
    "Contribute",
    "Count",
    "Dead",
    "Define",
    "DefineAccumulator",
    "DefineBarrier",
    "DefineCounter",
    "DefineQueue",
    "DefineReader",
    "Defined",
    "Delivered",
    "Dequeue",
    "Done",
    "Drain",
    "EndCollection",
    "EndPart",
    "EndPiece",
    "EndWork",
    "Enqueue",
    "Enter",
    "Failed",
    "FeedReader",
    "Fetch",
    "Fetched",
    "FindOperation",
    "FindQueue",
    "Free",
    "Freeze",
    "Gather",
    "GatherHome",
    "GatherPart",
    "Granted",
    "Head",
    "Items",
    "Join",
    "Joinable",
    "Joined",
    "Leave",
    "LetGo",
    "Locate",
    "Make",
    "Mean",
    "Message",
    "Mirrored",
    "Next",
    "NextPiece",
    "Note",
    "Noticed",
    "Offer",
    "OpenCollection",
    "Outlived",
    "Part",
    "PieceHead",
    "Pieces",
    "QueueStats",
    "R",
    "Read",
    "ReadAt",
    "ReadPart",
    "ReadTag",
    "Receipt",
    "Rejoin",
    "Rejoined",
    "Reply",
    "Report",
    "Request",
    "RequestStop",
    "Requests",
    "Reset",
    "Resources",
    "Restored",
    "Result",
    "Revive",
    "RunHead",
    "RunOperation",
    "ScatterAdd",
    "Spreading",
    "Stage",
    "Staging",
    "Stats",
    "Stop",
    "Stopping",
    "Tag",
    "Tags",
    "Take",
    "TakePart",
    "TakeResult",
    "Text",
    "Thaw",
    "Together",
    "Untag",
    "Usage",
    "Value",
    "Version",
    "decode_reply",
    "decode_request",
    "encode",
    "failure",
    "revived",
]

Requests: TypeAlias = (
    Join
    | Rejoin
    | Outlived
    | Leave
    | Cancel
    | Report
    | Resources
    | Restored
    | Dead
    | Stats
    | Stop
    | Define
    | Await
    | Assign
    | Add
    | Read
    | ReadTag
    | ReadAt
    | Mirrored
    | Tag
    | Untag
    | Tags
    | Usage
    | Gather
    | ScatterAdd
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
    | EndCollection
    | TakePart
    | BeginWork
    | EndWork
    | EndPart
    | TakeResult
    | Free
    | Make
    | Drain
    | Delivered
    | CollectionStats
    | DefineCounter
    | AddToCounter
    | AwaitCounter
    | DefineBarrier
    | Arrive
    | AbortBarrier
    | Enter
    | Reset
    | Locate
    | RequestStop
    | Stopping
    | DefineReader
    | NextPiece
    | EndPiece
    | FeedReader
    | DefineAccumulator
    | Apply
    | Take
    | Contribute
    | AccumulatorStats
    | FindOperation
    | RunOperation
    | Begin
    | Abandon
    | CommitFirst
    | Commit
    | Stage
    | ReadPart
    | LetGo
    | GatherHome
    | GatherPart
    | Together
    | Freeze
    | Note
    | Thaw
    | Fetch
    | Bring
    | Noticed
    | Revive
)

encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Requests)
_reply = msgspec.msgpack.Decoder(Reply)


def decode_request(data: bytes) -> Request[Any]:
    """Decode a request's header.

    Raises:
        ProtocolError: it is none.
        SchemaError: it has more values than a request may have.
    """
    try:
        check_elements(data)
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
        return Failed(known, shown(str(error)))
    return Failed("PacelineError", shown(f"{known}: {error}"))


def revived(failed: Failed) -> errors.PacelineError:
    """The error that a reply stands for."""
    kind = getattr(errors, failed.code, errors.PacelineError)
    if not (isinstance(kind, type) and issubclass(kind, errors.PacelineError)):
        kind = errors.PacelineError
    return kind(failed.text)
