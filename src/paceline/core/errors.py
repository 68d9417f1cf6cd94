"""Every error that users meet, told apart by who must act.

A message says, on one line, what was asked, what was found, and what was wanted or exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PacelineError(Exception):
    """Base of all errors that paceline raises.

    Where a call to a worker failed, `input` is what its function was given.
    """

    input: Any = None


class Closed(PacelineError):
    """You (or your program) closed it: a queue, a collection, a session, a cluster."""


class WasReset(Closed):
    """Somebody reset the container that it was in; the message says who."""


class Disconnected(PacelineError):
    """They are gone: the process at the other end of a connection ended or was cut off.

    Or it is there and silent, and the call's `timeout` has been over for 2 s at most: then the
    message says "no verdict", and the session goes on when the other end does.
    """


class TimedOut(PacelineError, TimeoutError):
    """Not yet: the deadline passed, nothing was changed, and asking again is safe."""


class SchemaError(PacelineError, ValueError):
    """The data does not have the declared structure; the message names the first odd leaf."""


class UnknownName(PacelineError, KeyError):
    """There is no such thing; the message lists what there is."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class WorkerFailed(PacelineError):
    """A worker cannot run; the message ends with the worker's own traceback."""


class WorkerLeft(PacelineError):
    """One whose part others wait for has left or died; the message names it."""


class TaskFailed(PacelineError):
    """A function that was called in a worker raised; the message ends with its traceback."""


class OperationFailed(PacelineError):
    """An operation raised; the message ends with its traceback."""


class WouldBlock(PacelineError):
    """This wait could never end: everything is in one thread, or in one round of lockstep."""


class TooStale(PacelineError):
    """Item after item was too old for the trainer; the message names versions and causes."""


class FunctionError(PacelineError, TypeError):
    """A function cannot be sent to a worker, or does not do what its role asks of it."""


class OutOfMemory(PacelineError, MemoryError):
    """Shared memory for the data is not to be had; the message has the numbers."""


class Refused(PacelineError, PermissionError):
    """The other end would not have us: wrong secret, other protocol version, a second chief."""


class ProtocolError(PacelineError):
    """A peer sent what the protocol does not allow; its connection is closed."""


class Unsupported(PacelineError, NotImplementedError):
    """This platform or installation cannot do it; the message names the way out."""


@contextmanager
def said_of(what: str, kind: type[PacelineError] = SchemaError) -> Iterator[None]:
    """Begin the message of an error of that kind with what was asked."""
    try:
        yield
    except kind as e:
        raise kind(f"{what}: {e}") from e


# A traceback shows them under the names that users import.
for _error in [PacelineError, *PacelineError.__subclasses__(), WasReset]:
    _error.__module__ = "paceline"
