"""What a server does with operations: functions of its own process that sessions call."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from paceline.core import messages as m
from paceline.core.errors import OperationFailed, SchemaError, WouldBlock
from paceline.core.names import checked
from paceline.core.operation_state import Call, How, LaneState, OperationState
from paceline.core.waiting import NOT_YET, Stored
from paceline.server.frames import buffer, stored
from paceline.server.lines import Peer
from paceline.server.named_desk import NamedDesk
from paceline.server.parking import Parked
from paceline.server.service import Handler, Service
from paceline.transports.base import Frame

Run: TypeAlias = Callable[[list[Stored], tuple[str, ...]], list[Any]]
"""Calls a function with trees, in one; a reply with its buffers, or an error, for each of them.

It is told within which threads it runs, for the calls that the function makes in turn.
"""

SHARED = ""
"""The lane of operations that have no threads of their own."""


class OperationDesk(NamedDesk[OperationState]):
    """The operations of a server."""

    in_containers = False
    kind = "operation"
    made_by = "@server.operation('{}')"

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._token = secrets.token_hex(8)
        self._runs: dict[str, Run] = {}
        self._lanes: dict[str, LaneState] = {SHARED: LaneState(SHARED, 1)}
        self._alarms: dict[str, float] = {}
        self._calls = 0

    def handlers(self) -> dict[type, Handler]:
        return {m.FindOperation: self._find, m.RunOperation: self._run}

    def lost(self, peer: Peer) -> None:
        for lane in self._lanes.values():
            for call in [call for call in lane.calls if call.caller is peer]:
                lane.give_up(call)
        for state in self.states.values():
            state.lost(peer)
        for lane in self._lanes.values():
            self._dispatch(lane)

    def reset(self, gone: Callable[[str], bool]) -> None:
        """An operation is a function of the process, in no container."""

    def register(self, name: str, how: How, run: Run) -> None:
        """From now on sessions can call it.

        Raises:
            SchemaError: there is one of that name.
        """
        if name in self.states:
            raise SchemaError(f"operation '{name}' is registered already")
        lane = SHARED if how.threads is None else checked(name)
        if lane not in self._lanes:
            self._lanes[lane] = LaneState(lane, how.threads or 1)
        self._runs[name] = run
        self.states[checked(name)] = OperationState(name, how)
        self._service.parking.changed((self.kind, name))

    def _find(self, peer: Peer, request: m.FindOperation, frame: Frame) -> None:
        name, own = request.name, self._service.cluster.own

        def attempt() -> Any:
            return m.Text(str(own or "")) if name in self.states else NOT_YET

        def what() -> str:
            return f"no operation '{name}'; there are {sorted(self.states)}"

        self._service.ask(peer, frame, (self.kind, name), attempt, request.timeout, what)

    def _lane(self, state: OperationState) -> LaneState:
        return self._lanes[SHARED if state.how.threads is None else state.name]

    def _run(self, peer: Peer, request: m.RunOperation, frame: Frame) -> None:
        state = self.state(request.name)
        lane = self._lane(state)
        if request.within.count(self._named(lane)) >= lane.threads:
            raise WouldBlock(
                f"run '{state.name}': the operation that asks for it has the thread that it needs;"
                f" call the function, or register it with threads={lane.threads + 1} or more"
            )
        tree = stored(request.head, buffer(frame, 0))
        self._calls += 1
        number, now = self._calls, self._service.clock.now()
        call = Call(state, peer, tree, tree.layout, now, request.within, number)

        def attempt() -> Any:
            if isinstance(call.outcome, Exception):
                raise call.outcome
            return call.outcome

        def what() -> str:
            if not call.running:
                ahead = f"{lane.ahead(call)} calls are before it, {lane.running} run"
                return f"run '{state.name}': it has not begun: {ahead}; {self._service.who()}"
            took = self._service.clock.now() - call.since
            return (
                f"run '{state.name}': asked for {took:.1f} s ago, it has begun and goes on; its"
                f" result is dropped; {self._service.who()}"
            )

        lane.add(call)
        key = ("operation", state.name, number)
        self._service.ask(
            peer, frame, key, attempt, request.timeout, what, in_vain=lambda: lane.give_up(call)
        )
        self._dispatch(lane)

    def _named(self, lane: LaneState) -> str:
        return f"{self._token}:{lane.name}"

    def _dispatch(self, lane: LaneState) -> None:
        """Start what is due, and come back when more will be."""
        now = self._service.clock.now()
        while (calls := lane.take(now)) is not NOT_YET:
            self._begin(lane, calls)
        due = lane.next_due()
        if due is None or self._alarms.get(lane.name, due + 1) <= due:
            return
        self._alarms[lane.name] = due

        def rang(_: Any) -> None:
            if self._alarms.get(lane.name) == due:
                del self._alarms[lane.name]
            self._dispatch(lane)

        # It is nobody's wait, so nobody's end ends it.
        alarm = Parked(self, 0, lambda: "a batch", lambda: NOT_YET, rang)
        self._service.parking.park(("batch", lane.name), alarm, max(0.0, due - now))

    def _begin(self, lane: LaneState, calls: list[Call]) -> None:
        state = calls[0].operation
        run = self._runs[state.name]
        trees: list[Any] = []
        within: Counter[str] = Counter()
        for call in calls:
            within |= Counter(call.within)
            trees.append(call.tree)
            call.tree = None
        chain = (*within.elements(), self._named(lane))
        outcomes: list[Any] = []

        def work() -> None:
            try:
                outcomes.extend(run(trees, chain))
            finally:
                trees.clear()

        def finish() -> None:
            if not outcomes:
                error = OperationFailed(f"operation '{state.name}' was interrupted")
                outcomes.extend([error] * len(calls))
            lane.finish(calls, outcomes)
            for call in calls:
                self._service.parking.changed(("operation", state.name, call.number))
            self._dispatch(lane)

        self._service.beside(lane.name, lane.threads, work, finish)
