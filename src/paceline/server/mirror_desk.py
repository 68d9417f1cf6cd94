"""What a mirror does: it has versions fetched, once each, and lends them to its host's readers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from paceline.core import messages as m
from paceline.core.mirror_state import Copy, MirrorState, Thing
from paceline.core.names import quoted
from paceline.core.waiting import NOT_YET, Stored
from paceline.server.lines import Peer
from paceline.server.service import Desk, Handler, Service
from paceline.transports.base import Frame, Lease

Fetch: TypeAlias = Callable[[Thing, int], Stored | None]
"""Has a version from its server; `None` where it is not to be had."""

FETCHES = 4
"""How many are on their way at once; others wait for them."""


class MirrorDesk(Desk):
    """The copies of a mirror. `fetch` is called in threads beside the server's."""

    in_containers = False

    def __init__(self, service: Service, fetch: Fetch, keep: int) -> None:
        self._service = service
        self._fetch = fetch
        self.state = MirrorState(keep)

    def handlers(self) -> dict[type, Handler]:
        return {m.Mirrored: self._read}

    def listing(self) -> tuple[str, dict[str, Any]]:
        state = self.state
        return "mirror", {
            "asked": state.asked,
            "fetched": state.fetched,
            "failed": state.failed,
            "fetched_bytes": state.fetched_bytes,
            "copies": sum(copy.stored is not None for copy in state),
            "bytes": state.nbytes,
        }

    def lost(self, peer: Peer) -> None:
        """Copies belong to nobody; what the peer looked at comes back by itself."""

    def reset(self, gone: Callable[[str], bool]) -> None:
        """Containers are the servers'; what has gone there is not asked for any more."""

    def tidy(self) -> None:
        """Drop what nobody has asked for in a while."""
        self.state.tidy(self._service.clock.now())

    def _read(self, peer: Peer, request: m.Mirrored, frame: Frame) -> None:
        thing = Thing(request.address, request.name, request.part, request.home)
        copy, absent = self.state.ask(thing, request.number, self._service.clock.now())
        if absent:
            self._have(copy)

        def attempt() -> Any:
            found = copy.look()
            if found is NOT_YET:
                return NOT_YET
            if found is None:
                return m.Value(m.NO_VERSION, b"", [])
            return self._lent(copy, found)

        def what() -> str:
            return f"read {quoted(request.name)}: it is on its way from {request.address}"

        key = ("copy", thing, request.number)
        self._service.ask(peer, frame, key, attempt, request.timeout, what)

    def _lent(self, copy: Copy, found: Stored) -> Any:
        reply = m.Value(copy.number, found.layout, found.values, found.stage)
        if found.memory is None:
            return reply
        self.state.hold(copy)
        back = partial(self.state.let_go, copy)
        return reply, (Lease(found.memory, partial(self._service.ended.append, back)),)

    def _have(self, copy: Copy) -> None:
        found: list[Stored | None] = [None]

        def work() -> None:
            found[0] = self._fetch(copy.thing, copy.number)

        def finish() -> None:
            self.state.came(copy, found.pop())
            self._service.parking.changed(("copy", copy.thing, copy.number))

        self._service.beside("fetch", FETCHES, work, finish)
