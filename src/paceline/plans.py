"""What `collect` was asked for, checked: the same for all who have a part in it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import functions
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import FunctionError, SchemaError
from paceline.core.names import label
from paceline.core.numbers import whole
from paceline.core.schedule import SCHEDULES, ScheduleName
from paceline.lines import Lines
from paceline.variables import Variable


class _FirstVariable(enum.Enum):
    FIRST = "the first variable among the resources"

    def __repr__(self) -> str:
        return f"<{self.value}>"


FIRST_VARIABLE: Any = _FirstVariable.FIRST

MOST_AHEAD = 64
"""Items that a worker may have admitted at a time, if they are quick."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A function to collect from, its resources, and at which pace."""

    fn: Callable[..., Any]
    resources: tuple[Any, ...]
    batch_size: int
    max_lag: int | None
    schedule: ScheduleName
    capacity: int
    capacity_bytes: int
    stamps: str | None

    def name(self, number: int) -> str:
        """The name of its collection, the `number`-th of the program."""
        return f"{getattr(self.fn, '__name__', 'collect')}-{number}"

    def definition(self, job: str) -> str:
        """What it is, as a text: the same for all who mean the same."""
        stamps = None if self.stamps is None else label(self.stamps)
        return (
            f"collect({functions.name_of(self.fn)}, batch_size={self.batch_size},"
            f" max_lag={self.max_lag}, version_of={stamps!r}, schedule={self.schedule!r},"
            f" job={job!r}, capacity={self.capacity}, capacity_bytes={self.capacity_bytes})"
        )

    def ahead(self, workers: int) -> int:
        """How many items each worker may have admitted at a time."""
        return max(1, min(MOST_AHEAD, self.batch_size // workers))

    def payload(self) -> bytes:
        """The function and its resources, as they travel to a worker.

        Raises:
            FunctionError: they cannot; the message names what was captured.
        """
        try:
            return functions.dump((self.fn, self.resources))
        except FunctionError:
            functions.dump(self.fn)  # by itself, so that an error speaks of it
            raise

    def home(self, lines: Lines, key: str) -> Connection:
        """The line to the server that its collection is on: that of the variable that stamps.

        Raises:
            SchemaError: in lockstep a variable is on another server, so not in its rounds.
        """
        near = None
        if self.stamps is not None:
            near = lines.home("variable", self.stamps, make=False)
        home = lines.home("collection", key, near=near)
        for each in self.resources if self.schedule == "lockstep" else ():
            if isinstance(each, Variable) and lines.home("variable", each.key, make=False) != home:
                raise SchemaError(
                    f"in lockstep all variables are on one server, and {each.called} is not where"
                    f" the collection is, {lines.task(home)}: make it there (session.device)"
                )
        return home

    def opening(
        self, name: str, turns: list[str] | None, makers: list[str] | None = None
    ) -> m.OpenCollection:
        """What makes its collection; `turns` are the workers in the order of theirs.

        `makers` are its workers where nobody looks after them.
        """
        return m.OpenCollection(
            name,
            self.stamps,
            self.batch_size,
            self.max_lag,
            self.capacity,
            self.capacity_bytes,
            turns,
            makers,
        )


def planned(
    fn: Callable[..., Any],
    resources: tuple[Any, ...],
    *,
    batch_size: int,
    max_lag: int | None,
    version_of: Any,
    schedule: ScheduleName,
    capacity: int | None,
    capacity_bytes: int,
) -> Plan:
    """What the arguments of `collect` say.

    Raises:
        SchemaError: a number is out of bounds; the message says which.
    """
    if max_lag is not None:
        max_lag = whole(max_lag, "max_lag", 0, ", or None")
    batch_size = whole(batch_size, "batch_size")
    if schedule not in SCHEDULES:
        raise SchemaError(f"no schedule {schedule!r}; there are {list(SCHEDULES)}")
    ahead = 4 if max_lag is None else max_lag
    capacity = (ahead + 1) * batch_size if capacity is None else whole(capacity, "capacity")
    capacity_bytes = whole(capacity_bytes, "capacity_bytes")
    if capacity < batch_size:
        raise SchemaError(f"batch_size={batch_size} is outside of 1 to capacity={capacity}")
    stamps = _stamping(version_of, resources)
    return Plan(fn, resources, batch_size, max_lag, schedule, capacity, capacity_bytes, stamps)


def _stamping(version_of: Any, resources: tuple[Any, ...]) -> str | None:
    there = [r for r in resources if isinstance(r, Variable)]
    if version_of is FIRST_VARIABLE or version_of is None:
        return there[0].key if there and version_of is not None else None
    handle = isinstance(version_of, Variable)
    for one in there:
        if one.key == version_of.key if handle else one.name == version_of:
            return one.key
    raise SchemaError(
        f"version_of={version_of.name if handle else version_of!r} is not among the resources'"
        f" variables {[one.name for one in there]}"
    )
