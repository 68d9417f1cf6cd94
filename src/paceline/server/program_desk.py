"""What a server does about the works of a program that all tasks run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core import messages as m
from paceline.core.program_state import ProgramState
from paceline.core.waiting import NOT_YET
from paceline.server.frames import buffer, stored
from paceline.server.lines import Peer
from paceline.server.service import Desk, Handler, Service
from paceline.transports.base import Frame

_KEY = ("program",)


class ProgramDesk(Desk):
    """The program of a cluster whose tasks were started by hand; sessions ask the first server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._state = ProgramState()

    def handlers(self) -> dict[type, Handler]:
        return {
            m.TakePart: self._take_part,
            m.BeginWork: self._begin,
            m.EndWork: self._end,
            m.EndPart: self._end_part,
            m.TakeResult: self._take_result,
        }

    def listing(self) -> tuple[str, dict[str, Any]]:
        # Only the first server has one, and the others' lists add nothing to its own.
        stats = self._state.stats()
        return "program", stats if stats["begun"] else {}

    def lost(self, peer: Peer) -> None:
        self._state.lost(peer)

    def reset(self, gone: Callable[[str], bool]) -> None:
        """A program is in no container."""

    def _begin(self, peer: Peer, request: m.BeginWork, frame: Frame) -> None:
        found = self._state.begin(peer, request.number, request.what, request.collection)
        self._service.answer(peer, frame.request, m.Text(list(found)))
        self._service.parking.changed(_KEY)

    def _end(self, peer: Peer, request: m.EndWork, frame: Frame) -> None:
        if self._state.holder is peer:
            self._state.end(request.number)
        self._service.answer(peer, frame.request, m.Done())
        self._service.parking.changed(_KEY)

    def _end_part(self, peer: Peer, request: m.EndPart, frame: Frame) -> None:
        result = None if request.head is None else stored(request.head, buffer(frame, 0))
        self._state.end_part(peer.name, request.number, request.life, request.error, result)
        self._service.answer(peer, frame.request, m.Done())
        self._service.parking.changed(_KEY)

    def _take_result(self, peer: Peer, request: m.TakeResult, frame: Frame) -> None:
        def attempt() -> Any:
            part = self._state.result(request.number, request.task)
            if part is NOT_YET:
                return NOT_YET
            if part.result is None:
                return m.Result(b"", [])
            tree = part.result
            return m.Result(tree.layout, tree.values), (tree.memory,)

        def what() -> str:
            return (
                f"result of work {request.number}: {request.task} has not ended its function;"
                f" {self._service.who()}"
            )

        self._service.ask(peer, frame, _KEY, attempt, request.timeout, what)

    def _take_part(self, peer: Peer, request: m.TakePart, frame: Frame) -> None:
        until_over = request.until_over

        def attempt() -> Any:
            found = self._state.take_part(
                peer.name, request.number, request.what, request.life, until_over=until_over
            )
            return found if found is NOT_YET else m.Text(list(found))

        def what() -> str:
            done = "ended" if until_over else "begun"
            return (
                f"the chief has not {done} work {request.number}, {request.what};"
                f" {self._service.who()}"
            )

        self._service.ask(peer, frame, _KEY, attempt, request.timeout, what)
