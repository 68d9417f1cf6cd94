"""Containers: names of their own, and resets that end what was there, for everybody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import Call, until

from paceline import SchemaError, Session, WasReset
from paceline.core import messages as m
from paceline.core.tree import flatten
from paceline.packing import pack
from paceline.server.loop import LocalServer
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
    server.service.run_long = lambda work, finish: sums.append(lambda: (work(), finish(None))[0])
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
