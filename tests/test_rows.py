"""Rows of variables: gathered from one version, added to without moving the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from calls import Call, until
from clusters import every_engine, quiet
from wires import SECRET, serve

import paceline
from paceline.core import messages as m
from paceline.core.errors import OutOfMemory, ProtocolError, SchemaError, TimedOut, WouldBlock
from paceline.core.tree import flatten
from paceline.server.local import LocalServer
from paceline.server.service import Finish, Work
from paceline.session import Session
from paceline.testing import Serving, serving
from paceline.transports.base import Buffers, Memory
from paceline.transports.tcp import TcpListener

N, WIDTH = 1000, 16
LARGE = 40_000
"""Rows of a table of 5 MB."""


def zeros(rows: int = N) -> Any:
    return np.zeros((rows, WIDTH))


def ones(count: int) -> Any:
    return np.ones((count, WIDTH))


def done(variable: paceline.Variable[Any], session: Session) -> tuple[int, int]:
    """How often it was added to rows in place, and by way of a copy."""
    found = session.resources()["rows"][variable.name]
    return found["in_place"], found["copies"]


def numbers(reply: tuple[Any, Buffers]) -> Any:
    """What a reply brings."""
    block = reply[1][0]
    assert block is not None
    return block.array().view(np.float64)


def block_of(session: Session, array: Any) -> Memory:
    """Memory with an array's bytes, to be sent."""
    made = session.connection.arena.allocate(array.nbytes)
    made.array()[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return made


def head(count: int) -> m.Head:
    return m.Head(flatten(ones(count)).layout, [])


# What they are


def test_rows_come_in_the_shape_of_their_indices(server: Serving) -> None:
    table = np.arange(12.0).reshape(6, 2)
    variable = server.session().variable("v", table)
    for indices in (
        [5, 0, 5],
        [[0, 1], [2, 3]],
        np.array([4], np.uint8),
        3,
        torch.tensor([[1], [2]]),
        [],
    ):
        found = variable.gather(indices)
        places = np.asarray(indices, np.int64)
        assert found.tree.tolist() == table[places].tolist()
        assert found.tree.shape == table[places].shape
        assert (found.version, found.count) == (variable.version, 1)


def test_rows_are_the_callers_own(server: Serving) -> None:
    variable = server.session().variable("v", zeros())
    found = variable.gather([1, 2]).tree
    found += 5
    variable.scatter_add([1], ones(1))
    assert (found == 5).all()
    assert variable.gather([0, 1, 2]).tree[:, 0].tolist() == [0, 1, 0]
    assert variable.memory()["versions"][0]["held_by"] == ["current"]


def test_rows_of_an_index_that_comes_twice_add_up(server: Serving) -> None:
    variable = server.session().variable("v", zeros())
    before = variable.version
    version = variable.scatter_add([[3, 7], [3, 3]], np.full((2, 2, WIDTH), 2.0))
    assert version == before + 1 == variable.version == variable.read().version
    wanted = zeros()
    wanted[3], wanted[7] = 6, 2
    assert (variable.read().tree == wanted).all()


def test_one_leaf_or_all_leaves_are_meant(server: Serving) -> None:
    tree = {"emb": np.zeros((4, 2), np.float32), "bias": [np.zeros(4, np.int32)]}
    variable = server.session().variable("v", tree)
    variable.scatter_add([1, 1], np.ones((2, 2), np.float32), "$.emb")
    rows = {"bias": [np.array([5, 6], np.int32)], "emb": torch.ones(2, 2)}
    variable.scatter_add([0, 3], rows)
    assert variable.gather([3, 1], leaf="$.bias[0]").tree.tolist() == [6, 0]
    found: Any = variable.gather([0, 1]).tree
    assert found["emb"].tolist() == [[1, 1], [2, 2]]
    assert found["bias"][0].tolist() == [5, 0]
    whole: Any = variable.read().tree
    assert whole["emb"].tolist() == [[1, 1], [2, 2], [0, 0], [1, 1]]


def test_without_indices_there_is_no_new_version(server: Serving) -> None:
    variable = server.session().variable("v", zeros())
    before = variable.version
    assert variable.scatter_add([], ones(0)) == before == variable.version
    assert variable.gather([]).tree.shape == (0, WIDTH)
    with pytest.raises(SchemaError, match=r"the rows of leaf \$ are float64\[0\], not float64"):
        variable.scatter_add([], np.zeros(0))


def test_a_gather_stamps_as_a_read_does(server: Serving) -> None:
    variable = server.session().variable("v", zeros())
    first = variable.gather([0]).version
    second = variable.scatter_add([0], ones(1))
    variable.gather([0])
    assert (variable.first_read, variable.held) == (first, second)


def looking_up(table: paceline.Variable[Any]) -> Iterator[Any]:
    while True:
        yield {"rows": table.gather([1, 1]).tree}


@every_engine
def test_items_are_stamped_with_the_version_of_their_rows(engine: str) -> None:
    with quiet(1, engine) as cluster:
        table = cluster.variable("t", zeros())
        batches = cluster.collect(looking_up, table, batch_size=2, max_lag=None)
        for _ in range(4):
            batch = batches.next(timeout=60)
            assert (batch.data["rows"][:, 0, 0] == batch.count - 1).all()
            table.scatter_add([1], ones(1))


# What is refused


def test_nothing_is_added_where_anything_is_wrong(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", {"a": zeros(), "n": 1})
    before = variable.version
    odd: list[tuple[Any, Any, str | None, str]] = [
        ([0, N], ones(2), "$.a", rf"index {N} at \[1\] is none of leaf \$\.a, which has {N} rows"),
        ([0, -1], ones(2), "$.a", r"index -1 at \[1\] is none of leaf \$\.a"),
        (
            [0, 1],
            ones(1),
            "$.a",
            r"the rows of leaf \$\.a are float64\[1,16\], not float64\[2,16\]",
        ),
        (
            [0],
            np.ones((1, WIDTH), np.float32),
            "$.a",
            r"the rows of leaf \$\.a are float32\[1,16\]",
        ),
        ([0], ones(1), "$.b", r"there is no leaf \$\.b; there are \['\$\.a', '\$\.n'\]"),
        ([0], ones(1), None, r"leaf \$\.n is int, which has no rows; name the leaf"),
        ([0], {"x": {1, 2}}, "$.a", r"leaf \$\.x is a set"),
        ([0.5], ones(1), "$.a", "indices are whole numbers, not float64"),
    ]
    for indices, rows, leaf, said in odd:
        with pytest.raises(SchemaError, match=f"^scatter_add 'v': {said}"):
            variable.scatter_add(indices, rows, leaf)
    with pytest.raises(SchemaError, match=rf"^gather 'v': index {N} at \[0, 1\] is none of leaf"):
        variable.gather([[0, N]], "$.a")
    assert variable.version == before
    assert not variable.read().tree["a"].any()


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
@pytest.mark.parametrize(
    ("shape", "buffer", "said"),
    [
        ((2,), 8, r"1 indices came as \[2\]"),
        ((1,), 7, "indices of 7 bytes"),
        ((1,), 0, "0 indices"),
    ],
)
def test_indices_that_lie_about_their_shape_end_the_connection(
    carrier: Any, shape: tuple[int, ...], buffer: int, said: str
) -> None:
    with serving(carrier, where="thread") as server:
        server.session().variable("v", zeros())
        liar = server.session().connection
        block = liar.arena.allocate(buffer) if buffer else None
        with pytest.raises(ProtocolError, match=said):
            liar.call(m.Gather("v", None, shape), [block])
        until(lambda: not liar.alive())
        assert server.session().variable("v").gather([0]).tree.shape == (1, WIDTH)


def test_rows_that_lie_about_their_length_end_the_connection() -> None:
    with serving("unix", where="thread") as server:
        variable = server.session().variable("v", zeros())
        session = server.session()
        lies = [block_of(session, np.zeros(1, np.int64)), block_of(session, np.ones(8))]
        with pytest.raises(ProtocolError, match="a tree of 128 bytes came with 64"):
            session.connection.call(m.ScatterAdd("v", None, (1,), head(1)), lies)
        assert not variable.read().tree.any()


# In place, or by way of a copy


def test_only_the_first_addition_after_an_assign_copies_the_table(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", zeros(LARGE))
    for n in range(5):
        variable.scatter_add([n, n], ones(2))
    assert done(variable, session) == (4, 1)
    variable.assign(zeros(LARGE))
    variable.scatter_add([0], ones(1))
    assert done(variable, session) == (4, 2)
    variable.assign_add(zeros(LARGE))
    variable.scatter_add([0], ones(1))
    assert variable.gather([0]).tree[0, 0] == 2
    assert len(variable.memory()["versions"]) == 1


@pytest.mark.parametrize("rows", [4, N, LARGE])
def test_a_snapshot_never_changes(server: Serving, rows: int) -> None:
    session = server.session()
    variable = session.variable("v", zeros(rows))
    reading = server.session().variable("v")
    held = []
    for n in range(6):
        held.append(reading.read())
        variable.scatter_add([0, 3], ones(2))
        if n % 2:
            variable.scatter_add([0], ones(1))
    wanted = [n + n // 2 for n in range(6)]
    assert [snapshot.tree[0, 0] for snapshot in held] == wanted
    assert [snapshot.tree[3, 0] for snapshot in held] == list(range(6))
    # Who shares no memory with the server looks at a copy of its own.
    shared = reading.memory()["versions"][0]["held_by"] != ["current"]
    assert done(variable, session) == ((3, 6) if shared else (8, 1))
    del held


def test_a_tagged_version_never_changes(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", zeros())
    variable.scatter_add([0], ones(1))
    variable.tag("one")
    variable.scatter_add([0], ones(1))
    variable.scatter_add([0], ones(1))
    assert variable.read(tag="one").tree[0, 0] == 1
    assert variable.gather([0]).tree[0, 0] == 3
    assert done(variable, session) == (1, 2)
    variable.untag("one")


def test_what_is_on_its_way_to_a_reader_never_changes() -> None:
    listener = TcpListener("127.0.0.1:0")
    with ExitStack() as ends:
        ends.enter_context(serve(listener))
        writer, reader = (
            ends.enter_context(Session(f"tcp:{listener.place}", secret=SECRET)) for _ in range(2)
        )
        variable = writer.variable("v", zeros(LARGE))
        variable.scatter_add([0], ones(1))
        behind = reader.variable("v")
        # More than sockets take: the rest lies in the server, where it is sent from.
        pending = [
            reader.connection.post(m.Read("v", m.NO_VERSION, None), timeout=None) for _ in range(8)
        ]
        until(lambda: len(writer.variable("v").memory()["versions"][0]["held_by"]) == 2)
        for _ in range(3):
            variable.scatter_add(np.arange(LARGE // 10), ones(LARGE // 10))
        for each in pending:
            rows = numbers(each.result()).reshape(LARGE, WIDTH)
            assert rows[0, 0] == 1
            assert not rows[1:].any()
        assert behind.gather([0, 1]).tree[:, 0].tolist() == [4, 3]


class Gate:
    """Work beside the loop of a server within this process, done when the gate opens."""

    def __init__(self, server: LocalServer) -> None:
        self.held: deque[tuple[Work, Finish]] = deque()
        server.service.run_long = lambda work, finish: self.held.append((work, finish))

    def open(self) -> None:
        while self.held:
            work, finish = self.held.popleft()
            work()
            finish(None)


def test_who_reads_while_rows_are_added_in_place_gets_what_they_become() -> None:
    server = LocalServer(waits=False)
    session, other = (Session(channel=server.connect()) for _ in range(2))
    variable = session.variable("v", zeros(LARGE))
    variable.scatter_add([0], ones(1))
    gate = Gate(server)
    many = np.arange(LARGE // 2)
    places, rows = block_of(session, many), block_of(session, ones(many.size))
    before = variable.version
    line = other.connection
    add = session.connection.post(
        m.ScatterAdd("v", None, many.shape, head(many.size)), [places, rows]
    )
    read = line.post(m.Read("v", m.NO_VERSION, 0.0))
    tagged = line.call(m.Tag("v", "now")).version
    by_tag = line.post(m.ReadTag("v", "now"))
    taken = line.post(m.Gather("v", None, many.shape), [places])
    small = line.post(m.Gather("v", None, ()), [places.part(8, 8)])
    one = [places.part(0, 8), rows.part(0, 8 * WIDTH)]
    written = line.post(m.ScatterAdd("v", None, (1,), head(1)), one, None)
    # Nobody has been answered: what they wait for is to be done in this order.
    assert len(gate.held) == 5
    assert variable.version == before
    gate.open()
    assert add.result()[0].version == before + 1 == tagged
    for each in (read, by_tag, taken):
        value = each.result()
        found = numbers(value).reshape(-1, WIDTH)
        assert value[0].version == before + 1
        assert (found[0] == 2).all()
        assert (found[1 : many.size] == 1).all()
    assert numbers(small.result()).tolist() == [1] * WIDTH
    # The tag keeps it, so what came after went to a copy.
    assert written.result()[0].version == before + 2
    assert other.variable("v").read(tag="now").tree[0, 0] == 2
    assert other.variable("v").read().tree[0, 0] == 3
    server.close()


def test_rows_are_added_after_those_before_are_gathered() -> None:
    server = LocalServer(waits=False)
    session = Session(channel=server.connect())
    variable = session.variable("v", zeros(LARGE))
    variable.scatter_add([0], ones(1))
    gate = Gate(server)
    line, many = session.connection, np.zeros(LARGE // 2, np.int64)
    gathered = line.post(m.Gather("v", None, many.shape), [block_of(session, many)])
    one = [block_of(session, many[:1]), block_of(session, ones(1))]
    small = line.post(m.ScatterAdd("v", None, (1,), head(1)), one)
    assert len(gate.held) == 2
    gate.open()
    value = gathered.result()
    assert value[0].version + 1 == small.result()[0].version
    assert (numbers(value) == 1).all()
    assert variable.gather([0]).tree[0, 0] == 2
    server.close()


def test_in_a_round_of_lockstep_rows_are_those_of_its_version() -> None:
    server = LocalServer(waits=False)
    chief = Session(channel=server.connect())
    worker = Session(job="w", channel=server.connect())
    table, mine = chief.variable("v", zeros()), worker.variable("v")
    table.scatter_add([0], ones(1))
    chief.connection.call(m.OpenCollection("c", "v", 1, 0, 1, 1 << 20, ["w:0"]))
    worker.connection.call(m.Offer("c", [], 0, 0, 0.0))
    chief.connection.post(m.Next("c", False, None), timeout=None)
    before = table.version
    for _ in range(3):
        table.scatter_add([0], ones(1))
        found = mine.gather([0])
        assert (found.version, found.tree[0, 0]) == (before, 1)
    assert mine.read().tree[0, 0] == 1
    assert table.gather([0]).tree[0, 0] == 4
    assert done(table, chief) == (2, 2)
    server.close()


# The bound


def test_an_addition_in_place_needs_no_room_and_a_copy_waits_for_it() -> None:
    with serving("unix", where="thread") as server:
        session = server.session()
        size = zeros().nbytes
        variable = session.variable("v", zeros(), memory=2 * size)
        variable.scatter_add([0], ones(1))
        reading = server.session().variable("v")
        first = reading.read()
        variable.scatter_add([0], ones(1))
        variable.scatter_add([0], ones(1), timeout=0)
        second = reading.read()
        with pytest.raises(TimedOut, match=r"^scatter_add 'v': no room in 'v' for another 128000"):
            variable.scatter_add([0], ones(1), timeout=0.05)
        call = Call(variable.scatter_add, [0], ones(1))
        until(lambda: variable.memory()["waiting"] == 1)
        del first
        assert call.outcome() == second.version + 1
        assert second.tree[0, 0] == 3
        del second


def test_who_holds_what_stands_in_the_way_hears_so_at_once() -> None:
    with serving("unix", where="thread") as server:
        variable = server.session().variable("v", zeros(), memory=2 * zeros().nbytes)
        held = [variable.read()]
        variable.assign(zeros())
        with pytest.raises(OutOfMemory, match=r"this session itself holds \[1\]"):
            variable.scatter_add([0], ones(1))
        del held


def test_in_one_thread_nothing_can_make_room() -> None:
    server = LocalServer(waits=False)
    session, other = (Session(channel=server.connect()) for _ in range(2))
    variable = session.variable("v", zeros(), memory=2 * zeros().nbytes)
    held = other.variable("v").read()
    variable.assign(zeros())
    with pytest.raises(WouldBlock, match=r"^scatter_add 'v': no room in 'v' for another 128000"):
        variable.scatter_add([0], ones(1))
    del held
    server.close()


# Many at once

COUNT, WORKERS, AT_ONCE = 250_000, 4, 10_000


def drawn(index: int) -> tuple[Any, Any]:
    """Indices and rows of a worker: whole numbers, so that sums do not depend on the order."""
    draw = np.random.default_rng(index)
    # Some rows are wanted by all.
    indices = np.minimum(draw.zipf(1.3, COUNT), LARGE) - 1
    return indices, draw.integers(-8, 8, (COUNT, 1)).astype(np.float64) * np.ones(WIDTH)


def adding(table: paceline.Variable[Any], worker: paceline.Worker) -> int:
    """Add a quarter of a million rows, and gather as many meanwhile; how many were torn."""
    indices, rows = drawn(worker.index)
    torn = 0
    size = 0
    # Below what is done beside the loop, and above it.
    sizes = (AT_ONCE // 10, 2 * AT_ONCE - AT_ONCE // 10)
    start = 0
    while start < COUNT:
        some = indices[start : start + sizes[size % 2]]
        table.scatter_add(some, rows[start : start + len(some)])
        found = table.gather(some).tree
        torn += int((found != found[:, :1]).sum())
        start += len(some)
        size += 1
    return torn


@pytest.mark.timeout(180)
def test_a_million_rows_added_and_gathered_by_four_processes_are_those_of_numpy() -> None:
    with quiet(WORKERS) as cluster:
        table = cluster.variable("t", zeros(LARGE))
        assert cluster.run(adding, table) == [0] * WORKERS
        wanted = zeros(LARGE)
        for index in range(WORKERS):
            np.add.at(wanted, *drawn(index))
        assert (table.read().tree == wanted).all()
        everything = np.random.default_rng(9).permutation(np.resize(np.arange(LARGE), 1_000_000))
        for some in np.split(everything, 20):
            assert (table.gather(some).tree == wanted[some]).all()
        stats = cluster.session.resources()["rows"]["t"]
        assert (stats["added"], stats["gathered"]) == (1_000_000, 2_000_000)
        assert stats["in_place"] > stats["copies"]


def raising(table: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[int]:
    """Every row by one, again and again."""
    everything, one = np.arange(LARGE), ones(LARGE)
    while not worker.should_stop():
        table.scatter_add(everything, one)
        yield 1


@pytest.mark.timeout(120)
def test_rows_under_constant_additions_are_of_one_version() -> None:
    with quiet(2) as cluster:
        table = cluster.variable("t", zeros(LARGE))
        cluster.collect(raising, table, batch_size=1, version_of=None)
        last = 0.0
        for n in range(60):
            found = table.gather(np.arange(0, LARGE, 3)) if n % 3 else table.read()
            assert (found.tree == found.count - 1).all()
            assert found.count > last - 1
            last = found.count
        table.read(newer_than=table.version, timeout=60)


# A reset


def test_rows_added_when_their_container_is_reset_never_existed() -> None:
    server = LocalServer(waits=False)
    session = Session(channel=server.connect())
    line, many = session.connection, np.arange(LARGE // 2)
    variable = session.variable("v", zeros(LARGE))
    variable.scatter_add([0], ones(1))
    gate = Gate(server)
    places, rows = block_of(session, many), block_of(session, ones(many.size))
    add = line.post(m.ScatterAdd("v", None, many.shape, head(many.size)), [places, rows])
    session.reset()
    anew = session.variable("v", zeros(LARGE))
    gate.open()
    with pytest.raises(paceline.WasReset):
        add.result()
    with pytest.raises(paceline.WasReset):
        variable.gather([0])
    assert not anew.read().tree.any()
    assert session.resources()["rows"] == {}
    server.close()
