"""A data loader for data your model generates itself.

One process, the chief, trains; N workers, each with its own copy of the model, act with the chief's
newest parameters and send back what happened.
"""

from paceline._version import __version__
from paceline.accumulators import Accumulator, Mean
from paceline.barriers import Barrier
from paceline.batches import Batch
from paceline.checkpoints import CheckpointError
from paceline.cluster import Cluster
from paceline.collection import Collection
from paceline.core.errors import (
    Closed,
    Disconnected,
    FunctionError,
    OperationFailed,
    OutOfMemory,
    PacelineError,
    ProtocolError,
    Refused,
    SchemaError,
    TaskFailed,
    TimedOut,
    TooStale,
    UnknownName,
    Unsupported,
    WasReset,
    WorkerFailed,
    WorkerLeft,
    WouldBlock,
)
from paceline.core.stats import Stats
from paceline.counters import Counter
from paceline.engines.wishes import Ray
from paceline.hosted import Server
from paceline.placement import replica_device_setter
from paceline.queues import Queue
from paceline.readers import Piece, Reader
from paceline.replicas import Replica, ShardedReplica
from paceline.requests import Request
from paceline.rows import Rows
from paceline.session import Session, reset
from paceline.spec import ClusterSpec
from paceline.supervisor import Supervisor
from paceline.transports.tls import Tls
from paceline.variables import Snapshot, Variable
from paceline.worker.handle import Worker

__all__ = [
    "Accumulator",
    "Barrier",
    "Batch",
    "CheckpointError",
    "Closed",
    "Cluster",
    "ClusterSpec",
    "Collection",
    "Counter",
    "Disconnected",
    "FunctionError",
    "Mean",
    "OperationFailed",
    "OutOfMemory",
    "PacelineError",
    "Piece",
    "ProtocolError",
    "Queue",
    "Ray",
    "Reader",
    "Refused",
    "Replica",
    "Request",
    "Rows",
    "SchemaError",
    "Server",
    "Session",
    "ShardedReplica",
    "Snapshot",
    "Stats",
    "Supervisor",
    "TaskFailed",
    "TimedOut",
    "Tls",
    "TooStale",
    "UnknownName",
    "Unsupported",
    "Variable",
    "WasReset",
    "Worker",
    "WorkerFailed",
    "WorkerLeft",
    "WouldBlock",
    "__version__",
    "replica_device_setter",
    "reset",
]
