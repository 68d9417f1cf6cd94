"""Queues: bounded, each item to one consumer, and nothing lost, whoever dies or gives up."""

import functools
import operator
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until

import paceline
from paceline.core import messages as m
from paceline.core.errors import Closed, ProtocolError, SchemaError, TimedOut, UnknownName
from paceline.core.tree import flatten
from paceline.testing import Serving, serving
from paceline.transports.base import HeapBlock


def conserved(stats: dict[str, Any]) -> bool:
    dropped = sum(stats["dropped"].values())
    return bool(stats["accepted"] == stats["delivered"] + dropped + stats["stored"])


# Order and bounds


def test_items_come_out_in_the_order_of_their_producer(server: Serving) -> None:
    queue = server.session().queue("q", 8)

    def produce(name: str) -> None:
        mine = server.session().queue("q")
        for n in range(50):
            mine.enqueue((name, n), timeout=DEADLINE_SECONDS)

    producers = [Call(produce, name) for name in "ab"]
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(100):
        name, n = queue.dequeue(timeout=DEADLINE_SECONDS)
        seen[name].append(n)
    assert seen == {"a": list(range(50)), "b": list(range(50))}
    for producer in producers:
        producer.outcome()


def test_each_item_goes_to_exactly_one_consumer(server: Serving) -> None:
    queue = server.session().queue("q", 16)

    def consume() -> list[int]:
        mine = server.session().queue("q")
        taken: list[int] = []
        while True:
            try:
                taken += mine.dequeue_up_to(3, timeout=DEADLINE_SECONDS).data.tolist()
            except Closed:
                return taken

    consumers = [Call(consume) for _ in range(3)]
    for n in range(200):
        queue.enqueue(n, timeout=DEADLINE_SECONDS)
    queue.close()
    taken = [consumer.outcome() for consumer in consumers]
    assert sorted(functools.reduce(operator.iadd, taken, [])) == list(range(200))
    assert queue.stats()["delivered"] == 200


def test_a_full_queue_makes_producers_wait(server: Serving) -> None:
    queue = server.session().queue("q", 2)
    queue.enqueue(0)
    queue.enqueue(1)
    with pytest.raises(
        TimedOut,
        match=r"^enqueue of 1 items to 'q': it is full with 2 of 2 items, \d+ of \d+ bytes; whoever"
        r" dequeues ends the wait; members: session:0, after 0\.\d s",
    ):
        queue.enqueue(2, timeout=0.05)
    with pytest.raises(TimedOut):
        queue.enqueue(2, timeout=0)
    waiting = Call(lambda: queue.enqueue(3, timeout=DEADLINE_SECONDS))
    assert queue.dequeue() == 0
    waiting.outcome()
    assert queue.dequeue_many(2).data.tolist() == [1, 3]


@pytest.mark.parametrize("item", [np.zeros(1000), bytes(8000), "x" * 8000], ids=["array", "b", "s"])
def test_the_bytes_in_a_queue_are_bounded(server: Serving, item: object) -> None:
    queue = server.session().queue("q", 1000, capacity_bytes=20_000)
    for _ in range(2):
        queue.enqueue(item)
    with pytest.raises(TimedOut, match=r"^enqueue of 1 items to 'q': it is full with 2 of 1000"):
        queue.enqueue(item, timeout=0.05)
    assert 16_000 <= queue.stats()["bytes"] <= 20_000
    queue.dequeue()
    queue.enqueue(item, timeout=1)
    with pytest.raises(
        SchemaError, match=r"^enqueue 'q': 3 items of \d+ bytes in one step; it hol"
    ):
        queue.enqueue_many([item] * 3)


class Step(NamedTuple):
    seen: Any
    reward: Any


@pytest.mark.parametrize(
    "items",
    [
        {"x": np.zeros((3, 2))},
        Step(np.zeros((3, 2)), np.zeros(3)),
        np.arange(3.0),
        np.zeros((1, 2)),
        "abc",
        b"abc",
        (n for n in range(3)),
        {1, 2},
        5,
        None,
    ],
    ids=lambda items: type(items).__name__,
)
def test_what_is_no_list_of_items_is_refused(items: Any) -> None:
    with paceline.Session() as session:
        queue: Any = session.queue("q", 8)
        with pytest.raises(SchemaError, match=f"a list of items, found {type(items).__name__}"):
            queue.enqueue_many(items)
        assert queue.size == 0


