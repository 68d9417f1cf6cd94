"""Frames that survive the connections they are sent over: each arrives once, and in order.

Both ends of a line count its frames, and every frame says how many of the other end's its sender
has had. A connection may end in the middle of anything. On the next one both ends first say how
many frames they have had, and then each sends again what the other lacks.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from paceline.core.errors import ProtocolError

F = TypeVar("F")


class Window(Generic[F]):
    """One end of a line: what it has sent that may not have arrived, and what it has had.

    Attributes:
        sent: how many frames it has sent, over all connections.
        received: how many of the other end's it has had.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self._unacknowledged: deque[F] = deque()

    def __len__(self) -> int:
        """How many frames it keeps."""
        return len(self._unacknowledged)

    def sending(self, frame: F) -> None:
        """Keep a frame that is being sent, until the other end says that it has it."""
        self._unacknowledged.append(frame)
        self.sent += 1

    def arrived(self, acknowledged: int) -> None:
        """One more frame of the other end is here; raises as `acknowledge`."""
        self.received += 1
        self.acknowledge(acknowledged)

    def acknowledge(self, received: int) -> None:
        """The other end has had that many frames; it may have said so before.

        Raises:
            ProtocolError: more than were sent.
        """
        if received > self.sent:
            raise ProtocolError(f"{received} frames were acknowledged, {self.sent} were sent")
        while self.sent - len(self._unacknowledged) < received:
            self._unacknowledged.popleft()

    def missing(self, received: int) -> list[F]:
        """What an end that has had that many frames lacks, in order.

        Raises:
            ProtocolError: it cannot be: more than were sent, or fewer than it had before.
        """
        self.acknowledge(received)
        if received < self.sent - len(self._unacknowledged):
            forgotten = self.sent - len(self._unacknowledged)
            raise ProtocolError(f"{received} frames are said to have arrived, it was {forgotten}")
        return list(self._unacknowledged)
