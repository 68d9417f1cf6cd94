"""Containers: names of their own, and resets that end what was there, for everybody."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until, waits
from click.testing import CliRunner
from clusters import every_engine, following, quiet
from hands import cluster, served, start, toml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import paceline
from paceline import Disconnected, SchemaError, Session, WasReset, WorkerFailed
from paceline.cli import main
from paceline.core import messages as m
from paceline.core.accumulator_state import AccumulatorState
from paceline.core.barrier_state import BarrierState
from paceline.core.counter_state import CounterState
from paceline.core.queue_state import QueueState
from paceline.core.reader_state import ReaderState
from paceline.core.tree import flatten
from paceline.core.variable_state import VariableState
from paceline.packing import pack
from paceline.server.local import LocalServer
from paceline.server.variable_desk import WORDS
from paceline.testing import Serving

KINDS = ["variable", "queue", "counter", "barrier", "reader", "accumulator"]


def made(session: Session, kind: str, name: str = "w", mark: int = 1) -> Any:
    """One of that kind; no two with different marks have the same definition or value."""
    ways: dict[str, Callable[[], Any]] = {
        "variable": lambda: session.variable(name, mark),
        "queue": lambda: session.queue(name, mark),
        "counter": lambda: session.counter(name, mark),
        "barrier": lambda: session.barrier(name, mark),
        "reader": lambda: session.reader(name, list(range(mark))),
        "accumulator": lambda: session.accumulator(name, like=0.0, capacity=mark),
    }
    return ways[kind]()


def mark(handle: Any) -> int:
    """The mark that it was made with, as its server says it."""
    ways: dict[str, Callable[[], int]] = {
        "variable": lambda: handle.read().tree,
        "queue": lambda: handle.stats()["capacity"],
        "counter": lambda: handle.value,
        "barrier": lambda: handle.abort() or handle.n,
        "reader": lambda: handle.stats()["pieces"],
        "accumulator": lambda: handle.stats() and handle.capacity,
    }
    return ways[handle.kind]()


def parked(session: Session) -> int:
    """How many requests wait on the server."""
    members = session.connection.call(m.Stats()).content["members"].values()
    return sum(len(member["waits"]) for member in members)


# Names


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_name_in_another_container_is_another_thing(server: Serving, kind: str) -> None:
    default, other = server.session(), server.session(container="x")
    handles = [made(default, kind, mark=2), made(other, kind, mark=3)]
    assert [mark(handle) for handle in handles] == [2, 3]
    assert [(handle.name, handle.container) for handle in handles] == [("w", ""), ("w", "x")]
    assert " 'w' in container 'x'" in repr(handles[1])
    assert "container" not in repr(handles[0])
    again = server.session(container="x")
    assert mark(made(again, kind, mark=3)) == 3
    if kind != "variable":
        with pytest.raises(SchemaError, match=rf"^{kind} 'w' in container 'x' exists with"):
            made(again, kind, mark=4)


def test_a_block_is_in_a_container_for_its_thread(server: Serving) -> None:
    session = server.session(container="x")
    with session.container("y"):
        made(session, "variable", mark=5)
        assert Call(lambda: made(session, "variable", mark=6).container).outcome() == "x"
        with session.container(""):
            made(session, "variable", mark=7)
        assert session.variable("w").read().tree == 5
        assert session.uninitialized(["w", "v"]) == ["v"]
    assert session.variable("w").read().tree == 6
    assert session.resources()["variables"] == {
        "w in container 'y'": 1,
        "w in container 'x'": 1,
        "w": 1,
    }


def test_messages_name_the_container_and_list_what_is_in_it(server: Serving) -> None:
    server.session().queue("elsewhere", 1)
    session = server.session(container="x")
    session.queue("there", 1)
    with pytest.raises(
        TimeoutError,
        match=r"^no queue 'q' in container 'x'; there are \['there'\]; whoever calls queue\('q',",
    ):
        session.queue("q", timeout=0)
    with pytest.raises(
        TimeoutError, match=r"^no variable 'v' in container 'x' is initialised; there are \[\]; "
    ):
        session.variable("v", timeout=0)
    variable = session.variable("v", np.zeros(2))
    with pytest.raises(SchemaError, match=r"^assign 'v' in container 'x': leaf \$ is"):
        variable.assign(np.zeros(3))


@pytest.mark.parametrize("wrong", [3, None, "a\0b", "x" * 257])
def test_what_cannot_be_a_container_is_refused(wrong: Any) -> None:
    with pytest.raises(SchemaError, match=r"^the name of a container (is a str|has at most 256)"):
        Session(container=wrong)
    with Session() as session:
        with (
            pytest.raises(SchemaError, match=r"^the name of a container"),
            session.container(wrong),
        ):
            pass
        with pytest.raises((SchemaError, TypeError)):
            session.reset([wrong])
        assert session.resources()["variables"] == {}


def test_an_accumulator_is_in_the_container_of_its_variable(server: Serving) -> None:
    session = server.session(container="x")
    variable = session.variable("v", 1.0)
    assert session.accumulator("g", variable=variable).variable == "v"
    assert session.accumulator("g", variable="v").container == "x"
    with (
        session.container("y"),
        pytest.raises(
            SchemaError, match=r"^accumulator 'g' in container 'y' is for variable 'v' in"
        ),
    ):
        session.accumulator("g", variable=variable)


# What there is


def test_resources_say_where_a_thing_is_and_who_made_it(server: Serving) -> None:
    one, two = server.session(job="w", container="x"), server.session(job="w")
    for kind in KINDS:
        made(one if kind == "queue" else two, kind)
        made(two if kind == "queue" else one, kind, name="other")
        made(server.session(), kind)
    shared = one.resources()["shared"]
    assert all(0 <= each.pop("age") < 30 for each in shared)
    assert len({each.pop("where") for each in shared}) == 1
    for kind in KINDS:
        first, second = ("w:0", "w:1") if kind == "queue" else ("w:1", "w:0")
        places = ("x", "") if kind == "queue" else ("", "x")
        expected = [
            {"kind": kind, "name": "w", "container": places[0], "by": first},
            {"kind": kind, "name": "other", "container": places[1], "by": second},
        ]
        if kind == "queue":
            expected.append({"kind": kind, "name": "w", "container": "", "by": "session:0"})
        found = [each for each in shared if each["kind"] == kind]
        assert found[:2] == expected[:2]
    one.reset("x")
    assert {each["container"] for each in one.resources()["shared"]} == {""}


# Resets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("containers", ["x", ["x"], ["z", "x"], None])
def test_a_reset_removes_what_is_in_a_container_and_leaves_others_alone(
    server: Serving, kind: str, containers: Any
) -> None:
    session = server.session(job="w", container="x")
    gone, other = made(session, kind, mark=2), made(server.session(), kind, mark=3)
    listed = {each["container"] for each in session.resources()["shared"]}
    assert listed == {"", "x"}
    session.reset(containers)
    with pytest.raises(WasReset, match=r"^container 'x' was reset by w:0$"):
        mark(gone)
    if containers is None:
        with pytest.raises(WasReset, match=r"^the default container was reset by w:0$"):
            mark(other)
        assert session.resources()["shared"] == []
    else:
        assert mark(other) == 3
        assert [each["container"] for each in session.resources()["shared"]] == [""]
    new = made(session, kind, mark=5)
    assert mark(new) == 5
    with pytest.raises(WasReset, match=r"^container 'x' was reset by w:0$"):
        mark(gone)


def _full(session: Session) -> Callable[[], Any]:
    queue = session.queue("full", 1)
    queue.enqueue(0)
    return lambda: queue.enqueue(1, timeout=None)


def _held(session: Session) -> Callable[[], Any]:
    reader = session.reader("r", [1], lease=1000.0)
    reader.next()
    return lambda: Call(lambda: reader.next(timeout=None)).outcome()


def _no_room(session: Session) -> Callable[[], Any]:
    bounded = session.variable("bounded", np.zeros(4), memory=128)
    bounded.tag("kept")
    bounded.assign(np.ones(4))
    return lambda: bounded.assign(np.zeros(4), timeout=None)


def _no_room_to_add(session: Session) -> Callable[[], Any]:
    bounded = session.variable("bounded", np.zeros(4), memory=128)
    bounded.tag("kept")
    bounded.assign(np.ones(4))
    return lambda: bounded.assign_add(np.zeros(4), timeout=None)


def _applying(session: Session) -> Callable[[], Any]:
    accumulator = session.accumulator("g", like=0.0, capacity=1)
    accumulator.apply(1.0)
    return lambda: accumulator.apply(1.0, timeout=None)


def _taking(session: Session) -> Callable[[], Any]:
    accumulator = session.accumulator("g", like=0.0)
    accumulator.join()
    accumulator.apply(1.0)
    return lambda: accumulator.take(2, timeout=None)


def _newer(session: Session) -> Callable[[], Any]:
    variable = session.variable("v", 1)
    return lambda: variable.read(newer_than=variable.version, timeout=None)


def _next_batch(session: Session) -> Callable[[], Any]:
    key = session.key("c")
    session.connection.call(m.OpenCollection(key, None, 1, 0, 1, 1 << 20))
    return lambda: session.connection.call(m.Next(key, False, None), timeout=None)


def _to_start(session: Session) -> Callable[[], Any]:
    key = session.key("c")
    session.connection.call(m.OpenCollection(key, None, 1, 0, 1, 1 << 20))
    session.connection.call(m.Offer(key, [], 1, 0, 0.0))
    return lambda: session.connection.call(m.Offer(key, [], 1, 0, None), timeout=None)


WAITS: dict[str, Callable[[Session], Callable[[], Any]]] = {
    "variable": lambda s: lambda: s.variable("w", timeout=None),
    "initialised": lambda s: lambda: s.wait_until_initialized(["w"], timeout=None),
    "read": _newer,
    "assign": _no_room,
    "assign_add": _no_room_to_add,
    "queue": lambda s: lambda: s.queue("w", timeout=None),
    "enqueue": _full,
    "dequeue": lambda s: partial(s.queue("q", 1).dequeue, timeout=None),
    "counter": lambda s: lambda: s.counter("w", None, timeout=None),
    "wait_for": lambda s: partial(s.counter("c").wait_for, 1, timeout=None),
    "barrier": lambda s: lambda: s.barrier("w", timeout=None),
    "wait": lambda s: partial(s.barrier("b", 2).wait, timeout=None),
    "reader": lambda s: lambda: s.reader("w", timeout=None),
    "piece": _held,
    "accumulator": lambda s: lambda: s.accumulator("w", timeout=None),
    "apply": _applying,
    "take": _taking,
    "batch": _next_batch,
    "start": _to_start,
}


@pytest.mark.parametrize("container", ["", "x"])
@pytest.mark.parametrize("call", WAITS)
def test_who_waits_for_something_in_a_container_hears_of_its_reset(
    server: Serving, call: str, container: str
) -> None:
    waiter, other = server.session(container=container), server.session(container="other")
    chief = server.session(job="chief", index=0)
    waits = [Call(WAITS[call](waiter)), Call(WAITS[call](other))]
    # A lease is something that the server itself waits for.
    until(lambda: parked(chief) == len(waits))
    chief.reset([container])
    which = f"container '{container}'" if container else "the default container"
    with pytest.raises(WasReset, match=rf"^{which} was reset by chief:0$"):
        waits[0].outcome()
    assert parked(chief) == 1
    chief.reset()
    with pytest.raises(WasReset, match=r"^container 'other' was reset by chief:0$"):
        waits[1].outcome()
    assert parked(chief) == 0
    assert chief.resources()["shared"] == []
    for session in (waiter, other):
        session.variable("w", 1)
        assert session.queue("w", 3).size == 0


def test_nothing_is_answered_in_passing_while_a_reset_ends_the_waits() -> None:
    """What one wait holds comes to no other that ends in the same step."""
    server = LocalServer(waits=False)
    one, two = Session(channel=server.connect()), Session(channel=server.connect())
    queue = one.queue("q", 4, capacity_bytes=1000)
    queue.enqueue(b"x" * 700)
    head = m.RunHead(flatten(b"").layout, 1, [[b"y" * 600]])
    small = m.RunHead(flatten(b"").layout, 1, [[b"z"]])
    first = one.connection.post(m.Enqueue("q", [head], None), timeout=None)
    behind = two.connection.post(m.Enqueue("q", [small], None), timeout=None)
    two.reset("")
    for waiting in (first, behind):
        with pytest.raises(WasReset, match=r"^the default container was reset by session:1$"):
            waiting.result()
    server.close()


def test_versions_after_a_reset_are_above_all_before(server: Serving) -> None:
    session, other = server.session(container="x"), server.session(container="x")
    versions = []
    for number in range(3):
        variable = session.variable("w", number)
        versions.append(variable.version)
        for more in range(3):
            versions.append(variable.assign(more))
        other.reset("x")
    assert versions == sorted(set(versions))
    untouched = server.session()
    kept = untouched.variable("w", 0)
    before = kept.version
    other.reset("x")
    assert kept.assign(1) == before + 1


def test_a_handle_from_before_never_sees_what_came_in_its_place(server: Serving) -> None:
    session = server.session(container="x")
    old = session.variable("w", 1)
    held = old.read()
    server.session().reset("x")
    new = session.variable("w", 2)
    target = np.zeros(())
    for touch in (
        old.read,
        lambda: old.version,
        lambda: old.assign(3),
        lambda: old.assign_add(3),
        lambda: old.read_into([target]),
        lambda: old.tag("t"),
        lambda: old.untag("t"),
        old.tags,
        old.memory,
        lambda: old.read(tag="t"),
        lambda: session.accumulator("g", variable=old),
    ):
        with pytest.raises(WasReset, match=r"^container 'x' was reset by session:1$"):
            touch()
    assert (held.tree, new.read().tree, new.tags()) == (1, 2, {})
    assert new.version == new.read().version


def test_a_snapshot_outlives_a_reset(server: Serving) -> None:
    session = server.session(container="x")
    snapshots = []
    for number in range(3):
        variable = session.variable("w", np.full(5000, number))
        snapshots.append(variable.read())
        session.reset("x")
    session.variable("w", np.full(5000, 9))
    assert [int(each.tree.min()) for each in snapshots] == [0, 1, 2]


def test_a_server_can_be_reset_more_often_than_it_has_hint_words() -> None:
    with Session(container="x") as session:
        old = session.variable("w", 0)
        for number in range(WORDS + 1):
            session.reset("x")
            new = session.variable("w", number)
        assert new.read().tree == WORDS
        with pytest.raises(WasReset, match=r"^container 'x' was reset by session:0$"):
            _ = old.version


def test_an_addition_in_hand_at_a_reset_is_not_made() -> None:
    server = LocalServer(waits=False)
    session = Session(channel=server.connect(), container="x")
    with session.container("y"):
        kept = session.variable("w", np.zeros(1 << 18))
    sums: list[Callable[[], None]] = []

    def later(work: Callable[[], None], finish: Callable[[Exception | None], None]) -> None:
        work()
        sums.append(lambda: finish(None))

    server.service.run_long = later
    key, delta = session.variable("w", np.zeros(1 << 18)).key, np.ones(1 << 18)
    head, block = pack(session.connection.arena, delta, "add")
    added = [
        session.connection.post(m.Add(name, head, None), [block], None) for name in (key, kept.key)
    ]
    session.reset("x")
    new = session.variable("w", 5.0)
    for finish in sums:
        finish()
    with pytest.raises(WasReset, match=r"^container 'x' was reset by session:0$"):
        added[0].result()
    assert added[1].result()[0].version == kept.version
    assert (new.read().tree, kept.read().tree.min()) == (5.0, 1.0)
    server.close()


def test_what_is_reset_takes_no_memory() -> None:
    kinds = (VariableState, QueueState, CounterState, BarrierState, ReaderState, AccumulatorState)
    with Session(container="x") as session:
        for _ in range(3):
            variable = session.variable("w", np.zeros(1000))
            variable.tag("t")
            queue = session.queue("w", 2)
            queue.enqueue(np.zeros(1000))
            session.reader("w", [1, 2], lease=1000.0).next()
            session.accumulator("w", variable="w").apply(np.zeros(1000), variable.version)
            session.counter("w"), session.barrier("w", 2)
            session.reset("x")
        gc.collect()
        assert [type(each).__name__ for each in gc.get_objects() if type(each) in kinds] == []


class Resets(RuleBasedStateMachine):
    """Sessions in several containers make, use and reset; a model has the numbers.

    Each thing holds a number: a counter's value, a variable's tree, how many items a queue has.
    """

    @initialize()
    def begin(self) -> None:
        self.server = LocalServer(waits=False)
        channels = [self.server.connect() for _ in range(3)]
        self.sessions = [
            Session(job="s", channel=channel, container=container)
            for channel, container in zip(channels, ["", "x", "x"], strict=True)
        ]
        self.model: dict[tuple[str, str], int] = {}
        self.live: dict[tuple[str, str], list[Any]] = {}
        self.dead: list[tuple[Any, str]] = []
        self.newest: dict[str, int] = {}

    @rule(who=st.integers(0, 2), kind=st.sampled_from(["variable", "queue", "counter"]))
    def make(self, who: int, kind: str) -> None:
        session = self.sessions[who]
        ways: dict[str, Callable[[], Any]] = {
            "variable": lambda: session.variable("w", 0),
            "queue": lambda: session.queue("w", 1000),
            "counter": lambda: session.counter("w"),
        }
        handle = ways[kind]()
        self.model.setdefault((handle.container, kind), 0)
        self.live.setdefault((handle.container, kind), []).append(handle)

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        if not self.live:
            return
        place = data.draw(st.sampled_from(sorted(self.live)))
        handle = data.draw(st.sampled_from(self.live[place]))
        if handle.kind == "variable":
            version = handle.assign_add(1)
            assert version > self.newest.get(handle.container, 0)
            self.newest[handle.container] = version
        elif handle.kind == "queue":
            handle.enqueue(0)
        else:
            handle.add()
        self.model[place] += 1

    @rule(who=st.integers(0, 2), containers=st.sampled_from([None, "", "x", ["", "x"], [], "z"]))
    def reset(self, who: int, containers: Any) -> None:
        self.sessions[who].reset(containers)
        named = [containers] if isinstance(containers, str) else containers
        for place in [each for each in self.live if named is None or each[0] in named]:
            self.dead += [(handle, f"s:{who}") for handle in self.live.pop(place)]
            del self.model[place]

    @invariant()
    def what_lives_has_its_number_and_what_is_gone_is_gone(self) -> None:
        for place, handles in self.live.items():
            for handle in handles:
                assert self.number(handle) == self.model[place]
        for handle, _ in self.dead[-8:]:
            with pytest.raises(WasReset, match=r" was reset by s:\d$"):
                self.number(handle)
        shared = self.sessions[0].resources()["shared"]
        assert {(each["container"], each["kind"]) for each in shared} == self.live.keys()

    def number(self, handle: Any) -> int:
        if handle.kind == "variable":
            return int(handle.read().tree)
        return int(handle.size if handle.kind == "queue" else handle.value)

    def teardown(self) -> None:
        self.server.close()


TestResets = Resets.TestCase
TestResets.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# Collections, and handles in functions


@every_engine
def test_a_running_collection_ends_with_the_reset_of_its_container(engine: str) -> None:
    with quiet(2, engine) as cluster:
        with cluster.container("x"):
            policy = cluster.variable("policy", 0)
            batches = cluster.collect(following, policy, batch_size=4)
        for _ in range(3):
            assert (batches.next().version == policy.version).all()
        loop = iter(batches)
        next(loop)
        cluster.reset("x")
        with pytest.raises(WasReset, match=r"^container 'x' was reset by chief:0$"):
            list(loop)
        assert cluster.resources()["collections"] == {}
        # The workers are free, also to wait for something.
        assert cluster.map(lambda n: n + 1, [1, 2, 3]) == [2, 3, 4]
        again = cluster.variable("policy", 1)
        batch = cluster.collect(following, again, batch_size=4).next()
        assert (batch.version == again.version).all()


@every_engine
def test_a_reset_in_lockstep_ends_the_round(engine: str) -> None:
    with quiet(2, engine) as cluster:
        elsewhere = cluster.variable("elsewhere", 0)
        with cluster.container("x"):
            policy = cluster.variable("policy", 0)
            batches = cluster.collect(following, policy, batch_size=4, schedule="lockstep")
        batches.next()
        cluster.reset("x")
        with pytest.raises(WasReset, match=r"^container 'x' was reset by chief:0$"):
            batches.next()
        batches.close()
        assert [one["held_by"] for one in elsewhere.memory()["versions"]] == [["current"]]


def test_a_reset_in_the_midst_of_a_round_of_lockstep() -> None:
    """Of the collection's container, and of one that only a variable is in that it holds."""
    server = LocalServer(waits=False)
    chief, worker = (Session(job="w", channel=server.connect()) for _ in range(2))
    policy = chief.variable("policy", 0)
    with chief.container("x"):
        chief.variable("settings", 0)
    chief.connection.call(m.OpenCollection("c", policy.key, 1, 0, 1, 1 << 20, ["w:1"]))
    worker.connection.call(m.Offer("c", [], 0, 0, 0.0))
    asked = chief.connection.post(m.Next("c", False, None), timeout=None)
    granted = worker.connection.call(m.Offer("c", [], 1, 0, 0.0)).items
    before = policy.version
    policy.assign(1)
    chief.reset("x")
    assert (granted, worker.connection.call(m.Await("policy", 0.0)).version) == (1, before)
    made = m.RunHead(flatten(1).layout, 1, [[7]], before)
    worker.connection.call(m.Offer("c", [made], 0, 0, 0.0))
    delivered = asked.result()[0]
    assert delivered.runs[0].columns == [[7]]
    chief.connection.tell(m.Delivered("c", delivered.delivery))
    assert worker.connection.call(m.Await("policy", 0.0)).version == before + 1
    asked = chief.connection.post(m.Next("c", False, None), timeout=None)
    chief.reset("")
    with pytest.raises(WasReset, match=r"^the default container was reset by w:0$"):
        asked.result()
    new = chief.variable("policy", 5)
    assert worker.variable("policy").read().tree == 5
    assert [one["held_by"] for one in new.memory()["versions"]] == [["current"]]
    server.close()


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_workers_that_wait_for_something_else_are_freed_with_their_collection(engine: str) -> None:
    with quiet(2, engine) as cluster:
        policy, gate = cluster.variable("policy", 0), cluster.queue("gate", 1)
        with cluster.container("x"):
            batches = cluster.collect(_waiting, policy, gate, batch_size=2, version_of=None)
        batches.next()
        until(lambda: waits(cluster.session, "items") == 2)
        cluster.reset("x")
        with pytest.raises(WasReset, match=r"^container 'x' was reset by chief:0$"):
            batches.next()
        batches.close()
        assert cluster.map(lambda n: n + 1, [1, 2, 3]) == [2, 3, 4]


