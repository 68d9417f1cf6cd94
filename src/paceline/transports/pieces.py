"""Bytes on their way out of a socket, one frame after the other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.transports.base import Memory, Stuck

SEND_PAUSE = 0.5
"""Seconds without a byte taken after which a call whose time is up does not wait any longer."""


class Piece(NamedTuple):
    """Bytes on their way out: what goes along with the first of them, and what they lie in."""

    data: memoryview
    along: Sequence[Any] = ()
    memory: Memory | None = None

    @property
    def copied(self) -> int:
        """How many bytes nobody else needs."""
        return len(self.data) if self.memory is None else 0


def drop(pieces: deque[Piece], sent: int) -> int:
    """Forget the first `sent` bytes; how many of them had been copied."""
    copied = 0
    while sent:
        data, _, memory = pieces[0]
        gone = min(sent, len(data))
        sent -= gone
        if memory is None:
            copied += gone
        if gone < len(data):
            pieces[0] = Piece(data[gone:], (), memory)
        else:
            pieces.popleft()
    return copied


def locked(lock: threading.Lock, due: float | None) -> None:
    """Take the lock that a sender has.

    Raises:
        Stuck: another thread has it, and that lasts.
    """
    limit = -1.0 if due is None else max(0.0, due - time.monotonic()) + SEND_PAUSE
    if not lock.acquire(timeout=limit):
        raise Stuck("the server does not read what another thread sends")
