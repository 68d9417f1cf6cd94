"""Shuffled queues, queues by priority, and padding, as users have them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until
from test_queues import conserved

from paceline import Closed, SchemaError, Session, TimedOut, WouldBlock
from paceline.server.local import LocalServer
from paceline.testing import Serving, serving

# Orders


def test_a_shuffled_queue_keeps_some_back_and_drains_when_closed(server: Serving) -> None:
    queue = server.session().queue("q", 8, order="shuffle", min_after_dequeue=4, seed=3)
    queue.enqueue_many(range(6))
    first = queue.dequeue_many(2).data.tolist()
    with pytest.raises(
        TimedOut,
        match=r"^dequeue of 1 items from 'q': it holds 4, of which min_after_dequeue=4 stay until"
        r" it is closed; whoever enqueues ends the wait",
    ):
        queue.dequeue(timeout=0.05)
    waiting = Call(lambda: queue.dequeue_up_to(8, timeout=DEADLINE_SECONDS).data.tolist())
    server.session().queue("q").close()
    assert sorted(first + waiting.outcome()) == list(range(6))
    with pytest.raises(Closed):
        queue.dequeue()
    assert conserved(queue.stats())


def test_the_lowest_priority_comes_out_first_and_of_equal_ones_the_oldest(server: Serving) -> None:
    queue = server.session().queue("q", 16, order="priority")
    queue.enqueue("late", priority=9)
    queue.enqueue_many(["a", "b"], priority=2)
    queue.enqueue_many(["c", "d", "e"], priority=[2, -1, np.int64(2)])
    assert queue.dequeue() == "d"
    assert queue.dequeue_many(5).data == ["a", "b", "c", "e", "late"]
    queue.enqueue_many([], priority=[])


@pytest.mark.parametrize("priority", [None, 0.5, "1", 1 << 63, [1], [1, 2.5], ["a", "b"]])
def test_a_priority_is_an_int64_for_all_or_for_each(server: Serving, priority: Any) -> None:
    queue = server.session().queue("q", 8, order="priority")
    with pytest.raises(SchemaError, match=r"^enqueue 'q': .*priority"):
        queue.enqueue_many([0, 1], priority=priority)
    assert queue.size == 0


def test_a_priority_is_for_a_queue_of_that_order(server: Serving) -> None:
    queue = server.session().queue("q", 8)
    with pytest.raises(
        SchemaError,
        match=r"^enqueue 'q': priority=1 is for order='priority', this queue is 'fifo'$",
    ):
        queue.enqueue(0, priority=1)


def test_an_order_belongs_to_the_definition(server: Serving) -> None:
    session = server.session()
    made = session.queue("q", 4, order="shuffle", min_after_dequeue=2, seed=1)
    found = server.session().queue("q")
    assert (found.order, found.min_after_dequeue) == (made.order, 2) == ("shuffle", 2)
    assert ", shuffle, on " in repr(found)
    with pytest.raises(
        SchemaError,
        match=r"^queue 'q' exists with capacity=4, .* order='shuffle', min_after_dequeue=2, seed=1;"
        r" asked for: capacity=4, .* order='priority'$",
    ):
        session.queue("q", 4, order="priority")
    assert session.resources()["queues"]["q"]["order"] == "shuffle"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"order": "lifo"}, r"order is one of \('fifo', 'shuffle', 'priority'\), not 'lifo'$"),
        ({"min_after_dequeue": 1}, r"min_after_dequeue and seed are for order='shuffle', this one"),
        ({"order": "priority", "seed": 1}, r"min_after_dequeue and seed are for order='shuffle'"),
        (
            {"order": "shuffle", "min_after_dequeue": 4},
            r"min_after_dequeue=4 of capacity=4: at lea",
        ),
        ({"order": "shuffle", "min_after_dequeue": -1}, r"min_after_dequeue is a whole number, 0"),
        ({"order": "shuffle", "seed": 0.5}, r"seed"),
    ],
)
def test_what_is_no_definition_is_refused(server: Serving, options: Any, says: str) -> None:
    with pytest.raises(SchemaError, match=rf"^queue 'q': {says}"):
        server.session().queue("q", 4, **options)
    with pytest.raises(
        SchemaError, match=r"^queue 'q': order, min_after_dequeue and seed come wit"
    ):
        server.session().queue("q", order="shuffle")


def test_a_producer_at_its_bound_waits_whatever_the_order(server: Serving) -> None:
    queue = server.session().queue("q", 4, order="priority", per_producer=1)
    queue.enqueue("x", priority=1)
    with pytest.raises(TimedOut, match=r"this producer has 1 of its per_producer=1 items in it"):
        queue.enqueue("y", priority=0, timeout=0.05)
    server.session().queue("q").enqueue("z", priority=0)
    assert queue.dequeue_many(2).data == ["z", "x"]


def test_what_only_a_close_or_more_items_could_end_is_refused_in_one_thread() -> None:
    server = LocalServer(waits=False)
    queue = Session(channel=server.connect()).queue("q", 4, order="shuffle", min_after_dequeue=2)
    queue.enqueue_many([0, 1])
    with pytest.raises(WouldBlock, match=r"^dequeue of 1 items from 'q': it holds 2, of which min"):
        queue.dequeue()
    queue.close()
    assert sorted(queue.dequeue_many(2).data.tolist()) == [0, 1]
    server.close()


# Padding


def test_ragged_items_are_padded_to_the_largest_of_the_batch(server: Serving) -> None:
    queue = server.session().queue("q", 8)
    items: list[Any] = [
        {"obs": np.full((n, 5 - n), n, np.float32), "n": np.int16(n), "name": str(n), "done": n > 2}
        for n in (1, 3, 3, 2)
    ]
    queue.enqueue_many(items)
    batch = queue.dequeue_many(4, pad=-1)
    data, shapes = batch.data, batch.shapes
    assert (data["obs"].shape, data["obs"].dtype) == ((4, 3, 4), np.float32)
    assert data["n"].tolist() == [1, 3, 3, 2]
    assert (data["name"], data["done"].tolist()) == (
        ["1", "3", "3", "2"],
        [False, True, True, False],
    )
    assert shapes["obs"].tolist() == [[1, 4], [3, 2], [3, 2], [2, 3]]
    assert (shapes["n"].shape, shapes["name"], shapes["done"]) == ((4, 0), None, None)
    for place, item in enumerate(items):
        rows, columns = item["obs"].shape
        assert (data["obs"][place, :rows, :columns] == item["obs"]).all()
        rest = data["obs"][place].copy()
        rest[:rows, :columns] = -1
        assert (rest == -1).all()
    for own, item in zip(batch.items(), items, strict=True):
        assert own["obs"].tolist() == item["obs"].tolist()
        assert own["name"] == item["name"]
    data["obs"][:] = 0


def test_without_pad_ragged_items_are_a_list(server: Serving) -> None:
    queue = server.session().queue("q", 8)
    queue.enqueue_many([np.zeros(2), np.zeros(3)])
    batch = queue.dequeue_up_to(8)
    assert [len(item) for item in batch.data] == [2, 3]
    assert batch.shapes is None


def test_items_of_one_size_and_of_none_are_padded_too(server: Serving) -> None:
    queue = server.session().queue("q", 8)
    queue.enqueue_many([np.ones(2), np.ones(2)])
    same = queue.dequeue_many(2, pad=0)
    assert (same.data.tolist(), same.shapes.tolist()) == ([[1, 1], [1, 1]], [[2], [2]])
    queue.enqueue_many([np.ones((0, 2)), np.ones((2, 1)), np.ones((0, 2))])
    some = queue.dequeue_up_to(8, pad=np.nan)
    assert some.shapes.tolist() == [[0, 2], [2, 1], [0, 2]]
    assert np.isnan(some.data).sum() == 10
    queue.enqueue_many(["a", "b"])
    assert queue.dequeue_many(2, pad=0).data == ["a", "b"]


@pytest.mark.parametrize(
    ("items", "pad", "says"),
    [
        (
            [{"a": np.zeros(1)}, {"a": np.zeros((1, 1))}],
            0,
            r"leaf \$.a is float64\[1,1\], in the fi",
        ),
        (
            [{"a": np.zeros(1)}, {"a": np.zeros(1, "f4")}],
            0,
            r"leaf \$.a is float32\[1\], in the fi",
        ),
        ([{"a": 1}, {"b": 1}], 0, r"leaf \$.a is missing, in the first item int"),
        ([{"a": 1, "b": 2}, {"b": 1, "a": 2}], 0, r"the items have their parts in another order"),
        ([np.zeros(1, "u1"), np.zeros(2, "u1")], 256, r"leaf \$ is uint8$"),
        ([np.zeros(1, int), np.zeros(2, int)], 0.5, r"leaf \$ is int64$"),
        ([np.zeros(1, int), np.zeros(2, int)], np.nan, r"leaf \$ is int64$"),
        ([np.zeros(1, bool), np.zeros(2, bool)], 2, r"leaf \$ is bool$"),
        ([np.zeros(1), np.zeros(2)], "x", r"it is a number$"),
    ],
)
def test_what_cannot_be_padded_is_named_and_stays(
    server: Serving, items: Any, pad: Any, says: str
) -> None:
    queue = server.session().queue("q", 8)
    queue.enqueue_many(items)
    with pytest.raises(SchemaError, match=rf"^dequeue 'q': pad={pad!r}: {says}"):
        queue.dequeue_many(2, pad=pad)
    assert len(queue.dequeue_many(2, timeout=5)) == 2
    with pytest.raises(SchemaError, match=r"^dequeue 'q': pad=0 with copy=False"):
        queue.dequeue_many(2, pad=0, copy=False)


# Processes that die

WORK = """
import os, sys
from paceline import Closed
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job=sys.argv[3])
queue, done = session.queue("q"), session.queue("done")
mine, rank = int(sys.argv[4]), {} if queue.order != "priority" else {"priority": 0}
if sys.argv[3] == "producer":
    for n in range(100):
        rank = {key: n % 3 for key in rank}
        queue.enqueue((mine, n), timeout=60, **rank)
        done.enqueue(("made", mine, n), timeout=60)
