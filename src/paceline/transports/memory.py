"""Within one process: a frame is handed over as it is, and the other end is told at once."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from paceline.core.errors import Disconnected, WouldBlock
from paceline.transports.base import Channel, Frame, HeapArena, Transport


class MemoryChannel(Channel):
    """One end of a pair.

    `waits` is false where everything runs in one thread: a wait for a frame then raises.
    """

    shares_memory = True

    def __init__(self, *, waits: bool) -> None:
        self.on_frame: Callable[[], None] | None = None
        self.idle: Callable[[], float | None] | None = None
        self._waits = waits
        self._inbox: deque[Frame] = deque()
        self._sent = 0
        self._arrived = threading.Condition()
        self._peer: MemoryChannel | None = None

    @classmethod
    def pair(cls, *, waits: bool = True) -> tuple[MemoryChannel, MemoryChannel]:
        """Two ends that are joined."""
        one, two = cls(waits=waits), cls(waits=waits)
        one._peer, two._peer = two, one
        return one, two

    def send(self, frame: Frame, due: float | None = None) -> None:
        peer = self._peer
        if self.closed or peer is None or peer.closed:
            raise Disconnected("the other end of this connection is closed")
        with peer._arrived:
            peer._inbox.append(frame)
            peer._arrived.notify_all()
        if peer.on_frame is not None:
            peer.on_frame()
        if self.idle is not None:
            # Who receives for this end may have to wake earlier, to end what was sent just now.
            with self._arrived:
                self._sent += 1
                self._arrived.notify_all()

    def receive(self, timeout: float | None = None) -> Frame | None:
        if self._inbox:
            return self._inbox.popleft()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            sent = self._sent
            next_tick = self.idle() if self.idle is not None else None
            with self._arrived:
                if self._inbox:
                    return self._inbox.popleft()
                if not self.alive():
                    raise Disconnected("the other end of this connection is closed")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                if not self._waits:
                    raise WouldBlock(
                        "everything runs in this one thread, so nothing can end this wait"
                    )
                if sent == self._sent:
                    limits = [limit for limit in (left, next_tick) if limit is not None]
                    self._arrived.wait(self.interrupts.limit(min(limits, default=None)))
                    self.interrupts.check()

    def alive(self) -> bool:
        return not self.closed and self._peer is not None and not self._peer.closed

    def flush(self) -> None:
        """Nothing is shared that would have to be given back."""

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        peer, self._peer = self._peer, None
        for end in (self, peer):
            if end is not None:
                with end._arrived:
                    end._arrived.notify_all()
        if peer is not None and peer.on_frame is not None:
            peer.on_frame()


def _no_address(place: str, secret: bytes, timeout: float | None) -> Channel:
    raise Disconnected(f"memory:{place} can only be reached through its own server object")


TRANSPORT = Transport(connect=_no_address, arena=HeapArena, listen=_no_address)
