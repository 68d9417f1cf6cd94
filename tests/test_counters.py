"""Counters and barriers, shared by sessions that wait, give up and die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until, waits
from clusters import every_engine, quiet, slow_beside
from wires import wired

from paceline import Closed, SchemaError, Session, TimedOut, UnknownName, WouldBlock
from paceline.core import messages as m
from paceline.server.local import LocalServer
from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier

# Counters


def test_no_two_additions_get_the_same_number_and_none_is_lost(server: Serving) -> None:
    counter = server.session().counter("step", 10)

    def count() -> list[int]:
        mine = server.session().counter("step", 10)
        return [mine.add() for _ in range(100)]

    calls = [Call(count) for _ in range(3)]
    numbers = [number for call in calls for number in call.outcome()]
    assert sorted(numbers) == list(range(11, 311))
    assert counter.value == 310
    assert counter.add(-10) == 300


def test_who_waits_for_a_number_goes_on_when_it_is_there(server: Serving) -> None:
    watching, counting = server.session(), server.session().counter("step")
    waiting = Call(lambda: watching.counter("step").wait_for(3, DEADLINE_SECONDS))
    until(lambda: waits(watching, "count") == 1)
    counting.add(2)
    assert waits(watching, "count") == 1
    counting.add(5)
    assert waiting.outcome() == 7
    assert watching.counter("step").wait_for(7, 0) == 7


def test_a_wait_for_a_number_that_does_not_come_says_where_it_is(server: Serving) -> None:
    counter = server.session(job="w").counter("step")
    counter.add(2)
    with pytest.raises(
        TimedOut,
        match=r"^wait for counter 'step' to be at 3: it is at 2; whoever adds ends the wait;"
        r" members: w:0, after 0\.\d s",
    ):
        counter.wait_for(3, timeout=0.05)
    assert counter.value == 2


def test_a_counter_has_one_definition(server: Serving) -> None:
    one, other = server.session(), server.session()
    waiting = Call(lambda: other.counter("step", None, timeout=DEADLINE_SECONDS).start)
    until(lambda: waits(one, "counter") == 1)
    one.counter("step", 7).add()
    assert waiting.outcome() == 7
    with pytest.raises(
        SchemaError, match=r"^counter 'step' exists with start=7; asked for: start=0$"
    ):
        other.counter("step")
    with pytest.raises(TimedOut, match=r"^no counter 'stop'; there are \['step'\]; whoever calls"):
        other.counter("stop", None, timeout=0)
    assert one.resources()["counters"] == {"step": {"value": 8, "start": 7}}


@pytest.mark.parametrize("wrong", [1.5, "1", True, 1 << 63, None])
def test_what_is_no_whole_number_of_64_bits_is_refused(wrong: Any) -> None:
    with Session() as session:
        counter = session.counter("step")
        with pytest.raises(SchemaError, match=r"^counter 'step': n is a whole number of 64 bits"):
            counter.add(wrong)
        with pytest.raises(SchemaError, match=r"^counter 'step': at_least is a whole number"):
            counter.wait_for(wrong)
        assert counter.add(np.int64(4)) == 4


def test_a_sum_that_does_not_fit_is_refused_and_changes_nothing(server: Serving) -> None:
    counter = server.session().counter("step", (1 << 63) - 2)
    counter.add()
    with pytest.raises(SchemaError, match=r"plus 1 is 9223372036854775808, which is no int64"):
        counter.add()
    assert counter.value == (1 << 63) - 1


def test_an_addition_whose_reply_was_lost_counts_once() -> None:
    # Each connection is cut after some bytes, in the middle of whatever is under way.
    cuts = [*range(900, 2400, 50), None]
    with wired(iter(cuts)) as (_, wire), wire.session() as session:
        counter = session.counter("step")
        assert [counter.add() for _ in range(400)] == list(range(1, 401))
        assert wire.carried > 3


def test_a_counter_that_is_not_there_is_named() -> None:
    with Session() as session, pytest.raises(UnknownName, match=r"^no counter 'x'; there are \[\]"):
        session.connection.call(m.AddToCounter("x", 1))


@every_engine
def test_workers_count_what_they_do(engine: str) -> None:
    def steps(step: Any) -> Iterator[int]:
        while True:
            yield step.add()

    with quiet(2, engine) as cluster:
        step = cluster.counter("step")
        batch = cluster.collect(steps, step, batch_size=10).next()
        assert len(set(batch.data.tolist())) == 10
        assert step.value >= 10


# Barriers


def test_all_go_on_together_round_after_round(server: Serving) -> None:
    counter = server.session().counter("arrived")

    def rounds() -> list[tuple[int, bool]]:
        session = server.session()
        barrier, arrived = session.barrier("b", 3), session.counter("arrived")
        found = []
        for number in range(20):
            arrived.add()
            place = barrier.wait(DEADLINE_SECONDS)
            found.append((place, arrived.value >= 3 * (number + 1)))
        return found

    tasks = [Call(rounds) for _ in range(3)]
    outcomes = [task.outcome() for task in tasks]
    for number in range(20):
        assert sorted(found[number][0] for found in outcomes) == [0, 1, 2]
        assert all(found[number][1] for found in outcomes)
    assert counter.value == 60
    assert server.session().resources()["barriers"] == {"b": {"n": 3, "arrived": [], "rounds": 20}}


def test_a_wait_at_a_barrier_that_times_out_never_was_there(server: Serving) -> None:
    one, other = server.session(job="a").barrier("b", 2), server.session(job="b").barrier("b")
    with pytest.raises(
        TimedOut,
        match=r"^wait at barrier 'b': 1 of 2 have arrived \(a:0\), 1 missing; whoever else arrives"
        r" ends the wait; members: a:0, b:0, after 0\.\d s",
    ):
        one.wait(timeout=0.05)
    with pytest.raises(TimedOut, match=r"1 of 2 have arrived \(b:0\)"):
        other.wait(timeout=0)
    waiting = Call(lambda: other.wait(DEADLINE_SECONDS))
    until(lambda: waits(server.session(), "arrivals") == 1)
    assert one.wait(timeout=0) == 1
    assert waiting.outcome() == 0


def test_aborting_ends_the_waits_of_a_round_and_not_the_next(server: Serving) -> None:
    session = server.session(job="a")
    barrier = session.barrier("b", 3)
    waiting = [Call(lambda: barrier.wait(DEADLINE_SECONDS)) for _ in range(2)]
    until(lambda: waits(session, "arrivals") == 2)
    server.session(job="chief").barrier("b").abort()
    for call in waiting:
        with pytest.raises(Closed, match=r"^wait at barrier 'b': chief:0 aborted the round$"):
            call.outcome()
    waiting = [Call(lambda: barrier.wait(DEADLINE_SECONDS)) for _ in range(3)]
    assert sorted(call.outcome() for call in waiting) == [0, 1, 2]


ARRIVE = """
import sys
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="worker")
session.barrier("b", 2).wait(None)
"""


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_who_dies_at_a_barrier_is_not_there_any_more(carrier: Carrier) -> None:
    with serving(carrier, where="thread") as server:
        chief = server.session(job="chief")
        barrier = chief.barrier("b", 2)
        command = [sys.executable, "-c", ARRIVE, server.target, server.secret.hex()]
        with subprocess.Popen(command) as child:
            until(lambda: chief.resources()["barriers"]["b"]["arrived"] == ["worker:0"])
            child.kill()
        until(lambda: chief.resources()["barriers"]["b"]["arrived"] == [])
        with pytest.raises(
            TimedOut, match=r"1 of 2 have arrived \(chief:0\), 1 missing; gone sinc"
        ):
            barrier.wait(timeout=0.05)
        other = Call(lambda: server.session().barrier("b").wait(DEADLINE_SECONDS))
        barrier.wait(DEADLINE_SECONDS)
        other.outcome()


def test_a_barrier_has_one_definition() -> None:
    with Session() as session:
        session.barrier("b", 2)
        with pytest.raises(SchemaError, match=r"^barrier 'b' exists with n=2; asked for: n=3$"):
            session.barrier("b", 3)
        with pytest.raises(SchemaError, match=r"^barrier 'b': n is a whole number, 1 or more, not"):
            session.barrier("b", 0)
        with pytest.raises(SchemaError, match=r"^the name of a barrier is a str, not 4$"):
            session.barrier(4)  # type: ignore[arg-type]


def test_what_nothing_can_end_is_refused_in_one_thread_and_leaves_nothing() -> None:
    server = LocalServer(waits=False)
    one, other = (Session(channel=server.connect()) for _ in range(2))
    with pytest.raises(WouldBlock, match=r"^wait for counter 'step' to be at 1: it is at 0; whoev"):
        one.counter("step").wait_for(1)
    with pytest.raises(WouldBlock, match=r"^wait at barrier 'b': 1 of 2 have arrived"):
        one.barrier("b", 2).wait(None)
    with pytest.raises(WouldBlock, match=r"^wait at barrier 'b': 1 of 2 have arrived"):
        other.barrier("b").wait(None)
    assert one.resources()["barriers"]["b"] == {"n": 2, "arrived": [], "rounds": 0}
    server.close()


@pytest.mark.parametrize("engine", ["threads", slow_beside])
def test_workers_meet_at_a_barrier(engine: str) -> None:
    def meet(barrier: Any) -> int:
        places = [barrier.wait(30.0) for _ in range(5)]
        return len(places)

    with quiet(3, engine) as cluster:
        assert cluster.run(meet, cluster.barrier("b", 3)) == [5, 5, 5]


def test_a_collection_that_ends_takes_its_workers_out_of_a_barrier() -> None:
    def meets(barrier: Any) -> Iterator[int]:
        yield 0
        yield barrier.wait(None)

    with quiet(1, "threads") as cluster:
        barrier = cluster.barrier("b", 2)
        collection = cluster.collect(meets, barrier, batch_size=1)
        collection.next()
        until(lambda: cluster.resources()["barriers"]["b"]["arrived"] == ["worker:0"])
        collection.close()
        until(lambda: cluster.resources()["barriers"]["b"]["arrived"] == [])
