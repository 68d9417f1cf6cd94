"""What the tests on Ray share: its nodes, and a look at what is left on them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import until

ray = pytest.importorskip("ray")

# Ray's own: what it says of versions to come, and files that it leaves to the collector.
warned = pytest.mark.filterwarnings("default")


def acting() -> set[int]:
    """The processes of actors on this machine. Their names change with what they are at."""
    found = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            words = Path("/proc", entry, "cmdline").read_bytes().partition(b"\0")[0].decode()
            if words.startswith("ray::") and "IDLE" not in words:
                found.add(int(entry))
    return found


@contextlib.contextmanager
def joined(**options: Any) -> Iterator[None]:
    """A Ray cluster of this machine, with nothing in its environment that the tests look for."""
    from conftest import MARK_NAME  # which is no module for actors: it sets signal handlers

    mark = os.environ.pop(MARK_NAME)
    try:
        ray.init("local", include_dashboard=False, logging_level="error", **options)
        yield
    finally:
        ray.shutdown()
        os.environ[MARK_NAME] = mark


@contextlib.contextmanager
def nothing_of_ours() -> Iterator[None]:
    """Fail where a thread, an actor, or what one takes of the cluster is left."""
    threads, actors, groups = set(threading.enumerate()), acting(), _groups()
    yield
    until(lambda: not {t for t in threading.enumerate() if t.name.startswith("pace")} - threads, 5)
    until(lambda: not acting() - actors, 10)
    until(lambda: not _groups() - groups, 10)


def _groups() -> set[str]:
    """What takes something of the cluster."""
    table = ray.util.placement_group_table() if ray.is_initialized() else {}
    return {name for name, each in table.items() if each["state"] != "REMOVED"}