def test_enqueue_many_is_all_or_none(server: Serving) -> None:
    queue = server.session().queue("q", 4)
    queue.enqueue_many([0, 1])
    with pytest.raises(TimedOut):
        queue.enqueue_many([2, 3, 4], timeout=0.05)
    assert queue.size == 2
    queue.enqueue_many([2, 3], timeout=0)
    with pytest.raises(
        SchemaError, match=r"^enqueue 'q': 5 items in one step, but it holds 4 at m"
    ):
        queue.enqueue_many(range(5))
    queue.enqueue_many([])
    assert queue.dequeue_many(4).data.tolist() == [0, 1, 2, 3]


def test_who_waits_behind_an_enqueue_that_gave_up_gets_in(server: Serving) -> None:
    one, two = server.session().queue("q", 4), server.session().queue("q", 4)
    one.enqueue_many([0, 1, 2])
    large = Call(lambda: one.enqueue_many([3, 4], timeout=0.3))
    # The server has the large one when a session of the same process was answered after it.
    until(lambda: one._connection._waiters)
    one.stats()
    two.enqueue(5, timeout=DEADLINE_SECONDS)
    with pytest.raises(TimedOut):
        large.outcome()
    assert one.dequeue_many(4).data.tolist() == [0, 1, 2, 5]


def test_more_than_the_capacity_is_refused_with_the_way_out(server: Serving) -> None:
    queue = server.session().queue("q", 4)
    with pytest.raises(
        SchemaError,
        match=r"^dequeue 'q': 5 items in one step, but it holds at most 4: take fewer, or give it"
        r" capacity=5 or more$",
    ):
        queue.dequeue_many(5)
    queue.enqueue_many(range(4))
    assert len(queue.dequeue_many(4)) == 4


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "3", None])
def test_a_number_of_items_is_whole_and_positive(server: Serving, n: Any) -> None:
    queue = server.session().queue("q", 4)
    queue.enqueue(0)
    for take in (queue.dequeue_many, queue.dequeue_up_to):
        with pytest.raises(
            SchemaError, match=r"^the number of items is a whole number, 1 or more, not "
        ):
            take(n, timeout=0)
    assert queue.size == 1


@pytest.mark.parametrize("capacity", [0, -1, 2.5, True, "8"])
def test_a_capacity_is_whole_and_positive(server: Serving, capacity: Any) -> None:
    session = server.session()
    said = r"^queue 'q': {} is a whole number, 1 or more{}, not "
    with pytest.raises(SchemaError, match=said.format("capacity", "")):
        session.queue("q", capacity)
    with pytest.raises(SchemaError, match=said.format("capacity_bytes", "")):
        session.queue("q", 1, capacity_bytes=capacity)
    with pytest.raises(SchemaError, match=said.format("per_producer", ", or None")):
        session.queue("q", 1, per_producer=capacity)
    assert session.resources()["queues"] == {}


def test_a_name_has_one_definition(server: Serving) -> None:
    session = server.session()
    session.queue("q", 4)
    assert session.queue("q", 4).capacity == session.queue("q").capacity == 4
    with pytest.raises(
        SchemaError,
        match=r"^queue 'q' exists with capacity=4, capacity_bytes=\d+, per_producer=None,"
        r" order='fifo'; asked for: capacity=5, capacity_bytes=\d+, per_producer=None,"
        r" order='fifo'$",
    ):
        session.queue("q", 5)


def test_a_queue_without_a_capacity_is_waited_for(server: Serving) -> None:
    session = server.session()
    with pytest.raises(
        TimedOut, match=r"^no queue 'q'; there are \[\]; whoever calls queue\('q', "
    ):
        session.queue("q", timeout=0.05)
    waiting = Call(lambda: session.queue("q", timeout=DEADLINE_SECONDS).capacity)
    server.session().queue("q", 3)
    assert waiting.outcome() == 3


def test_an_unknown_queue_names_those_there_are(server: Serving) -> None:
    session = server.session()
    session.queue("q", 1)
    with pytest.raises(UnknownName, match=r"^no queue 'r'; there are \['q'\]$"):
        session.connection.call(m.QueueStats("r"))


# The bound of each producer


