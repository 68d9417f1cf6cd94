"""One moment of a whole cluster: what is saved of it, and what comes back."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hands
import numpy as np
import pytest
from calls import Call, until, waits
from clusters import accounted

import paceline
from paceline import checkpoints, noting
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import TimedOut
from paceline.core.tree import flatten
from paceline.core.versions import count_of, epoch_of
from paceline.cuts import cut
from paceline.server import cut_desk, freezing
from paceline.server.local import LocalServer
from paceline.testing import Serving

SECRET = b"s" * 32


def moved(folder: Path, fill: Callable[[paceline.Session], object]) -> paceline.Session:
    """Another private session, with what was saved of one that was filled so."""
    with paceline.Session() as first:
        fill(first)
        first.save(folder)
    session = paceline.Session()
    assert session.restore(folder) is not None
    return session


def items(*marks: int) -> list[dict[str, Any]]:
    return [{"x": np.full(2, mark), "text": str(mark)} for mark in marks]


def left(queue: paceline.Queue[Any]) -> list[int]:
    found = []
    while queue.size:
        item = queue.dequeue(timeout=0)
        assert item["x"].tolist() == [int(item["text"])] * 2
        found.append(int(item["text"]))
    return found


# What comes back


@pytest.mark.parametrize("order", ["fifo", "priority", "shuffle"])
def test_a_queue_comes_back_with_its_items_in_order_and_its_counts(
    tmp_path: Path, order: Any
) -> None:
    def fill(session: paceline.Session) -> None:
        seed = 3 if order == "shuffle" else None
        queue = session.queue("q", 20, order=order, seed=seed, per_producer=9)
        ranks = {"priority": 1} if order == "priority" else {}
        queue.enqueue_many(items(0, 1, 2), **ranks)
        queue.enqueue_many(items(3, 4), **({"priority": 0} if ranks else {}))
        queue.enqueue({"x": np.full(2, 5), "text": "5"}, **ranks)
        queue.dequeue()
        # What nobody has receipted is stored still.
        session.connection.call(m.Dequeue("q", 2, 2, 0.0))
        wanted.extend(queue.stats().items())

    wanted: list[tuple[str, Any]] = []
    with moved(tmp_path, fill) as session:
        queue = session.queue("q")
        told = queue.stats()
        assert told == dict(wanted)
        assert accounted(told)
        assert told["stored"] == queue.size == 5
        found = left(queue)
        if order == "shuffle":
            assert len(found) == 5
        else:
            assert found == ([1, 2, 3, 4, 5] if order == "fifo" else [4, 0, 1, 2, 5])


def test_a_shuffled_queue_draws_on_as_it_would_have(tmp_path: Path) -> None:
    def fill(session: paceline.Session) -> None:
        queue = session.queue("q", 30, order="shuffle", seed=1)
        queue.enqueue_many(items(*range(20)))
        queue.dequeue_many(5)
        session.save(tmp_path)
        drawn.extend(left(queue))

    drawn: list[int] = []
    with paceline.Session() as first:
        fill(first)
    with paceline.Session() as session:
        session.restore(tmp_path)
        assert left(session.queue("q")) == drawn


def test_a_closed_queue_is_closed_and_drains(tmp_path: Path) -> None:
    def fill(session: paceline.Session) -> None:
        queue = session.queue("q", 5)
        queue.enqueue_many(items(1, 2))
        queue.close()

    with moved(tmp_path, fill) as session:
        queue = session.queue("q", 5)
        with pytest.raises(paceline.Closed):
            queue.enqueue_many(items(3))
        assert left(queue) == [1, 2]
        with pytest.raises(paceline.Closed):
            queue.dequeue(timeout=0)


def test_counters_bounds_and_tags_come_back(tmp_path: Path) -> None:
    def fill(session: paceline.Session) -> None:
        session.counter("steps", 5).add(7)
        net = session.variable("net", np.zeros(3), memory=1 << 12)
        net.tag("first")
        net.assign(np.ones(3))
        net.assign(np.full(3, 2.0))
        net.tag("second")
        net.tag("same")
        net.assign(np.full(3, 3.0))

    with moved(tmp_path, fill) as session:
        assert session.counter("steps", 5).value == 12
        net = session.variable("net")
        assert net.memory()["bound"] == 1 << 12
        assert net.read().tree.tolist() == [3, 3, 3]
        assert {tag: net.read(tag=tag).tree[0] for tag in net.tags()} == {
            "first": 0,
            "second": 2,
            "same": 2,
        }
        assert count_of(net.version) == 4
        assert [count_of(version) for version in net.tags().values()] == [1, 3, 3]
        net.untag("first")
        net.assign(np.zeros(3))
        assert len(net.memory()["versions"]) == 2


def test_an_accumulator_comes_back_with_its_gradients(tmp_path: Path) -> None:
    def fill(session: paceline.Session) -> None:
        net = session.variable("net", np.zeros(2))
        mean = session.accumulator("mean", variable=net, max_lag=1)
        free = session.accumulator("free", like=0.0)
        assert mean.apply(np.full(2, 1.0), net.version)
        mean.take(1)
        net.assign(np.zeros(2))
        for number in (3.0, 5.0):
            assert mean.apply(np.full(2, number), net.version)
            free.apply(number)

    with moved(tmp_path, fill) as session:
        net = session.variable("net")
        mean = session.accumulator("mean", variable=net, max_lag=1)
        assert mean.stats() | {"left": []} == {
            "applied": 3, "taken": 1, "dropped": {}, "held": 2, "contributors": [], "left": [],
        }  # fmt: skip
        found = mean.take(2)
        assert (found.tree.tolist(), found.version) == ([4, 4], net.version)
        assert session.accumulator("free").take(2).tree == 4
        # It hears of the variable's versions, and drops what they make too old.
        assert mean.apply(np.zeros(2), net.version - 1) is False
        net.assign(np.zeros(2))
        assert mean.apply(np.zeros(2), net.version)
        net.assign(np.zeros(2))
        net.assign(np.zeros(2))
        assert mean.stats()["dropped"] == {"late": 1, "stale": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_comes_back_and_what_was_leased_is_handed_out_again(
    tmp_path: Path, stream: bool
) -> None:
    def fill(session: paceline.Session) -> None:
        epochs = 1 if stream else 2
        reader = session.reader(
            "files", list("abcdef"), epochs=epochs, shuffle=not stream, seed=1, stream=stream
        )
        if stream:
            reader.add(["g"])
        for _ in range(2):
            assert reader.next().done()
        call = session.connection.call
        heads = [call(m.NextPiece("files", 0, 0.0)) for _ in range(2)]
        session.save(tmp_path)
        rest.extend(head.values[0] for head in heads)
        for head in heads:
            call(m.EndPiece("files", head.delivery, False))
        rest.extend(piece.value for piece in _drained(reader, stream))

    rest: list[str] = []
    with paceline.Session() as first:
        fill(first)
    with paceline.Session() as session:
        session.restore(tmp_path)
        reader = session.reader("files")
        again = [piece.value for piece in _drained(reader, stream)]
        assert again == rest
        counted = reader.stats()["epochs"]
        assert counted[0]["done"] == counted[0]["pieces"] == 6 + stream
        assert counted[0]["redelivered"] == 2


def _drained(reader: paceline.Reader, stream: bool) -> Iterator[Any]:
    if stream:
        reader.close()
    yield from reader


def test_a_barrier_comes_back_as_it_was_made(tmp_path: Path) -> None:
    with moved(tmp_path, lambda session: session.barrier("gate", 1).wait()) as session:
        assert session.barrier("gate").n == 1
        assert session.resources()["barriers"]["gate"]["rounds"] == 0


def test_stamps_are_as_far_from_their_variable_as_they_were(tmp_path: Path) -> None:
    def fill(session: paceline.Session) -> None:
        net = session.variable("net", np.zeros(3))
        queue = session.queue("q", 5)
        queue.enqueue(1, version=net.version)
        net.assign(np.ones(3))
        queue.enqueue(2, version=net.version)
        queue.enqueue(3, version=7)

    with moved(tmp_path, fill) as session:
        net = session.variable("net")
        found = session.connection.call(m.Dequeue("q", 3, 3, 0.0))
        assert [net.version - run.version for run in found.runs[:2]] == [1, 0]
        assert found.runs[2].version == 7


def test_versions_are_never_used_again_whoever_restores(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with moved(tmp_path, lambda session: session.variable("net", 0)) as session:
            epochs.append(epoch_of(session.variable("net").version))
            # What is made later is of a later epoch still.
            session.reset()
            assert epoch_of(session.variable("net", 0).version) > epochs[-1]
    assert epochs == sorted({*epochs})


def test_only_what_is_missing_or_as_it_was_made_comes_back(tmp_path: Path) -> None:
    with paceline.Session() as first:
        for name in ("empty", "used", "other"):
            first.queue(name, 5).enqueue(1)
            first.counter(name, 1).add(1)
        first.save(tmp_path)
    with paceline.Session() as session:
        session.queue("empty", 5)
        session.queue("used", 5).enqueue(2)
        session.queue("other", 6)
        session.counter("used", 1).add(5)
        session.counter("other", 2)
        session.restore(tmp_path)
        sizes = {name: session.queue(name).size for name in ("empty", "used", "other")}
        assert sizes == {"empty": 1, "used": 1, "other": 0}
        assert session.queue("used").dequeue() == 2
        values = {n: session.counter(n, None).value for n in ("empty", "used", "other")}
        assert values == {"empty": 2, "used": 6, "other": 2}


def test_who_waits_for_what_comes_back_has_it(tmp_path: Path, server: Serving) -> None:
    with paceline.Session() as first:
        first.queue("q", 5).enqueue(1)
        first.variable("net", 2)
        first.counter("n").add(3)
        first.save(tmp_path)
    one, other = server.session(), server.session()
    queue, counter = one.queue("q", 5), one.counter("n")
    calls = [Call(queue.dequeue), Call(one.variable, "net"), Call(counter.wait_for, 3)]
    until(lambda: all(waits(other, kind) for kind in ("items", "variable", "count")))
    other.restore(tmp_path)
    taken, net, reached = [call.outcome() for call in calls]
    assert (taken, net.read().tree, reached) == (1, 2, 3)


# One moment


def test_rows_that_are_added_later_are_not_in_it(tmp_path: Path) -> None:
    with paceline.Session() as session:
        table = session.variable("table", np.zeros((4, 2)))
        # From the second one on, rows are added where they are.
        for _ in range(3):
            table.scatter_add([1], np.ones((1, 2)))
        with cut(session.lines.all) as taken:
            table.scatter_add([1], np.ones((1, 2)))
            (entry,) = taken.entries
            found = taken.fetch(entry)
        (memory,) = found.memories
        assert memory is not None
        assert memory.array().view(np.float64).reshape(4, 2)[1].tolist() == [3, 3]
        assert table.read().tree[1].tolist() == [4, 4]


class Late:
    """A line on which a request to take note is on its way for as long as something else takes."""

    def __init__(self, line: Connection, meanwhile: Callable[[], object]) -> None:
        self._line = line
        self._meanwhile = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def post(self, request: Any, *more: Any) -> Any:
        if isinstance(request, m.Note):
            self._meanwhile()
        return self._line.post(request, *more)


def test_what_is_done_while_one_has_taken_note_and_another_not_is_in_no_cut(
    tmp_path: Path,
) -> None:
    with hosted(tmp_path, 2) as session:
        first = session.counter("first")
        with session.device("ps:1"):
            second = session.counter("second")
        calls = []

        def move() -> None:
            first.add()
            second.add()

        def meanwhile() -> None:
            calls.append(Call(move))
            calls[0].join(0.3)

        one, other = session.lines.all
        late: Any = Late(other, meanwhile)
        with cut([one, late]) as taken:
            told = noting.counters(taken, taken.entries)
        assert (told["first"].value, told["second"].value) == (0, 0)
        calls[0].outcome()
        assert (first.value, second.value) == (1, 1)


def fill_containers(session: paceline.Session) -> None:
    for container, number in (("", 1), ("x", 2)):
        with session.container(container):
            session.queue("q", 5).enqueue(number)
            session.counter("n").add(number)
            session.reader("r", [number])
            net = session.variable("v", float(number))
            session.accumulator("mean", variable=net).apply(1.0, net.version)


def check_containers(session: paceline.Session) -> None:
    for container, number in (("", 1), ("x", 2)):
        with session.container(container):
            assert session.queue("q").dequeue(timeout=0) == number
            assert session.counter("n").value == number
            assert [piece.value for piece in session.reader("r")] == [number]
            assert session.variable("v").read().tree == number
            assert session.accumulator("mean").take(1).lags == (0,)


@pytest.mark.parametrize("servers", [1, 2])
def test_each_thing_comes_back_into_the_container_that_it_was_in(
    tmp_path: Path, servers: int
) -> None:
    with hosted(tmp_path, servers) as session:
        with session.device(f"ps:{servers - 1}"):
            fill_containers(session)
        session.save(tmp_path / "saved")
    with hosted(tmp_path, 3 - servers) as session:
        found = session.restore(tmp_path / "saved")
        assert found is not None
        assert list(found.manifest.containers) == ["", "x"]
        check_containers(session)


def test_some_containers_alone_are_saved_and_come_back(tmp_path: Path) -> None:
    with paceline.Session() as session:
        fill_containers(session)
        session.save(tmp_path / "one", containers="x")
        session.save(tmp_path / "all")
        session.reset()
        for folder in ("one", "all"):
            found = session.restore(tmp_path / folder, containers=["x"])
            assert found is not None
            assert {each["container"] for each in session.resources()["shared"]} == {"x"}
            session.reset("x")
        # Of these, nothing was saved or restored since it was reset.
        session.restore(tmp_path / "all", containers="")
        session.restore(tmp_path / "one")
        check_containers(session)
        for change in (session.save, session.restore):
            with pytest.raises(paceline.SchemaError, match=r"^containers: names of some, or None"):
                change(tmp_path, containers=5)  # type: ignore[arg-type]


def test_a_container_of_which_a_checkpoint_was_taken_gets_no_items_back(tmp_path: Path) -> None:
    """Its queue was made anew: what was in it may have been taken since."""
    with paceline.Session() as session:
        fill_containers(session)
        session.save(tmp_path)
        session.reset("x")
        with session.container("x"):
            session.queue("q", 5)
        session.save(tmp_path / "other", containers="x")
        session.restore(tmp_path)
        with session.container("x"):
            assert session.queue("q").size == 0
            assert session.variable("v").read().tree == 2
        session.reset("x")
        session.restore(tmp_path)
        with session.container("x"):
            assert session.queue("q").size == 1


def test_a_reset_that_has_not_reached_every_server_is_in_the_cut(tmp_path: Path) -> None:
    with hosted(tmp_path, 2) as session:
        with session.device("ps:1"):
            fill_containers(session)
        # As when whoever resets dies before it has told the other one.
        session.connection.call(m.Reset(["x"], None))
        session.save(tmp_path / "saved")
    found = checkpoints.latest(tmp_path / "saved")
    assert found is not None
    assert list(found.manifest.containers) == [""]


@pytest.mark.parametrize("same", [True, False])
def test_a_cut_is_one_moment_of_all_servers(tmp_path: Path, same: bool) -> None:
    spec = hands.cluster(tmp_path, "unix", ps=2, worker=2)
    with hands.served(spec, secret=SECRET):
        mover = paceline.Session(spec, job="worker", index=0, secret=SECRET)
        saver = paceline.Session(spec, job="worker", index=1, secret=SECRET)
        with mover, saver:
            with mover.device("ps:1"):
                second = mover.counter("second")
            first = mover.counter("first")
            over = threading.Event()

            def moves() -> int:
                while not over.is_set():
                    first.add()
                    second.add()
                return first.value

            call = Call(moves)
            try:
                for step in range(8):
                    (mover if same else saver).save(tmp_path / "saved", step=step, keep=1)
                    found = checkpoints.latest(tmp_path / "saved")
                    assert found is not None
                    told = found.manifest.of().counters
                    assert told["first"].value - told["second"].value in (0, 1)
                    assert 0 < found.manifest.pause < 60
            finally:
                over.set()
            assert call.outcome() > 0


def test_requests_are_kept_while_it_is_frozen_and_carried_out_in_order() -> None:
    server = LocalServer()
    one, other, third = (paceline.Session(channel=server.connect()) for _ in range(3))
    one.counter("n")
    one.connection.call(m.Freeze())
    asked = [each.connection.post(m.AddToCounter("n", 1)) for each in (other, third, one, other)]
    assert not any(each.done() for each in asked)
    third.connection.fail(paceline.Disconnected("killed"))
    assert one.connection.call(m.Thaw(True)).content is True
    found = [each.result()[0].content for each in (asked[0], asked[2], asked[3])]
    assert found == [1, 3, 4]
    assert one.connection.call(m.Thaw(True)).content is False
    server.close()


def test_the_end_of_who_froze_it_thaws_a_server() -> None:
    server = LocalServer()
    one, other = (paceline.Session(channel=server.connect()) for _ in range(2))
    number = other.counter("n")
    one.connection.call(m.Freeze())
    asked = other.connection.post(m.AddToCounter("n", 1))
    one.connection.fail(paceline.Disconnected("killed"))
    asked.result()
    assert number.value == 1
    server.close()


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_a_server_goes_on_when_who_froze_it_ends_and_ends_who_broke_the_protocol(
    tmp_path: Path, carrier: str
) -> None:
    with hosted(tmp_path, 1, carrier, worker=3) as one:
        address = one.connection.address
        other, bad = (paceline.Session(address, secret=SECRET) for _ in range(2))
        number = other.counter("n")
        other.queue("q", 5)
        one.connection.call(m.Freeze())
        asked = other.connection.post(m.AddToCounter("n", 1))
        odd = m.RunHead(flatten(1.0).layout, 1, [["no float"]])
        broken = bad.connection.post(m.Enqueue("q", [odd], 0.0))
        # A goodbye is kept with the rest; the end of its connection is seen at once.
        one.connection.fail(paceline.Disconnected("killed"))
        assert asked.result()[0].content == number.value == 1
        with pytest.raises(paceline.ProtocolError):
            broken.result()
        assert number.add() == 2
        other.close()
        bad.close()


def test_a_server_that_nobody_thaws_thaws_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_desk, "LIMIT", 0.05)
    server = LocalServer()
    one, other = (paceline.Session(channel=server.connect()) for _ in range(2))
    number = other.counter("n")
    one.connection.call(m.Freeze())
    assert number.add() == 1
    assert one.connection.call(m.Thaw(True)).content is False
    server.close()


def test_what_is_kept_is_bounded_and_then_there_is_no_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing, "KEPT_FRAMES", 2)
    server = LocalServer()
    one, other = (paceline.Session(channel=server.connect()) for _ in range(2))
    other.counter("n")
    one.connection.call(m.Freeze())
    asked = [other.connection.post(m.AddToCounter("n", 1)) for _ in range(3)]
    assert [each.result()[0].content for each in asked] == [1, 2, 3]
    assert one.connection.call(m.Thaw(True)).content is False
    server.close()


def test_where_no_server_stays_frozen_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_desk, "LIMIT", 0.0)
    with hosted(tmp_path, 1) as session:
        with pytest.raises(TimedOut, match=r"^take note of all at one moment: 5 times"):
            session.save(tmp_path / "saved")
    assert not checkpoints.found(tmp_path / "saved")


def test_two_that_save_at_once_wait_for_each_other(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, "unix", ps=2, worker=2)
    with hands.served(spec, secret=SECRET):
        sessions = [paceline.Session(spec, job="worker", index=n, secret=SECRET) for n in range(2)]
        sessions[0].counter("n").add(1)

        def saves(session: paceline.Session) -> int:
            for step in range(5):
                session.save(tmp_path / session.task, step=step)
            return 5

        for call in [Call(saves, session) for session in sessions]:
            assert call.outcome() == 5
        for session in sessions:
            session.close()


# Several servers


@contextmanager
def hosted(
    folder: Path, ps: int, carrier: str = "unix", worker: int = 1
) -> Iterator[paceline.Session]:
    spec = hands.cluster(folder, carrier, ps=ps, worker=worker)
    with hands.served(spec, secret=SECRET):
        with paceline.Session(spec, job="worker", index=0, secret=SECRET) as session:
            yield session


def test_all_of_it_goes_to_another_number_of_servers(tmp_path: Path) -> None:
    for ps in (2, 3, 1, 2):
        with hosted(tmp_path, ps) as session:
            if session.restore(tmp_path / "saved") is None:
                for n, task in enumerate(session.servers()):
                    with session.device(task):
                        session.variable(f"v{n}", np.full(2, 0.0 + n)).tag("old")
                        session.variable(f"v{n}").assign(np.full(2, n + 10.0))
                        session.queue(f"q{n}", 5).enqueue(n)
                    # It is where its variable is.
                    session.accumulator(f"a{n}", variable=f"v{n}").apply(
                        np.ones(2), session.variable(f"v{n}").version
                    )
                net = session.spread("net", {"a": np.zeros(3), "b": np.zeros(2)})
                net.tag("first")
                net.assign({"a": np.ones(3), "b": np.ones(2)})
            for n in range(2):
                variable = session.variable(f"v{n}")
                assert variable.read().tree.tolist() == [n + 10] * 2
                assert variable.read(tag="old").tree.tolist() == [n] * 2
                assert session.queue(f"q{n}").size == 1
                mean = session.accumulator(f"a{n}", variable=variable)
                assert (mean.stats()["held"], mean.stats()["dropped"]) == (1, {})
            net = session.variable("net")
            assert net.read().tree["b"].tolist() == [1, 1]
            assert net.read(tag="first").tree["a"].tolist() == [0, 0, 0]
            session.save(tmp_path / "saved")


def test_one_server_that_was_started_again_has_its_variables_and_no_items(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, "unix", ps=2, worker=2)
    servers = [paceline.Server(spec, job_name="ps", task_index=n, secret=SECRET) for n in range(2)]

    def fresh(index: int) -> None:
        servers[index].close()
        servers[index] = paceline.Server(spec, job_name="ps", task_index=index, secret=SECRET)

    try:
        for who in (0, 1):
            # The one that was there, and one that comes later.
            with paceline.Session(spec, job="worker", index=who, secret=SECRET) as session:
                if not who:
                    with session.device("ps:1"):
                        session.variable("net", np.ones(2))
                        session.counter("n").add(4)
                        session.queue("q", 5).enqueue(1)
                    session.save(tmp_path / "saved")
                fresh(1)
                session.lines.again()
                assert session.restore(tmp_path / "saved") is not None
                assert session.variable("net", timeout=0).read().tree.tolist() == [1, 1]
                assert session.counter("n", None, timeout=0).value == 4
                assert session.queue("q", 5).size == 0
        fresh(0)
        fresh(1)
        with paceline.Session(spec, job="worker", index=0, secret=SECRET) as session:
            assert session.restore(tmp_path / "saved") is not None
            assert session.queue("q", timeout=0).size == 1
    finally:
        for server in servers:
            server.close()


# Damage


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
@pytest.mark.parametrize(
    "pattern",
    [
        "queue-*",
        "reader-*",
        "accumulator-*",
        "variable-0001*",
    ],
)
def test_what_is_damaged_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], pattern: str
) -> None:
    with paceline.Session() as session:
        queue, net = session.queue("q", 5), session.variable("net", 0)
        session.reader("r", [1])
        session.accumulator("a", like=0.0)
        net.tag("first")
        for mark in (1, 2):
            queue.enqueue(mark)
            net.assign(mark)
            path = session.save(tmp_path, step=mark)
    (file,) = path.glob(pattern)
    damage(file)
    with paceline.Session() as session:
        found = session.restore(tmp_path)
        assert found is not None
        assert found.manifest.step == session.queue("q").size == 1
        assert (session.variable("net").read(tag="first").tree, net.key) == (0, "net")
    assert f"{path} is not used" in caplog.text
    assert file.name in caplog.text


def test_a_manifest_of_things_that_are_not_there_is_refused(tmp_path: Path) -> None:
    with paceline.Session() as session:
        session.queue("q", 5)
        path = session.save(tmp_path)
    told = json.loads((path / "manifest.json").read_text())
    told["files"].clear()
    (path / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(paceline.CheckpointError, match=r"queue 'q' is in 'queue-0000"):
        checkpoints.latest(tmp_path)


def test_the_formats_before_are_read_still(tmp_path: Path) -> None:
    with paceline.Session() as session:
        session.variable("net", np.ones(2))
        session.counter("n").add(2)
        session.queue("q", 5).enqueue(1)
        path = session.save(tmp_path)
    (path / "manifest.json.sha256").unlink()
    told = json.loads((path / "manifest.json").read_text())
    told |= told.pop("containers")[""]
    told["format"] = 3
    (path / "manifest.json").write_text(json.dumps(told))
    with paceline.Session() as session:
        # They do not say which container that was.
        with session.container("x"):
            assert session.restore(tmp_path) is not None
            assert session.variable("net", timeout=0).read().tree.tolist() == [1, 1]
            assert session.queue("q").dequeue(timeout=0) == 1
        session.reset()
        for name in ("things", "pause"):
            del told[name]
        for name in ("tags", "kept"):
            del told["variables"]["net"][name]
        told["format"] = 2
        (path / "manifest.json").write_text(json.dumps(told))
        assert session.restore(tmp_path) is not None
        assert session.counter("n").value == 2
        session.reset()
        del told["counters"]
        told["format"] = 1
        (path / "manifest.json").write_text(json.dumps(told))
        assert session.restore(tmp_path) is not None
        assert session.variable("net", timeout=0).read().tree.tolist() == [1, 1]
        assert session.resources()["counters"] == {}
