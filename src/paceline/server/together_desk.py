"""Requests that a server carries out in one step, all or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from paceline.core import messages as m
from paceline.core.errors import PacelineError, ProtocolError, SchemaError
from paceline.core.waiting import NOT_YET
from paceline.server.accumulator_desk import AccumulatorDesk
from paceline.server.adding import LONG_WORK, sum_of
from paceline.server.frames import buffer, stored
from paceline.server.lines import Peer
from paceline.server.parking import TOGETHER
from paceline.server.queue_desk import QueueDesk, handed_out, ranked, received
from paceline.server.service import Desk, Handler, Service
from paceline.server.variable_desk import VariableDesk
from paceline.server.work_desk import CounterDesk
from paceline.transports.base import Buffers, Frame, Memory

Draft: TypeAlias = Counter[tuple[Any, ...]]
"""What the requests before it in the same step add, by what they add to."""


class Step(NamedTuple):
    """One of several requests.

    `ready` says whether it can be done now, after those in the draft, and adds itself to that; it
    raises what ends the wait. `prepare` may still fail, and changes nothing. `do` cannot fail.
    """

    ready: Callable[[Draft], bool]
    do: Callable[[], Any]
    why_not: Callable[[], str]
    prepare: Callable[[], None] = lambda: None


class TogetherDesk(Desk):
    """Has no resources of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._variables: VariableDesk = service.desk(VariableDesk)
        self._queues: QueueDesk = service.desk(QueueDesk)
        self._counters: CounterDesk = service.desk(CounterDesk)
        self._accumulators: AccumulatorDesk = service.desk(AccumulatorDesk)
        self._steps: dict[type, Callable[[Peer, Any, Frame], Step]] = {
            m.Assign: self._assign,
            m.Add: self._add,
            m.Read: self._read,
            m.AddToCounter: self._count,
            m.Enqueue: self._enqueue,
            m.Dequeue: self._dequeue,
            m.Apply: self._apply,
        }

    def handlers(self) -> dict[type, Handler]:
        return {m.Together: self._together}

    def lost(self, peer: Peer) -> None:
        """It holds nothing."""

    def listing(self) -> tuple[str, dict[str, Any]]:
        return "together", {}

    def reset(self, gone: Callable[[str], bool]) -> None:
        # Those that wait for what is gone hear so.
        self._service.parking.changed(TOGETHER)

    def _together(self, peer: Peer, request: m.Together, frame: Frame) -> None:
        if sum(part.buffers for part in request.parts) < len(frame.buffers):
            raise ProtocolError(f"{len(frame.buffers)} buffers came, of which some are of no part")
        names = [part.request.name for part in request.parts]
        steps: list[Step] = []
        start = 0
        for place, part in enumerate(request.parts):
            own = frame.buffers[start : start + part.buffers]
            start += part.buffers
            self._service.containers.meet(part.request.name)
            with _said_of(place):
                make = self._steps[type(part.request)]
                steps.append(make(peer, part.request, Frame(frame.kind, 0, b"", own)))
        waits_for = 0

        def attempt() -> Any:
            nonlocal waits_for
            draft: Draft = Counter()
            for place, step in enumerate(steps):
                self._service.containers.check(names[place])
                with _said_of(place):
                    if not step.ready(draft):
                        waits_for = place
                        return NOT_YET
            for place, step in enumerate(steps):
                with _said_of(place):
                    step.prepare()
            with self._service.parking.one_step():
                return _joined([step.do() for step in steps])

        def what() -> str:
            why = steps[waits_for].why_not()
            return f"run of {len(steps)} requests: request {waits_for + 1}: {why}"

        self._service.ask(peer, frame, TOGETHER, attempt, request.timeout, what)

    def _behind(self, peer: Peer, key: tuple[str, str]) -> bool:
        """Whether nobody waits already for what a request needs."""
        return self._service.parking.standing(peer, key) is None

    # Variables

    def _assign(self, peer: Peer, request: m.Assign, frame: Frame) -> Step:
        name = request.name
        state, new = (
            self._variables.variable(name).in_one_place(),
            stored(request.head, buffer(frame, 0)),
        )
        state.check_write("assign", new, peer)

        def ready(draft: Draft) -> bool:
            _once(draft, name)
            return self._behind(peer, ("write", name)) and state.writable(new, peer)

        def do() -> Any:
            version = state.assign(new, peer)
            assert version is not NOT_YET
            self._variables.committed(name)
            return m.Version(version)

        return Step(ready, do, lambda: f"assign '{name}': {state.why_not(new.nbytes)}")

    def _add(self, peer: Peer, request: m.Add, frame: Frame) -> Step:
        name = request.name
        state, delta = (
            self._variables.variable(name).in_one_place(),
            stored(request.head, buffer(frame, 0)),
        )
        state.check_write("assign_add", delta, peer)
        if delta.memory is not None and delta.memory.nbytes > LONG_WORK:
            raise SchemaError(
                f"assign_add '{name}': {delta.memory.nbytes} bytes; {LONG_WORK} can be added in one"
                " step with others: add larger trees alone"
            )
        total: list[Any] = []

        def ready(draft: Draft) -> bool:
            _once(draft, name)
            return self._behind(peer, ("write", name)) and state.writable(delta, peer)

        def prepare() -> None:
            assert state.stored is not None
            total[:] = [sum_of(self._service, state.stored, delta)]

        def do() -> Any:
            state.begin_add(delta, peer)
            version = state.end_add(total.pop())
            self._variables.committed(name)
            return m.Version(version)

        return Step(ready, do, lambda: f"assign_add '{name}': {state.why_not(0)}", prepare)

    def _read(self, peer: Peer, request: m.Read, frame: Frame) -> Step:
        state = self._variables.variable(request.name).in_one_place()
        now = m.Read(request.name, m.NO_VERSION, 0.0)

        def do() -> Any:
            found = self._variables.readable(peer, state, now)
            assert found is not NOT_YET
            return self._variables.lend(peer, state, *found, hold=False)

        def ready(draft: Draft) -> bool:
            return state.defined() is not NOT_YET

        return Step(ready, do, lambda: f"read '{request.name}': nobody has initialised it")

    # Counters, queues, accumulators

    def _count(self, peer: Peer, request: m.AddToCounter, frame: Frame) -> Step:
        counter = self._counters.state(request.name)

        def ready(draft: Draft) -> bool:
            key = ("count", request.name)
            draft[key] += request.n
            counter.check(draft[key])
            return True

        def do() -> Any:
            value = counter.add(request.n)
            self._service.parking.changed(("count", request.name))
            return m.Text(value)

        return Step(ready, do, lambda: f"counter '{request.name}' is there")

    def _enqueue(self, peer: Peer, request: m.Enqueue, frame: Frame) -> Step:
        name = request.name
        queue = self._queues.state(name)
        runs = received(peer, request.runs, frame)
        ranked(queue, runs, request.priorities)

        def ready(draft: Draft) -> bool:
            # One that waits when the queue is closed is refused: it has no place in the order.
            count, size = queue.check(runs, queue.ticket())
            items, nbytes = ("items in", name), ("bytes in", name)
            draft[items] += count
            draft[nbytes] += size
            room = queue.room(runs, draft[items], draft[nbytes])
            return self._behind(peer, ("room", name)) and room is True

        def do() -> Any:
            queue.accept(runs)
            self._service.parking.changed(("items", name))
            return m.Done()

        return Step(ready, do, lambda: f"enqueue to '{name}': {queue.why_not(runs)}")

    def _dequeue(self, peer: Peer, request: m.Dequeue, frame: Frame) -> Step:
        name, n = request.name, request.least
        queue = self._queues.state(name)
        if n != request.most:
            raise ProtocolError(f"dequeue of {n} to {request.most} items together with others")

        def ready(draft: Draft) -> bool:
            more = draft["items in", name] - draft["items out", name]
            draft["items out", name] += n
            return queue.can_take(n, more)

        def do() -> Any:
            runs = queue.dequeue(n, n)
            assert runs is not NOT_YET
            return handed_out(queue, runs, [], peer)

        def why_not() -> str:
            return f"dequeue of {n} items from '{name}': it holds {queue.size}"

        return Step(ready, do, why_not)

    def _apply(self, peer: Peer, request: m.Apply, frame: Frame) -> Step:
        state = self._accumulators.state(request.name)
        tree = stored(request.head, buffer(frame, 0))

        def ready(draft: Draft) -> bool:
            state.check(tree.layout, request.version)
            draft["gradients", request.name] += 1
            return len(state.held) + draft["gradients", request.name] <= state.capacity

        def do() -> Any:
            state.join(peer, peer.name)
            accepted = state.apply(peer, tree, request.version)
            assert accepted is not NOT_YET
            if accepted:
                self._service.parking.changed(("mean", request.name), in_order=True)
            return m.Text(accepted)

        def why_not() -> str:
            return f"apply '{request.name}': it holds capacity={state.capacity} gradients"

        return Step(ready, do, why_not)


class _said_of:  # noqa: N801
    """Begin an error's message with which of several requests it is about."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, PacelineError) and not isinstance(error, ProtocolError):
            raise type(error)(f"request {self._place + 1}: {error}") from error


def _once(draft: Draft, name: str) -> None:
    if draft["write", name]:
        raise SchemaError(f"variable '{name}' is written twice in one step")
    draft["write", name] += 1


def _joined(answers: list[Any]) -> tuple[m.Answers, Buffers]:
    """One reply of several."""
    replies: list[Any] = []
    counts: list[int] = []
    buffers: list[Memory | None] = []
    for answer in answers:
        reply, own = answer if type(answer) is tuple else (answer, ())
        replies.append(reply)
        counts.append(len(own))
        buffers += own
    return m.Answers(replies, counts), buffers