def test_a_producer_waits_for_the_delivery_of_its_own_items_and_others_do_not(
    server: Serving,
) -> None:
    one, two = (server.session().queue("q", 8, per_producer=1) for _ in range(2))
    one.enqueue("a0")
    waiting = Call(lambda: one.enqueue("a1", timeout=DEADLINE_SECONDS))
    until(lambda: one._connection._waiters)
    one.stats()
    two.enqueue("b0", timeout=DEADLINE_SECONDS)
    with pytest.raises(
        TimedOut,
        match=r"^enqueue of 1 items to 'q': this producer has 1 of its per_producer=1 items in it;"
        r" whoever dequeues ends the wait; members: session:0, session:1, after 0\.\d s",
    ):
        two.enqueue("b1", timeout=0.05)
    assert two.dequeue(timeout=5) == "a0"
    waiting.outcome()
    assert two.dequeue_many(2, timeout=5).data == ["b0", "a1"]
    assert conserved(one.stats())


def test_producers_that_wait_for_room_keep_their_order_beside_one_at_its_bound(
    server: Serving,
) -> None:
    bounded, other = (server.session().queue("q", 2, per_producer=2) for _ in range(2))
    bounded.enqueue_many([0, 1])
    mine = Call(lambda: bounded.enqueue(2, timeout=DEADLINE_SECONDS))
    until(lambda: bounded._connection._waiters)
    bounded.stats()
    theirs = Call(lambda: other.enqueue(3, timeout=DEADLINE_SECONDS))
    until(lambda: other._connection._waiters)
    other.stats()
    taker = server.session().queue("q")
    assert taker.dequeue(timeout=5) == 0
    # There is room for one: the first in line, which its own bound no longer holds back.
    mine.outcome()
    assert taker.dequeue(timeout=5) == 1
    theirs.outcome()
    assert taker.dequeue_many(2, timeout=5).data.tolist() == [2, 3]


def test_the_threads_of_a_session_share_its_bound_and_keep_their_order(server: Serving) -> None:
    queue = server.session().queue("q", 8, per_producer=2)
    queue.enqueue_many([0, 1])
    calls = []
    for n in (2, 3):
        calls.append(Call(lambda n=n: queue.enqueue(n, timeout=DEADLINE_SECONDS)))
        until(lambda: len(queue._connection._waiters) == len(calls))
        queue.stats()
    taker = server.session().queue("q")
    assert [taker.dequeue(timeout=5) for _ in range(4)] == [0, 1, 2, 3]
    for call in calls:
        call.outcome()


def test_more_at_once_than_a_producer_may_have_is_refused(server: Serving) -> None:
    server.session().queue("q", 8, per_producer=2)
    queue = server.session().queue("q")
    assert queue.per_producer == 2
    with pytest.raises(
        SchemaError,
        match=r"^enqueue 'q': 3 items in one step, but a producer may have 2 in it: enqueue fewer"
        r" at a time, or give it per_producer=3 or more$",
    ):
        queue.enqueue_many([1, 2, 3])
    assert queue.size == 0


def test_a_session_that_closed_leaves_its_items_and_not_its_bound(server: Serving) -> None:
    first = server.session(job="worker", index=0)
    first.queue("q", 8, per_producer=1).enqueue("old")
    first.close()
    queue = server.session(job="worker", index=0).queue("q")
    queue.enqueue("new", timeout=DEADLINE_SECONDS)
    assert queue.dequeue_many(2, timeout=5).data == ["old", "new"]


def test_bounds_may_be_numpys_integers(server: Serving) -> None:
    whole: Any = [np.int32(4), np.int64(1000), np.uint8(3), np.int64(2)]
    queue = server.session().queue("q", whole[0], capacity_bytes=whole[1], per_producer=whole[2])
    queue.enqueue_many([1, 2, 3])
    assert queue.dequeue_many(whole[3]).data.tolist() == [1, 2]


# Runs of items alike


def test_a_run_is_taken_in_any_pieces_and_comes_back_to_its_place(server: Serving) -> None:
    queue = server.session().queue("q", 4000)
    items = [{"x": np.full(40, n, np.int16), "n": n, "name": str(n)} for n in range(3000)]
    queue.enqueue_many(items)
    connection = queue._connection
    held = connection.call(m.Dequeue("q", 7, 7, 0.0), timeout=5)
    found = queue.dequeue_many(5).items()
    connection.tell(m.Receipt("q", held.delivery, True))
    back = queue.dequeue_up_to(7).items()
    assert [item["n"] for item in back + found] == list(range(12))
    rest = queue.dequeue_many(2988)
    assert [item["n"] for item in rest.items()] == list(range(12, 3000))
    np.testing.assert_equal(rest.items()[-1], items[-1])
    assert (queue.stats()["bytes"], queue.size) == (0, 0)