def _waiting(policy: Any, gate: Any) -> Iterator[Any]:
    yield policy.version
    yield gate.dequeue(timeout=None)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_function_hears_of_a_reset_of_another_container_and_fails(engine: str) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", 0)
        with cluster.container("x"):
            gate = cluster.queue("gate", 1)
        batches = cluster.collect(_waiting, policy, gate, batch_size=2, version_of=None)
        batches.next()
        cluster.reset("x")
        with pytest.raises(WorkerFailed, match=r"WasReset: container 'x' was reset by chief:0"):
            for _ in batches:
                pass


@every_engine
def test_a_handle_takes_its_container_along_into_functions(engine: str) -> None:
    def look(_: int, given: Any, *, worker: paceline.Worker) -> list[Any]:
        mine = worker.session.variable("w")
        found = [given.read().tree, captured.read().tree, mine.read().tree]
        return [*found, given.container, mine.container]

    with quiet(1, engine) as cluster:
        cluster.variable("w", 1)
        with cluster.container("x"):
            given = captured = cluster.variable("w", 2)
        assert cluster.map(look, [0], given) == [[2, 2, 1, "x", ""]]
        cluster.reset("x")
        with cluster.container("x"):
            cluster.variable("w", 3)
        with pytest.raises(paceline.PacelineError, match=r"container 'x' was reset by chief:0"):
            cluster.map(look, [0], given)
        with cluster.container("x"):
            given = captured = cluster.variable("w", 3)
        assert cluster.map(look, [0], given) == [[3, 3, 1, "x", ""]]


