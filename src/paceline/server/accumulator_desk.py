"""What a server does with accumulators."""

from __future__ import annotations

from functools import partial
from typing import Any

from paceline.core import messages as m
from paceline.core.accumulator_state import AccumulatorState, Gradient
from paceline.core.arithmetic import mean, mean_values
from paceline.core.errors import SchemaError
from paceline.core.facts import AccumulatorFacts
from paceline.core.names import key, parts
from paceline.core.tree import check, decoded
from paceline.core.variable_state import VariableState
from paceline.core.waiting import NOT_YET
from paceline.server.adding import LONG_WORK
from paceline.server.brought import Brought
from paceline.server.frames import buffer, bytes_of, stored
from paceline.server.kept_desk import KeptDesk
from paceline.server.lines import Peer
from paceline.server.service import Handler, Service, at_once
from paceline.server.tag_desk import tree_of
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Block, Frame


class AccumulatorDesk(KeptDesk[AccumulatorState]):
    """The accumulators of a server."""

    kind = "accumulator"
    made_by = "accumulator('{}', variable=) or like="
    facts = AccumulatorFacts

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._variables: VariableDesk = service.desk(VariableDesk)

    def handlers(self) -> dict[type, Handler]:
        return {
            m.DefineAccumulator: self._define,
            m.Apply: self._apply,
            m.Take: self._take,
            m.Contribute: self._contribute,
            m.AccumulatorStats: self._stats,
        }

    def lost(self, peer: Peer) -> None:
        # What was accepted of it counts. Its own wait may have been the first of several.
        for name, state in self.states.items():
            state.leave(peer)
            self._changed(name)

    def _changed(self, name: str) -> None:
        """Ask those who wait: first for a mean, then for room."""
        parking = self._service.parking
        parking.changed(("mean", name), in_order=True)
        parking.changed(("accumulator room", name))

    def _define(self, peer: Peer, request: m.DefineAccumulator, frame: Frame) -> None:
        name, linked = request.name, request.variable
        if request.like is None and linked is None:
            self.find(peer, frame, name, request.timeout)
            return
        variable = None
        if linked is not None:
            if parts(linked).container != parts(name).container:
                raise SchemaError(
                    f"accumulator '{name}' is for variable '{linked}': both are in one container"
                )
            variable = self._variables.variable(linked)
            linked = parts(linked).name
        layout = b"" if request.like is None else request.like.layout
        if variable is not None and request.like is None:
            layout = variable.layout
        made = AccumulatorState(name, layout, linked, request.max_lag, request.capacity)
        found = self.states.get(name)
        if found is not None and found.definition == made.definition:
            check(layout, found.layout, f"accumulator '{name}'")
        self.define(peer, frame, made)
        if found is None and variable is not None:
            self._link(made, variable)

    def _link(self, state: AccumulatorState, variable: VariableState) -> None:
        """Have it know the versions of its variable."""
        state.advance(variable.version)
        watchers = self._variables.watchers.setdefault(variable.name, [])
        watchers.append(partial(self._advance, state))

    def again(self, brought: Brought) -> AccumulatorState:
        facts: AccumulatorFacts = brought.facts
        return AccumulatorState(
            brought.key, facts.layout, facts.variable, facts.max_lag, facts.capacity
        )

    def fill(self, state: AccumulatorState, brought: Brought) -> None:
        held, variable = [], None
        for run, task in zip(brought.runs, brought.about, strict=True):
            version = None if run.version == m.NO_VERSION else run.version
            held.append(Gradient(str(task), version, tree_of(run), None))
        there = state.name in self.states
        if state.variable is not None:
            _, container, generation = parts(state.name)
            variable = self._variables.variable(key(state.variable, container, generation))
        state.revive(brought.facts, held)
        if there:
            state.advance(state.current)
            self._changed(state.name)
        elif variable is not None:
            self._link(state, variable)

    def _advance(self, state: AccumulatorState, version: int) -> None:
        if state.advance(version):
            self._service.parking.changed(("accumulator room", state.name))

    def _apply(self, peer: Peer, request: m.Apply, frame: Frame) -> None:
        state = self.state(request.name)
        tree = stored(request.head, buffer(frame, 0))
        state.check(tree.layout, request.version)
        state.join(peer, peer.name)

        def attempt() -> Any:
            accepted = state.apply(peer, tree, request.version)
            if accepted is NOT_YET:
                return NOT_YET
            if accepted:
                self._service.parking.changed(("mean", state.name), in_order=True)
            return m.Text(accepted)

        def what() -> str:
            return (
                f"apply '{state.name}': it holds capacity={state.capacity} gradients; whoever takes"
                f" ends the wait; {self._service.who()}"
            )

        key = ("accumulator room", state.name)
        self._service.ask(peer, frame, key, attempt, request.timeout, what)

    def _take(self, peer: Peer, request: m.Take, frame: Frame) -> None:
        state, n = self.state(request.name), request.n
        if n > state.capacity:
            raise SchemaError(
                f"take({n}) of '{state.name}': it holds {state.capacity} at most; take fewer, or"
                f" give it capacity={n} or more"
            )

        def attempt() -> Any:
            most = state.ready(n, request.on_leave)
            if most is NOT_YET:
                return NOT_YET
            # Before anything is taken: without memory nothing has happened.
            block = self._service.arena.allocate(decoded(state.layout).nbytes)
            return state.current, state.take(most), block

        def what() -> str:
            return f"take({n}) of '{state.name}': {state.missing(n)}; {self._service.who()}"

        self._service.ask(
            peer, frame, ("mean", state.name), attempt, request.timeout, what,
            behind=True,
            in_vain=lambda: self._changed(state.name),
            then=lambda found: self._mean_beside(peer, frame.request, state, *found),
        )  # fmt: skip

    def _mean_beside(
        self,
        peer: Peer,
        number: int,
        state: AccumulatorState,
        version: int,
        gradients: list[Gradient],
        block: Block,
    ) -> None:
        trees = [each.tree for each in gradients]
        producers = [each.task for each in gradients]
        values: list[float] = []
        lags = [state.lag(each.version) for each in gradients]

        def work() -> None:
            arrays = [(tree.layout, bytes_of(tree)) for tree in trees]
            mean(state.layout, arrays, block.array() if block.nbytes else None)
            values.extend(mean_values(state.layout, [(t.layout, t.values) for t in trees]))

        def done(error: Exception | None) -> None:
            # Their memory goes back to those who made them.
            trees.clear()
            at = m.NO_VERSION if state.variable is None else version
            reply = m.Mean(at, state.layout, values, producers, lags)
            self._service.answer(peer, number, error or (reply, [block]))

        long = len(gradients) * block.nbytes > LONG_WORK
        (self._service.run_long if long else at_once)(work, done)
        self._service.parking.changed(("accumulator room", state.name))

    def _contribute(self, peer: Peer, request: m.Contribute, frame: Frame) -> None:
        state = self.state(request.name)
        if request.action == "join":
            state.join(peer, peer.name)
        else:
            state.leave(peer)
        self._service.answer(peer, frame.request, m.Done())
        self._changed(state.name)

    def _stats(self, peer: Peer, request: m.AccumulatorStats, frame: Frame) -> None:
        self._service.answer(peer, frame.request, m.Text(self.state(request.name).stats()))
