"""Items taken without a copy: views of the producer's memory that stay as they are while held."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, until

from paceline.core import messages as m
from paceline.core.errors import Disconnected
from paceline.queues import Queue
from paceline.session import Session
from paceline.testing import Serving, serving

SIZE = 40_000


def full(n: int) -> dict[str, Any]:
    return {"x": np.full(SIZE, n), "n": n}


def keep_producing(queue: Queue[Any], times: int = 20) -> None:
    """Write to whatever memory the producer may use again."""
    for _ in range(times):
        queue.enqueue(full(99), timeout=DEADLINE_SECONDS)
        assert queue.dequeue(timeout=DEADLINE_SECONDS)["n"] == 99


def test_lent_items_are_read_only_views_whatever_carries_them(server: Serving) -> None:
    queue = server.session().queue("q", 8)
    queue.enqueue_many([full(n) for n in range(4)])
    queue.enqueue({"x": np.arange(3), "n": 4})
    one = queue.dequeue(copy=False)
    batch = queue.dequeue_many(2, copy=False)
    rest = queue.dequeue_up_to(9, copy=False)
    assert [type(part.data) for part in (batch, rest)] == [list, list]
    items = [one, *batch.data, *rest.items()]
    assert [(item["n"], item["x"][-1]) for item in items] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 2),
    ]
    for item in items:
        with pytest.raises(ValueError, match="read-only"):
            item["x"][0] = 7
    assert (len(batch), batch.worker) == (2, ("session:0",) * 2)
    assert queue.stats()["delivered"] == 5
    assert queue.stats()["bytes"] == 0


def test_small_items_of_one_run_are_lent_one_by_one(server: Serving) -> None:
    queue = server.session().queue("q", 3000)
    queue.enqueue_many([{"x": np.full(8, n), "name": str(n)} for n in range(3000)])
    queue.dequeue_many(7, copy=False)
    batch = queue.dequeue_many(2993, copy=False)
    assert [(item["x"][0], item["name"]) for item in batch.data] == [
        (n, str(n)) for n in range(7, 3000)
    ]


def test_to_torch_copies_lent_items_so_that_they_may_be_written(server: Serving) -> None:
    torch = pytest.importorskip("torch")
    queue = server.session().queue("q", 4)
    queue.enqueue_many([full(1), full(2)])
    lent = queue.dequeue_many(2, copy=False)
    there = lent.to("torch")
    for item in there.data:
        item["x"].add_(1)
    assert torch.equal(there.data[0]["x"], torch.full((SIZE,), 2))
    assert [int(item["x"].sum()) for item in lent.data] == [SIZE, 2 * SIZE]


def test_a_view_stays_as_it_is_while_its_producer_goes_on_and_its_memory_is_then_used() -> None:
    with serving("unix", where="thread") as server:
        producing, consuming = server.session().queue("q", 8), server.session().queue("q", 8)
        producing.enqueue(full(1))
        part = consuming.dequeue(copy=False)["x"][10:20].reshape(2, 5)
        keep_producing(producing)
        assert (part == 1).all()

        def used_again() -> bool:
            """Whether what is enqueued now lies where the view lay."""
            producing.enqueue(full(5))
            return bool(consuming.dequeue(copy=False)["x"].ctypes.data == where)

        where = part.ctypes.data - 10 * part.itemsize
        assert not any(used_again() for _ in range(5))
        del part
        until(used_again)


def test_a_view_outlives_its_producer_its_queue_and_its_session() -> None:
    with serving("unix") as server:
        other = server.session().queue("q", 8)
        program = f"""
import os, signal, sys
import numpy as np
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
session.queue("q").enqueue_many([np.full({SIZE}, 7)] * 2)
os.kill(os.getpid(), signal.SIGKILL)
"""
        command = [sys.executable, "-c", program, server.target, server.secret.hex()]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        consumer = server.session()
        lent = consumer.queue("q").dequeue_many(2, copy=False, timeout=DEADLINE_SECONDS)
        keep_producing(other)
        consumer.queue("q").close()
        consumer.close()
        assert all((item == 7).all() for item in lent.data)
    assert all((item == 7).all() for item in lent.data)


def test_a_view_stays_as_it_is_when_its_session_closes_and_the_producer_goes_on() -> None:
    with serving("unix", where="thread") as server:
        producing = server.session().queue("q", 8)
        consumer = server.session()
        producing.enqueue(full(1))
        lent = consumer.queue("q").dequeue(copy=False)
        snapshot = consumer.variable("v", np.full(SIZE, 1)).read()
        consumer.close()
        consumer.close()
        keep_producing(producing)
        variable = server.session().variable("v")
        for _ in range(20):
            variable.assign(np.full(SIZE, 2))
        assert (lent["x"] == 1).all()
        assert (snapshot.tree == 1).all()


def test_a_session_that_left_gives_back_what_it_had_not_receipted_while_its_views_live() -> None:
    with serving("unix", where="thread") as server:
        queue = server.session().queue("q", 8)
        queue.enqueue_many([full(0), full(1), full(2)])
        consumer = server.session()
        lent = consumer.queue("q").dequeue(copy=False)
        consumer.connection.call(m.Dequeue("q", 1, 1, 0.0), timeout=5)
        consumer.close()
        assert queue.dequeue_many(2, timeout=0).data["n"].tolist() == [1, 2]
        assert server.session().resources()["members"] == ["session:0", "session:1"]
        assert lent["n"] == 0


def test_memory_lent_before_the_server_died_is_not_written_again() -> None:
    with serving("unix") as server:
        producing, consuming = server.session().queue("q", 8), server.session().queue("q", 8)
        producing.enqueue(full(1))
        lent = consuming.dequeue(copy=False)
        server.kill()
        for _ in range(20):
            with pytest.raises(Disconnected):
                producing.enqueue(full(2))
        assert (lent["x"] == 1).all()


def test_the_last_view_of_a_closed_session_hangs_up() -> None:
    with serving("unix", where="thread") as server:
        consumer: Session = server.session()
        queue = consumer.queue("q", 8)
        queue.enqueue_many([full(1), full(2)])
        lent = queue.dequeue_many(2, copy=False).data
        line = consumer.connection._channel._sock  # type: ignore[attr-defined]
        consumer.close()
        assert line.fileno() >= 0
        lent.pop()
        assert line.fileno() >= 0
        lent.clear()
        until(lambda: line.fileno() == -1)


@pytest.mark.parametrize("size", [1, 7, 500, SIZE])
def test_what_is_looked_at_is_aligned_for_its_dtype(server: Serving, size: int) -> None:
    session = server.session()
    tree = {"odd": "x" * 3, "flags": np.ones(size, np.bool_), "x": np.ones(size)}
    snapshot = session.variable("v", tree).read()
    queue = session.queue("q", 4)
    queue.enqueue_many([tree, tree, tree])
    lent = queue.dequeue(copy=False)
    for view in (snapshot.tree, lent, *queue.dequeue_many(2, copy=False).items()):
        assert view["x"].flags.aligned
        assert not view["x"].flags.writeable
        assert (view["x"] == 1).all()
