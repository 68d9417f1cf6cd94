"""Who alone is heard while all servers are taken as they are, and what came from others since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.core import messages as m
from paceline.server.lines import Peer
from paceline.transports.base import Frame

KEPT_FRAMES = 4096
KEPT_BYTES = 1 << 32
"""What may come from others before they are heard all the same."""

OF_A_CUT = (m.Freeze, m.Note, m.Thaw)

ALWAYS = (m.Rejoin, m.Stopping)
"""What is carried out all the same: a session goes on, and sees that the server is alive."""


class Freezing:
    """Keeps the requests of all while one session takes note, which are carried out afterwards.

    They are kept in the order in which they came, and ends of sessions among them. What a session
    asks after its own requests were kept waits behind them.

    Attributes:
        by: who is heard; `None` if it is not frozen.
        active: whether requests are to be kept.
        number: of the last freeze.
    """

    def __init__(self) -> None:
        self.by: Peer | None = None
        self.active = False
        self.number = 0
        self._kept: deque[tuple[Peer, Frame | None]] = deque()
        self._nbytes = 0

    @property
    def due(self) -> bool:
        """Whether there is something to carry out now."""
        return self.by is None and bool(self._kept)

    def freeze(self, peer: Peer) -> int:
        """From now on hear that session alone; the number of this freeze."""
        self.by, self.active = peer, True
        self.number += 1
        return self.number

    def thaw(self) -> None:
        """Hear everybody; what was kept is due."""
        self.by, self.active = None, bool(self._kept)

    def keeps(self, peer: Peer, request: m.Request[object], frame: Frame) -> bool:
        """Keep a request, unless it is to be carried out now; whether it was kept."""
        if isinstance(request, ALWAYS) or (peer is self.by and isinstance(request, OF_A_CUT)):
            return False
        self._kept.append((peer, frame))
        self._nbytes += _nbytes(frame)
        if len(self._kept) > KEPT_FRAMES or self._nbytes > KEPT_BYTES:
            self.thaw()
        return True

    def lost(self, peer: Peer) -> bool:
        """A session has ended; whether that was kept. If it is the one that is heard, all are."""
        if peer is self.by:
            self.thaw()
        if self.active:
            self._kept.append((peer, None))
        return self.active

    def catch_up(self, feed: Callable[[Peer, Frame], None], lost: Callable[[Peer], None]) -> None:
        """Carry out what was kept, in order, until it is frozen again."""
        while self.due:
            peer, frame = self._kept.popleft()
            if frame is None:
                lost(peer)
            else:
                self._nbytes -= _nbytes(frame)
                feed(peer, frame)
        self.active = self.by is not None or bool(self._kept)


def _nbytes(frame: Frame) -> int:
    return sum(each.nbytes for each in frame.buffers if each is not None)
