"""Readers: a shared list of work, each piece done once per epoch, whoever dies with one."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until
from clusters import every_engine, quiet
from wires import wired

from paceline import Closed, ProtocolError, Reader, SchemaError, Session, TimedOut, WouldBlock
from paceline.core import messages as m
from paceline.core.tree import flatten
from paceline.server.local import LocalServer
from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier


def waiting(session: Session) -> int:
    """How many calls wait for a piece."""
    members = session.connection.call(m.Stats()).content["members"].values()
    return sum(key[0] == "pieces" for member in members for key, _ in member["waits"])


def conserved(reader: Reader) -> bool:
    return all(
        each["pieces"] == each["done"] + each["held"] + each["waiting"]
        for each in reader.stats()["epochs"].values()
    )


def test_each_piece_goes_to_one_of_those_who_ask_once_per_epoch(server: Serving) -> None:
    reader = server.session().reader("files", range(40), epochs=3, shuffle=True, seed=1)

    def work() -> list[tuple[int, int]]:
        mine = server.session().reader("files")
        return [(piece.epoch, piece.value) for piece in mine]

    calls = [Call(work) for _ in range(3)]
    done = [pair for call in calls for pair in call.outcome()]
    assert sorted(done) == [(epoch, value) for epoch in range(3) for value in range(40)]
    for found in reader.stats()["epochs"].values():
        assert found == {
            "pieces": 40, "delivered": 40, "redelivered": 0, "done": 40, "held": 0, "waiting": 0,
        }  # fmt: skip
    with pytest.raises(Closed, match=r"^next piece of reader 'files': all are done$"):
        reader.next()


@pytest.mark.parametrize(
    "piece", [3, -1.5, "é.txt", b"\0", True, None, {"file": "a", "at": (1, [2])}, (), {}]
)
def test_a_piece_is_any_small_tree_of_plain_values(server: Serving, piece: Any) -> None:
    reader = server.session().reader("work", [piece, piece, 1])
    found = [each.value for each in server.session().reader("work")]
    assert found == [piece, piece, 1]
    assert type(found[0]) is type(piece)
    assert list(reader) == []


def test_numbers_of_numpy_are_numbers_and_arrays_are_refused() -> None:
    with Session() as session:
        assert [each.value for each in session.reader("n", np.arange(3))] == [0, 1, 2]
        with pytest.raises(SchemaError, match=r"^reader 'a': a piece is plain values, in dicts"):
            session.reader("a", [np.zeros(3)])
        with pytest.raises(SchemaError, match=r"^reader 'a': leaf \$\.x is a set; allowed are"):
            session.reader("a", [{"x": {1}}])
        for wrong in ("abc", b"abc", {"a": 1}, 7):
            with pytest.raises(SchemaError, match=r"^reader 'a': pieces is a list or another iter"):
                session.reader("a", wrong)  # type: ignore[arg-type]


def test_a_list_of_nothing_ends_at_once(server: Serving) -> None:
    assert list(server.session().reader("none", [], epochs=5)) == []


def test_a_reader_is_waited_for_and_has_one_definition(server: Serving) -> None:
    one, other = server.session(), server.session()
    early = Call(lambda: [piece.value for piece in other.reader("r", timeout=DEADLINE_SECONDS)])
    one.reader("r", ["a", "b"], seed=3)
    assert early.outcome() == ["a", "b"]
    one.reader("r", ["a", "b"], seed=3)
    with pytest.raises(
        SchemaError,
        match=r"^reader 'r' exists with pieces='2, digest \w{8}', epochs=1, shuffle=False, seed=3,"
        r" lease=None, stream=False; asked for: pieces='2, digest \w{8}', .* seed=4, lease=None",
    ):
        other.reader("r", ["a", "b"], seed=4)
    with pytest.raises(SchemaError, match=r"^reader 'r' exists with pieces='2, .*='2, digest"):
        other.reader("r", ["a", "c"], seed=3)
    with pytest.raises(TimedOut, match=r"^no reader 's'; there are \['r'\]; whoever calls reader"):
        other.reader("s", timeout=0)
    with pytest.raises(SchemaError, match=r"^reader 's': how to hand out pieces comes with the p"):
        other.reader("s", epochs=2)
    assert one.resources()["readers"]["r"]["pieces"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": 0}, "epochs is a whole number, 1 or more, or None, not 0"),
        ({"lease": -1}, r"lease is seconds > 0, or None, not -1"),
        ({"lease": True}, r"lease is seconds > 0, or None, not True"),
        ({"seed": 1.5}, r"seed is a whole number of 64 bits, not 1\.5"),
    ],
)
def test_wrong_options_are_refused(options: Any, says: str) -> None:
    with Session() as session, pytest.raises(SchemaError, match=rf"^reader 'r': {says}$"):
        session.reader("r", [1], **options)


def test_asking_for_the_next_piece_ends_the_one_before(server: Serving) -> None:
    reader = server.session().reader("r", [10, 20, 30])
    first = reader.next()
    assert (first.value, first.epoch, first.number, first.attempt) == (10, 0, 0, 1)
    assert reader.stats()["epochs"][0]["done"] == 0
    second = reader.next(timeout=0)
    assert reader.stats()["epochs"][0]["done"] == 1
    assert not first.done()
    assert second.done()
    assert not second.give_back()
    assert reader.next().value == 30
    assert reader.stats()["epochs"][0]["done"] == 2
    with pytest.raises(Closed):
        reader.next()
    assert reader.stats()["epochs"][0]["done"] == 3


def test_what_is_given_back_is_handed_out_next(server: Serving) -> None:
    one, other = (server.session().reader("r", range(4)) for _ in range(2))
    pieces = [other.next()]
    pieces += [one.next()]
    assert pieces[1].give_back()
    again = other.next()
    assert (again.value, again.attempt) == (1, 2)
    assert one.next().value == 2
    assert conserved(one)


def test_a_loop_that_is_left_gives_its_piece_back(server: Serving) -> None:
    reader = server.session().reader("r", range(3))
    for piece in reader:
        if piece.value == 1:
            break

    def fails() -> None:
        for piece in reader:
            raise ZeroDivisionError(piece.attempt)

    with pytest.raises(ZeroDivisionError, match=r"^2$"):
        fails()
    found = reader.stats()["epochs"][0]
    assert (found["done"], found["held"], found["waiting"]) == (1, 0, 2)
    assert [(piece.value, piece.attempt) for piece in reader] == [(1, 3), (2, 1)]


def test_a_loop_that_ends_within_a_send_waits_with_what_it_has_to_say() -> None:
    with serving("unix", where="thread") as server:
        reader = server.session().reader("r", range(3))
        ring: list[Any] = [iter(reader)]
        assert next(ring[0]).value == 0
        ring.append(ring)
        # As if a collection of rings of objects came while this thread was sending.
        sends: dict[str, Any] = {"__name__": "paceline.transports.made_up", "gc": gc}
        del ring
        exec("gc.collect()", sends)
        assert reader.stats()["epochs"][0]["held"] == 1
        assert [piece.value for piece in reader] == [0, 1, 2]


def test_the_last_piece_is_waited_for_and_its_end_ends_every_loop(server: Serving) -> None:
    reader = server.session(job="a").reader("r", range(3))
    pieces = [server.session(job="b").reader("r").next() for _ in range(3)]
    loops = [Call(lambda: [(p.value, p.attempt) for p in reader]) for _ in range(2)]
    until(lambda: waiting(server.session(job="c")) == 2)
    with pytest.raises(
        TimedOut,
        match=r"^next piece of reader 'r': all are done or held \(1 by b:0, 1 by b:1, 1 by b:2\);"
        r" they end the wait; members: a:0, b:0",
    ):
        reader.next(timeout=0.05)
    pieces[0].done()
    pieces[1].give_back()
    pieces[2].done()
    assert sorted(loop.outcome() for loop in loops) == [[], [(1, 2)]]


def test_the_next_epoch_begins_while_pieces_of_this_one_are_held(server: Serving) -> None:
    reader = server.session().reader("r", range(2), epochs=2)
    slow = server.session().reader("r").next()
    assert [(each.epoch, each.value) for each in (reader.next(), reader.next())] == [(0, 1), (1, 0)]
    assert slow.give_back()
    # The loop asks for more than this thread has by `next`, which is done with that.
    assert [(piece.epoch, piece.value) for piece in reader] == [(0, 0), (1, 1)]
    assert reader.stats()["epochs"][0]["redelivered"] == 1
    assert conserved(reader)


def test_an_endless_reader_ends_after_the_epoch_in_which_it_is_closed(server: Serving) -> None:
    reader = server.session().reader("r", range(3), epochs=None)
    seen = []
    for piece in reader:
        seen.append((piece.epoch, piece.value))
        if piece.epoch == 2:
            reader.close()
            reader.close()
    assert seen == [(epoch, value) for epoch in range(3) for value in range(3)]


def test_pieces_of_a_stream_are_handed_out_as_they_come_until_it_is_closed(server: Serving) -> None:
    reader = server.session().reader("s", [], stream=True)
    loops = [
        Call(lambda: [piece.value for piece in server.session().reader("s")]) for _ in range(2)
    ]
    with pytest.raises(
        TimedOut,
        match=r"^next piece of reader 's': all are done or held \(by nobody\); whoever adds pieces"
        r" or closes it ends the wait; members: ",
    ):
        reader.next(timeout=0)
    for first in range(0, 30, 3):
        reader.add(range(first, first + 3))
    reader.close()
    seen = [value for loop in loops for value in loop.outcome()]
    assert sorted(seen) == list(range(30))
    with pytest.raises(Closed, match=r"^add to reader 's': it is closed$"):
        reader.add([1])
    with pytest.raises(SchemaError, match=r"^reader 'l': it is a list of 1 pieces; to add pieces"):
        server.session().reader("l", [1]).add([2])


def test_a_piece_that_takes_longer_than_its_lease_goes_to_another(server: Serving) -> None:
    reader = server.session().reader("r", range(2), lease=1.0)
    slow = server.session().reader("r").next()
    assert slow.value == 0
    assert reader.next().done()
    again = reader.next(timeout=DEADLINE_SECONDS)
    assert (again.value, again.attempt) == (0, 2)
    assert not slow.done()


def test_who_waited_before_a_piece_was_leased_gets_it_when_the_lease_is_over(
    server: Serving,
) -> None:
    reader = server.session().reader("s", [], stream=True, lease=1.0)
    watching = server.session()
    calls = [Call(server.session().reader("s").next, None) for _ in range(2)]
    until(lambda: waiting(watching) == 2)
    reader.add(["a"])
    pieces = [call.outcome() for call in calls]
    assert sorted((piece.value, piece.attempt) for piece in pieces) == [("a", 1), ("a", 2)]
    assert [piece.done() for piece in pieces] == [piece.attempt == 2 for piece in pieces]


def test_two_threads_of_a_session_have_a_piece_each(server: Serving) -> None:
    reader = server.session().reader("r", range(2))
    assert reader.next().value == 0
    assert Call(lambda: reader.next().value).outcome() == 1
    assert reader.stats()["held"] == 2


def test_what_nothing_can_end_is_refused_in_one_thread_and_changes_nothing() -> None:
    server = LocalServer(waits=False)
    one, other = (Session(channel=server.connect()) for _ in range(2))
    piece = one.reader("r", [1]).next()
    with pytest.raises(WouldBlock, match=r"^next piece of reader 'r': all are done or held \(1 by"):
        other.reader("r").next(timeout=None)
    stream = one.reader("s", [], stream=True)
    with pytest.raises(WouldBlock, match=r"^next piece of reader 's'"):
        list(stream)
    assert piece.done()
    server.close()


def test_nothing_is_lost_or_done_twice_over_connections_that_break() -> None:
    with wired(iter([*range(900, 3000, 70), None])) as (_, wire), wire.session() as session:
        reader = session.reader("r", range(200))
        assert [piece.value for piece in reader] == list(range(200))
        assert reader.stats()["epochs"][0]["delivered"] == 200
        assert wire.carried > 3


def test_a_peer_that_sends_pieces_with_arrays_or_with_odd_columns_is_cut_off() -> None:
    for layout, columns in ((flatten(1).layout, [["x"]]), (flatten(1).layout, [])):
        with serving("unix", where="thread") as server:
            session = server.session()
            head = m.RunHead(layout, 1, columns)
            with pytest.raises(ProtocolError):
                session.connection.call(m.DefineReader("r", [head]))
    with serving("unix", where="thread") as server:
        many = m.RunHead(flatten(None).layout, 1 << 40, [])
        empty = m.RunHead(flatten(()).layout, 1 << 40, [])
        for head in (many, empty):
            with pytest.raises(SchemaError, match=r"^1099511627776 pieces in one step, 1048576"):
                server.session().connection.call(m.DefineReader("r", [head]))


HOLD = """
import sys
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="worker")
reader = session.reader("r")
reader.next()
print(reader.next().value, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_what_a_killed_process_held_is_handed_out_again_first(carrier: Carrier) -> None:
    with serving(carrier, where="thread") as server:
        reader = server.session().reader("r", range(5))
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, server.target, server.secret.hex()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            assert child.stdout.readline() == "1\n"
            child.kill()
        until(lambda: reader.stats()["held"] == 0)
        assert [(p.value, p.attempt) for p in reader] == [(1, 2), (2, 1), (3, 1), (4, 1)]
        assert conserved(reader)


def test_a_session_that_leaves_gives_back_what_it_held(server: Serving) -> None:
    reader = server.session().reader("r", range(2))
    with server.session() as leaving:
        assert leaving.reader("r").next().value == 0
    assert [(piece.value, piece.attempt) for piece in reader] == [(0, 2), (1, 1)]


# In workers


def squares(reader: Reader) -> Iterator[dict[str, int]]:
    for piece in reader:
        yield {"number": piece.value, "square": piece.value**2}


@every_engine
@pytest.mark.parametrize("count", [0, 1, 23])
def test_workers_share_a_list_and_all_end(engine: str, count: int) -> None:
    with quiet(3, engine) as cluster:
        reader = cluster.reader("numbers", range(count))
        seen: list[int] = []
        for batch in cluster.collect(squares, reader, batch_size=1, version_of=None):
            seen += batch.data["number"].tolist()
        assert sorted(seen) == list(range(count))
        assert reader.stats()["epochs"][0]["done"] == count
        # Nothing is left of it for what comes next.
        again = cluster.reader("more", range(5))
        found = cluster.collect(squares, again, batch_size=5, version_of=None).next()
        assert sorted(found.data["number"].tolist()) == list(range(5))


def killed_once(reader: Reader, folder: str) -> Iterator[int]:
    for piece in reader:
        if piece.value % 10 == 3 and piece.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece.value


def test_every_piece_of_killed_workers_is_collected(tmp_path: Path) -> None:
    with quiet(2, "processes", restarts=20) as cluster:
        reader = cluster.reader("numbers", range(30))
        seen: Counter[int] = Counter()
        for batch in cluster.collect(
            killed_once, reader, str(tmp_path), batch_size=1, version_of=None
        ):
            seen.update(batch.data.tolist())
        # What was handed in just before a death may be done once more.
        assert sorted(seen) == list(range(30))
        found = reader.stats()["epochs"][0]
        assert (found["done"], found["held"], found["waiting"]) == (30, 0, 0)
        assert found["redelivered"] >= 3


def looks(reader: Reader) -> Iterator[int]:
    while True:
        piece = reader.next(timeout=0)
        if piece.value == 47 and piece.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece.value


def test_what_was_made_of_a_piece_is_handed_in_before_it_is_done() -> None:
    with quiet(1, "processes") as cluster:
        reader = cluster.reader("numbers", range(64))
        batch = cluster.collect(looks, reader, batch_size=64, version_of=None).next(timeout=60)
        assert sorted(batch.data.tolist()) == list(range(64))


def test_workers_run_epochs_in_the_classical_loop() -> None:
    def train(reader: Reader, total: Any) -> int:
        for piece in reader:
            total.add(piece.value)
        return 1

    with quiet(2, "processes") as cluster:
        total = cluster.counter("total")
        reader = cluster.reader("numbers", range(10), epochs=4, shuffle=True)
        assert cluster.run(train, reader, total) == [1, 1]
        assert total.value == 4 * 45
