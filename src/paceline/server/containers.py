"""What all desks do alike about containers: nothing reaches what a reset has removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from paceline.core.clock import Clock
from paceline.core.container_state import ContainerState
from paceline.core.names import parts
from paceline.server.lines import Peer
from paceline.server.parking import Parking
from paceline.transports.base import Frame

Handler: TypeAlias = Callable[[Peer, Any, Frame], None]
Gone: TypeAlias = Callable[[str], bool]


class Containers:
    """The containers of a server. Desks put what they do about a reset into `on_reset`.

    Attributes:
        asked: the key that the request in hand is about.
    """

    def __init__(self, parking: Parking, clock: Clock, epoch: int) -> None:
        self.state = ContainerState(epoch)
        self.on_reset: list[Callable[[Gone], None]] = []
        self.asked: str | None = None
        self._parking = parking
        self._clock = clock

    def guarded(self, handlers: dict[type, Handler]) -> dict[type, Handler]:
        """The same, for keys that are not gone; the others hear `WasReset`."""
        return {
            kind: self._guarded(handler) if "name" in _fields(kind) else handler
            for kind, handler in handlers.items()
        }

    def _guarded(self, handler: Handler) -> Handler:
        def guarded(peer: Peer, request: Any, frame: Frame) -> None:
            self.meet(request.name)
            self.asked = request.name
            try:
                handler(peer, request, frame)
            finally:
                self.asked = None

        return guarded

    def meet(self, key: str) -> None:
        """Somebody asks with a key; raises `WasReset` if what it was a key of is gone."""
        if self.state.ahead(key):
            # The reset has reached the first server, and not yet, or never, this one.
            _, container, number = parts(key)
            self.reset([container], "", number)

    def check(self, key: str) -> None:
        """Raise `WasReset` if what it was a key of is gone."""
        self.state.ahead(key)

    def reset(
        self, containers: list[str] | None, by: str, number: int | None = None
    ) -> tuple[int, int]:
        """Remove what is in these containers, in all for `None`, and end all waits for it.

        Returns the number of the reset, and how many things there were.

        Raises:
            SchemaError: one can be no container, or too many were reset by name.
        """
        before = len(self.state.made)
        number = self.state.reset(containers, by, number)
        removed = before - len(self.state.made)
        # First the waits: what they need to end is still there.
        self._parking.end_those(self.state.gone, self.state.was_reset)
        for forget in self.on_reset:
            forget(self.state.gone)
        return number, removed

    def made(self, kind: str, key: str, peer: Peer) -> None:
        """A peer has made something."""
        self.state.add(kind, key, peer.name, self._clock.now())

    def listing(self) -> list[tuple[str, str, str, str, float]]:
        """What there is: its kind, its name, its container, by whom it was made, how long ago."""
        now = self._clock.now()
        return [
            (kind, *parts(key)[:2], made.by, now - made.at)
            for (kind, key), made in self.state.made.items()
        ]


def _fields(kind: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = kind.__struct_fields__
    return found
