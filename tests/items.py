"""Runs of marked items, as the states in `core/` keep them."""

from __future__ import annotations

from typing import Any

from paceline.core.messages import NO_VERSION, RunHead
from paceline.core.queue_items import Run


def run(
    *marks: int,
    producer: str = "p",
    nbytes: int = 1,
    stamp: int = NO_VERSION,
    owner: Any = None,
    priority: int = 0,
) -> Run:
    """Items with these marks, `nbytes` each, in one run."""
    head = RunHead(b"", len(marks), [list(marks)], stamp)
    return Run(head, None, nbytes, producer, owner or producer, priority=priority)


def marks(found: Any) -> list[int]:
    """The marks of the items in runs, in order."""
    assert isinstance(found, list), f"{found}: no items"
    return [mark for run in found for mark in run.content()[0].columns[0]]