else:
    while True:
        try:
            item = queue.dequeue(timeout=60)
        except Closed:
            break
        done.enqueue(("taken", *item), timeout=60)
print("ended", flush=True)
"""


def _worker(server: Serving, job: str, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORK, server.target, server.secret.hex(), job, str(number)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("order", ["fifo", "shuffle", "priority"])
def test_workers_feed_workers_and_one_on_each_side_is_killed(order: Any) -> None:
    with serving("unix", where="thread") as server:
        session = server.session()
        options = {"min_after_dequeue": 3, "seed": 1} if order == "shuffle" else {}
        queue = session.queue("q", 8, order=order, **options)
        done = session.queue("done", 4096)
        producers = [_worker(server, "producer", n) for n in range(2)]
        consumers = [_worker(server, "consumer", n) for n in range(2)]
        try:
            # In the midst of it, so that both have something in their hands.
            until(lambda: queue.stats()["delivered"] > 20)
            producers[0].send_signal(signal.SIGKILL)
            consumers[0].send_signal(signal.SIGKILL)
            assert [producer.wait(120) for producer in producers] == [-signal.SIGKILL, 0]
            queue.close()
            assert [consumer.wait(120) for consumer in consumers] == [-signal.SIGKILL, 0]
        finally:
            for process in [*producers, *consumers]:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
        stats = queue.stats()
        assert conserved(stats)
        assert (stats["stored"], stats["accepted"]) == (0, stats["delivered"])
        seen = Counter(tuple(one) for one in done.dequeue_up_to(4096).items())
        made = {one[1:] for one in seen if one[0] == "made"}
        taken = {one[1:] for one in seen if one[0] == "taken"}
        # Nothing twice; a killed one may not have told of its last item.
        assert set(seen.values()) == {1}
        assert len(made - taken) <= 1
        assert len(taken - made) <= 1
        assert stats["delivered"] - len(taken) in (0, 1)
        assert {(1, n) for n in range(100)} <= made