def test_what_producers_mix_comes_out_in_order_whatever_the_runs(server: Serving) -> None:
    one, two = server.session().queue("q", 100), server.session().queue("q", 100)
    one.enqueue_many([0, 1, "two", 3.0], version=7)
    two.enqueue_many([4, 5])
    first = one.dequeue_many(3)
    assert (first.data, first.version.tolist()) == ([0, 1, "two"], [7, 7, 7])
    rest = one.dequeue_many(3)
    assert (rest.data, rest.version.tolist()) == ([3.0, 4, 5], [7, -1, -1])
    assert rest.worker == ("session:0", "session:1", "session:1")


LAYOUT = flatten({"x": np.zeros(2), "n": 1, "s": ""}).layout
ODD_RUNS: dict[str, tuple[int, list[list[Any]], int, str]] = {
    "fewer bytes": (2, [[1, 2], ["", ""]], 64, "2 items of 64 bytes came with 64 in one run"),
    "no bytes": (1, [[1], [""]], 0, "1 items of 64 bytes came with 0 in one run"),
    "a column too few": (1, [[1]], 64, "1 columns came for 2 plain leaves"),
    "a short column": (2, [[1, 2], [""]], 128, "a column of str for 2 items has other values"),
    "other values": (1, [[1.5], [""]], 64, "a column of int for 1 items has other values"),
    "a list for a value": (1, [[1], [[]]], 64, "a column of str for 1 items has other values"),
}


@pytest.mark.parametrize("odd", ODD_RUNS)
def test_a_run_that_is_not_what_it_says_cuts_its_session_off(server: Serving, odd: str) -> None:
    count, columns, nbytes, said = ODD_RUNS[odd]
    good, bad = server.session().queue("q", 8), server.session()
    run = m.RunHead(LAYOUT, count, columns)
    with pytest.raises(ProtocolError, match=f"^{said}$"):
        bad.connection.call(m.Enqueue("q", [run], 0.0), [HeapBlock(nbytes)])
    assert good.stats()["accepted"] == 0


def test_logs_come_with_each_item_or_none(server: Serving) -> None:
    session = server.session()
    session.queue("q", 8)
    run = m.RunHead(flatten(1).layout, 2, [[1, 2]], metrics=[{"a": [1.0]}])
    with pytest.raises(ProtocolError, match=r"^1 logs came for 2 items$"):
        session.connection.call(m.Enqueue("q", [run], 0.0))


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_has_items(count: int) -> None:
    request = m.encode(m.Enqueue("q", [m.RunHead(b"", count, [])], 0.0))
    with pytest.raises(ProtocolError, match=r"are not a request: Expected `int` >= 1"):
        m.decode_request(request)


# What is in them


def test_items_may_change_their_shapes_and_sizes_each_time(server: Serving) -> None:
    queue = server.session().queue("q", 64)
    rng = np.random.default_rng(0)
    items = [
        {"obs": rng.random(int(size)), "n": n, "deep": [(np.full(n % 5, n),)]}
        for n, size in enumerate([0, 1, 63, 64, 1023, 1024, 1025, 40_000, 131_072, 140_000, 3, 0])
    ]
    for _ in range(3):
        for item in items:
            queue.enqueue(item)
        for item in items:
            np.testing.assert_equal(queue.dequeue(), item)
        queue.enqueue_many(items)
        made = queue.dequeue_many(len(items))
        assert isinstance(made.data, list)
        np.testing.assert_equal(made.data, items)


def test_an_item_is_a_copy_that_may_be_written(server: Serving) -> None:
    queue = server.session().queue("q", 4)
    for size in (10, 10_000, 300_000):
        source = np.zeros(size)
        queue.enqueue(source)
        source[:] = 1
        found = queue.dequeue()
        assert found.sum() == 0
        found[:] = 2
        assert not np.shares_memory(found, source)


@pytest.mark.parametrize("leaf", [object(), np.array([None]), {1, 2}])
def test_what_may_not_travel_is_refused_with_its_path(server: Serving, leaf: object) -> None:
    queue = server.session().queue("q", 4)
    with pytest.raises(
        SchemaError, match=r"^enqueue 'q': leaf \$\.obs\[1\] is an? .*; allowed are "
    ):
        queue.enqueue({"obs": [1, leaf]})
    with pytest.raises(SchemaError):
        queue.enqueue_many([1, leaf])
    assert queue.stats()["accepted"] == 0