# Several servers


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[paceline.ClusterSpec]:
    """The spec of two servers that run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = cluster(tmp_path, "unix", ps=2, worker=2)
    with served(made):
        yield made


@pytest.mark.parametrize("containers", ["x", None])
def test_a_reset_reaches_all_servers_and_names_find_a_new_home(
    spec: paceline.ClusterSpec, containers: Any
) -> None:
    with (
        Session(spec, job="worker", index=0, container="x") as one,
        Session(spec.target("ps", 1), container="x") as two,
    ):
        with one.device("ps:1"):
            old = {kind: made(one, kind, mark=2) for kind in KINDS}
        with two.container("y"), two.device("ps:1"):
            kept = made(two, "variable", mark=7)
        where = {each["where"] for each in one.resources()["shared"]}
        assert where == {"ps:1"}
        waiting = Call(lambda: two.variable("later", timeout=None))
        until(lambda: parked(one) == 1)
        one.reset(containers)
        with pytest.raises(WasReset, match=r"^container 'x' was reset by worker:0$"):
            waiting.outcome()
        homes = one.resources()["homes"]
        assert homes == ({"variable w in container 'y'": "ps:1"} if containers else {})
        # The other session had found them at ps:1 before.
        new = {kind: made(two, kind, mark=3) for kind in KINDS}
        assert {
            each["where"] for each in one.resources()["shared"] if each["container"] == "x"
        } == {"ps:0"}
        for kind in KINDS:
            with pytest.raises(WasReset, match=r"^container 'x' was reset by worker:0$"):
                mark(old[kind])
            assert mark(new[kind]) == mark(made(one, kind, mark=3)) == 3
        if containers is None:
            with pytest.raises(WasReset, match=r"^container 'y' was reset by worker:0$"):
                mark(kept)
        else:
            assert mark(kept) == 7
        assert one.resources()["homes"].keys() >= {f"{kind} w in container 'x'" for kind in KINDS}


def test_a_server_that_a_reset_has_not_reached_carries_it_out_when_it_is_asked(
    spec: paceline.ClusterSpec,
) -> None:
    with Session(spec, job="worker", index=0) as one, Session(spec, job="worker", index=1) as two:
        with one.container("x"), one.device("ps:1"):
            old, behind = one.variable("w", 1), one.variable("v", 1)
        waiting = Call(lambda: behind.read(newer_than=behind.version, timeout=None))
        until(lambda: any(waits_at(line) for line in two._lines.all))
        # Whoever reset it died after the first server had heard of it.
        number, _ = one.connection.call(m.Reset(["x"])).content
        assert old.read().tree == 1
        with two.container("x"), two.device("ps:1"):
            new = two.variable("w", 2)
            assert old.held is not None
            assert new.version > old.held
        for late in (waiting.outcome, old.read, lambda: behind.read()):
            with pytest.raises(WasReset, match=r"^container 'x' was reset$"):
                late()
        assert new.read().tree == 2
        # The reset comes late, or again: nothing new is removed.
        two._lines.all[1].call(m.Reset(["x"], number))
        assert new.read().tree == 2
        with pytest.raises(WasReset, match=r"^container 'x' was reset by worker:1$"):
            old.read()


def waits_at(line: Any) -> int:
    """How many requests wait on that server."""
    return sum(len(each["waits"]) for each in line.call(m.Stats()).content["members"].values())


def test_a_session_forgets_the_homes_of_what_is_gone(spec: paceline.ClusterSpec) -> None:
    with Session(spec, job="worker", index=0, container="x") as session:
        for number in range(5):
            session.counter("a", number), session.counter("b", number)
            session.reset("x")
        session.counter("a", 7)
        assert len(session._lines._homes) == 1


@pytest.mark.parametrize("by_target", [True, False])
def test_a_process_without_a_session_resets(spec: paceline.ClusterSpec, by_target: bool) -> None:
    with Session(spec, job="worker", index=0, container="x") as session:
        with session.device("ps:1"):
            old = session.queue("q", 1)
        paceline.reset(spec.target("ps", 1) if by_target else spec, ["x"])
        with pytest.raises(WasReset, match=r"^container 'x' was reset by reset:0$"):
            old.enqueue(1)
        with pytest.raises(SchemaError, match=r"^the name of a container is a str, not 3$"):
            paceline.reset(spec, [3])  # type: ignore[list-item]


def test_a_reset_says_which_server_is_gone_and_who_finds_names_anew_is_safe(tmp_path: Path) -> None:
    spec = cluster(tmp_path, "tcp", ps=2, worker=1)
    words = ("-m", "paceline", "serve", "--cluster", str(toml(spec, tmp_path / "cluster.toml")))
    servers = [start(*words, "--job", "ps", "--task", str(n), folder=tmp_path) for n in range(2)]
    try:
        until(lambda: (tmp_path / ".paceline" / "secret").exists())
        secret = tmp_path / ".paceline" / "secret"
        with Session(spec, job="worker", index=0, container="x", secret_file=secret) as session:
            old = session.counter("here", 1)
            servers[1].kill()
            servers[1].wait(DEADLINE_SECONDS)
            with pytest.raises(Disconnected, match=rf"^ps:1 at {spec.target('ps', 1)}: "):
                session.reset("x")
            with pytest.raises(WasReset, match=r"^container 'x' was reset by worker:0$"):
                old.add()
            assert session.counter("here", 2).value == 2
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_many_reset_and_make_at_once_and_nobody_sees_two_of_a_name(
    spec: paceline.ClusterSpec,
) -> None:
    """Whoever holds a handle sees what it was found with, or that it is gone."""

    def play(index: int) -> int:
        seen = refused = 0
        with Session(spec, job="worker", index=index, container="x") as session:
            for number in range(60):
                try:
                    with session.device(f"ps:{(number + index) % 2}"):
                        counter = session.counter("c", index if number % 7 else 0)
                    seen += counter.start == 0 and counter.add() > 0
                except (SchemaError, WasReset):
                    # The other one made it, with another start, or has just reset it.
                    refused += 1
                if number % 5 == index:
                    session.reset("x")
        assert refused < 60
        return seen

    calls = [Call(play, index) for index in range(2)]
    assert all(call.outcome() for call in calls)
    with Session(spec, container="x") as session:
        homes = session.resources()["homes"]
        shared = [each for each in session.resources()["shared"] if each["container"] == "x"]
        assert len(shared) <= 1
        assert all(homes["counter c in container 'x'"] == each["where"] for each in shared)


def test_a_reset_says_how_much_it_removed(spec: paceline.ClusterSpec) -> None:
    with Session(spec) as session:
        assert session.reset("never") == session.reset() == 0
        session.queue("q", 1)
        with session.container("x"), session.device("ps:1"):
            session.counter("c")
            session.spread("s", [np.zeros(3), np.zeros(3)])
        assert (session.reset(["y", "x"]), session.reset("x")) == (2, 0)
        assert paceline.reset(spec) == 1


def test_the_command_line_says_what_is_shared(spec: paceline.ClusterSpec, tmp_path: Path) -> None:
    path = str(toml(spec, tmp_path / "cluster.toml"))
    with Session(spec, job="worker", index=1) as session:
        empty = CliRunner().invoke(main, ["shared", "--cluster", path])
        assert (empty.exit_code, empty.output) == (0, "nothing is shared\n")
        session.queue("q", 1)
        with session.container("x"), session.device("ps:1"):
            session.variable("w", 1)
            session.spread("s", [np.zeros(3), np.zeros(3)])
    told = CliRunner().invoke(main, ["shared", "--cluster", path]).output.splitlines()
    assert [re.sub(r"\d+ s ago$", "", line) for line in told] == [
        "queue q: at ps:0, made by worker:1 ",
        "variable w in container 'x': at ps:1, made by worker:1 ",
        "variable s in container 'x': at ps:1, parts at ps:1, ps:0, made by worker:1 ",
    ]
    (tmp_path / "cluster.toml").write_text("[cluster]\nps = 3\n")
    failed = CliRunner().invoke(main, ["shared", "--cluster", path])
    assert (failed.exit_code, failed.output[:7]) == (1, "Error: ")


def test_an_operation_is_in_no_container_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is being waited for; what it had found in a container is gone for it too."""
    begun, released = threading.Event(), threading.Event()

    def hold(n: int, session: Session) -> int:
        counter = session.counter("c")
        begun.set()
        assert released.wait(DEADLINE_SECONDS)
        with pytest.raises(WasReset, match=r"^the default container was reset by worker:0$"):
            counter.add()
        return n + 1

    monkeypatch.setenv("HOME", str(tmp_path))
    own = cluster(tmp_path, "unix", ps=1, worker=1)
    with paceline.Server(own, job_name="ps") as server:
        server.operation("hold")(hold)
        with Session(own, job="worker", index=0) as session:
            called = Call(lambda: session.run("hold", 1))
            assert begun.wait(DEADLINE_SECONDS)
            session.reset()
            released.set()
            assert called.outcome() == 2
            assert session.counter("c", 3).value == 3