def test_stamps_travel_inside_the_items(server: Serving) -> None:
    session = server.session()
    queue = session.queue("q", 100)
    variable = session.variable("v", 0)
    for n in range(20):
        version = variable.assign(n)
        queue.enqueue(version, version=np.int64(version))  # type: ignore[arg-type]
    for take in (3, 7, 10):
        made = queue.dequeue_many(take)
        assert made.data.tolist() == made.version.tolist()
    with pytest.raises(TypeError):
        queue.enqueue(0, version=1.5)  # type: ignore[arg-type]


# Waiting


def test_a_waiting_dequeue_wakes_on_enqueue(server: Serving) -> None:
    queue = server.session().queue("q", 4)
    waiting = Call(lambda: queue.dequeue(timeout=DEADLINE_SECONDS))
    server.session().queue("q").enqueue("x")
    assert waiting.outcome() == "x"


def test_a_dequeue_many_that_waits_hides_nothing_and_loses_nothing(server: Serving) -> None:
    queue, other = server.session().queue("q", 8), server.session().queue("q", 8)
    queue.enqueue_many([0, 1])
    waiting = Call(lambda: queue.dequeue_many(3, timeout=0.3))
    assert other.dequeue(timeout=5) == 0
    with pytest.raises(
        TimedOut, match=r"^dequeue of 3 items from 'q': it holds 1; whoever enqueues"
    ):
        waiting.outcome()
    assert queue.stats()["delivered"] == 1
    assert other.dequeue(timeout=0) == 1
    with pytest.raises(TimedOut):
        other.dequeue(timeout=0)


def test_dequeue_up_to_takes_what_there_is(server: Serving) -> None:
    queue = server.session().queue("q", 8)
    with pytest.raises(TimedOut):
        queue.dequeue_up_to(3, timeout=0.05)
    queue.enqueue_many(range(5))
    assert queue.dequeue_up_to(3).data.tolist() == [0, 1, 2]
    assert queue.dequeue_up_to(3).data.tolist() == [3, 4]


# Closing


def test_close_lets_what_waits_get_in_and_what_is_in_get_out(server: Serving) -> None:
    queue = server.session().queue("q", 2)
    queue.enqueue_many([0, 1])
    pending = Call(lambda: queue.enqueue(2, timeout=DEADLINE_SECONDS))
    until(lambda: len(queue._connection._waiters))
    queue.stats()
    queue.close()
    queue.close()
    began = time.monotonic()
    with pytest.raises(Closed, match=r"^enqueue 'q': it is closed$"):
        queue.enqueue(3)
    assert time.monotonic() - began < 5
    assert [queue.dequeue(timeout=DEADLINE_SECONDS) for _ in range(3)] == [0, 1, 2]
    pending.outcome()
    with pytest.raises(Closed, match=r"^dequeue 'q': it is closed and holds 0 items, 1 were asked"):
        queue.dequeue(timeout=DEADLINE_SECONDS)


def test_close_can_cancel_what_waits(server: Serving) -> None:
    queue = server.session().queue("q", 1)
    queue.enqueue(0)
    pending = Call(lambda: queue.enqueue(1, timeout=DEADLINE_SECONDS))
    until(lambda: len(queue._connection._waiters))
    queue.stats()
    queue.close(cancel_pending_enqueues=True)
    with pytest.raises(Closed):
        pending.outcome()
    assert queue.dequeue() == 0
    with pytest.raises(Closed):
        queue.dequeue()


def test_close_ends_the_waits_of_consumers(server: Serving) -> None:
    queue = server.session().queue("q", 4)
    queue.enqueue(0)

    def wait(n: int) -> object:
        return queue.dequeue_many(n, timeout=None)

    waiting = [Call(wait, n) for n in (2, 3)]
    until(lambda: len(queue._connection._waiters) == 2)
    queue.close()
    for call in waiting:
        with pytest.raises(
            Closed, match=r"^dequeue 'q': it is closed and holds 1 items, [23] were"
        ):
            call.outcome()
    assert queue.dequeue() == 0


def test_consumers_of_a_closed_queue_hear_of_its_end_when_a_pending_enqueue_gives_up(
    server: Serving,
) -> None:
    queue = server.session().queue("q", 2)
    queue.enqueue(0)
    pending = Call(lambda: queue.enqueue_many([1, 2], timeout=0.3))
    until(lambda: len(queue._connection._waiters))
    queue.stats()
    queue.close()
    waiting = Call(lambda: queue.dequeue_many(2, timeout=DEADLINE_SECONDS))
    with pytest.raises(TimedOut):
        pending.outcome()
    began = time.monotonic()
    with pytest.raises(Closed):
        waiting.outcome()
    assert time.monotonic() - began < 5
    assert queue.dequeue() == 0


# Conservation


def test_counters_account_for_every_item(server: Serving) -> None:
    session = server.session()
    queue = session.queue("q", 8)
    queue.enqueue_many(range(6))
    queue.dequeue_many(2)
    queue.dequeue()
    stats = queue.stats()
    assert conserved(stats)
    assert (stats["accepted"], stats["delivered"], stats["stored"]) == (6, 3, 3)
    assert stats["dropped"] == {}
    queue.dequeue_many(3)
    assert queue.stats()["bytes"] == 0


def test_items_that_do_not_fit_the_consumers_memory_go_back(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = server.session().queue("q", 8)
    queue.enqueue_many([np.zeros(10_000), np.ones(10_000)])

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("paceline.queues.assembled", no_memory)
        with pytest.raises(MemoryError):
            queue.dequeue_many(2)
    assert conserved(queue.stats())
    assert queue.dequeue_many(2, timeout=5).data[:, 0].tolist() == [0, 1]


HOLD = """
import os, sys
from paceline.core import messages as m
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
connection = session.connection
items = connection.call(m.Dequeue("q", 3, 3, 5.0), (), 5.0)
print(sum(run.count for run in items.runs), flush=True)
sys.stdin.read()
"""


def test_what_a_killed_consumer_had_not_receipted_goes_back_to_the_head() -> None:
    with serving("unix", where="thread") as server:
        queue = server.session().queue("q", 8)
        queue.enqueue_many([np.full(10_000, n) for n in range(5)])
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, server.target, server.secret.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "3\n"
            stats = queue.stats()
            assert conserved(stats)
            assert (stats["stored"], stats["delivered"]) == (5, 0)
            waiting = Call(lambda: queue.dequeue_many(5, timeout=DEADLINE_SECONDS))
            child.kill()
            assert waiting.outcome().data[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert child.returncode == -signal.SIGKILL
        assert conserved(queue.stats())


PRODUCE = """
import os, signal, sys
import numpy as np
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="worker")
queue = session.queue("q")
queue.enqueue_many([np.full(size, 7) for size in (10, 10_000, 1_000_000)], version=3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_producer_had_enqueued_can_be_taken() -> None:
    with serving("unix", where="thread") as server:
        queue = server.session().queue("q", 8)
        command = [sys.executable, "-c", PRODUCE, server.target, server.secret.hex()]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        made = queue.dequeue_many(3, timeout=5)
        assert [len(item) for item in made.data] == [10, 10_000, 1_000_000]
        assert all((item == 7).all() for item in made.data)
        assert made.worker == ("worker:0",) * 3
        assert made.version.tolist() == [3, 3, 3]


def test_an_enqueue_of_a_killed_producer_that_still_waited_never_happens() -> None:
    program = """
import sys
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="worker")
queue = session.queue("q")
print("ready", flush=True)
queue.enqueue_many([1, 2], timeout=None)
"""
    with serving("unix", where="thread") as server:
        queue = server.session().queue("q", 2)
        queue.enqueue(0)
        with subprocess.Popen(
            [sys.executable, "-c", program, server.target, server.secret.hex()],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            behind = Call(lambda: queue.enqueue(3, timeout=DEADLINE_SECONDS))
            child.kill()
        behind.outcome()
        assert queue.dequeue_many(2, timeout=5).data.tolist() == [0, 3]
        assert conserved(queue.stats())


def test_memory_of_taken_items_is_used_again() -> None:
    with serving("unix", where="thread") as server:
        producing, consuming = server.session().queue("q", 8), server.session().queue("q", 8)
        arena = producing._connection.arena
        seen: set[int] = set()
        for n in range(200):
            producing.enqueue(np.full(32_768, n))
            assert consuming.dequeue()[0] == n
            block: Any = arena.allocate(32_768 * 8)
            seen.add(block.segment.uid)
        assert len(seen) <= 2
