"""Sessions outlive their connections: nothing is lost, nothing is done twice."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until
from wires import SECRET, Wire, serve, wired

from paceline.core import messages as m
from paceline.core.codec import ERROR, REQUEST
from paceline.core.errors import Disconnected, ProtocolError, Refused, TimedOut
from paceline.server.lines import UNACKNOWLEDGED
from paceline.server.loop import Server
from paceline.session import Session
from paceline.testing import serving
from paceline.transports import tcp
from paceline.transports.base import Frame
from paceline.transports.tcp import TcpListener
from paceline.transports.tcp_channel import TcpChannel

MB = 1 << 20


def lengths(seed: int, least: int, most: int) -> Iterator[int]:
    """How many bytes each connection carries."""
    rng = random.Random(seed)
    while True:
        yield rng.randint(least, most)


def members(session: Session) -> list[str]:
    found: list[str] = session.resources()["members"]
    return found


# Nothing is lost or done twice


@pytest.mark.parametrize(
    ("seed", "count", "most"),
    [pytest.param(0, 2000, 30_000, marks=pytest.mark.slow), (1, 300, 3_000)],
)
def test_every_item_comes_once_and_in_order_whatever_the_wire_loses(
    seed: int, count: int, most: int
) -> None:
    with wired(lengths(seed, 1, most)) as (_, wire):
        producer, consumer = wire.session(), wire.session()
        queue, out = consumer.queue("q", 64), producer.queue("q", 64)

        def produce() -> None:
            for number in range(count):
                out.enqueue(number, timeout=DEADLINE_SECONDS)

        producing = Call(produce)
        taken = [queue.dequeue(timeout=DEADLINE_SECONDS) for _ in range(count)]
        producing.outcome()
        assert taken == list(range(count))
        stats = queue.stats()
        assert (stats["accepted"], stats["delivered"], stats["stored"]) == (count, count, 0)
        assert wire.carried > 10
        producer.close()
        consumer.close()


@pytest.mark.parametrize("seed", range(2))
def test_sums_are_exact_whatever_the_wire_loses(seed: int) -> None:
    rounds, writers = 150, 3
    with wired(lengths(seed, 1, 40_000)) as (_, wire), wire.session() as session:
        variable = session.variable("v", np.zeros(300))

        def add() -> None:
            with wire.session() as mine:
                same = mine.variable("v")
                for _ in range(rounds):
                    same.assign_add(np.ones(300))

        for call in [Call(add) for _ in range(writers)]:
            call.outcome()
        assert (variable.read().tree == rounds * writers).all()
        assert variable.version - variable.read().version == 0
        assert wire.carried > 10


def test_large_arrays_come_whole_whatever_the_wire_loses() -> None:
    with wired(lengths(7, 1, 3 * MB)) as (_, wire), wire.session() as session:
        large = np.arange(MB // 8)
        queue = session.queue("q", 4)
        variable = session.variable("v", large)
        for number in range(30):
            queue.enqueue(large + number)
            variable.assign(large + number)
            assert np.array_equal(queue.dequeue(), large + number)
            assert np.array_equal(variable.read().tree, large + number)
        assert wire.carried > 10


def test_threads_of_one_session_get_their_own_replies_whatever_the_wire_loses() -> None:
    with wired(lengths(3, 100, 20_000)) as (_, wire), wire.session() as session:
        queues = [session.queue(f"q{n}", 4) for n in range(4)]

        def work(n: int) -> None:
            for number in range(100):
                queues[n].enqueue((n, number))
                assert queues[n].dequeue() == (n, number)

        for call in [Call(work, n) for n in range(4)]:
            call.outcome()
        assert wire.carried > 10


@pytest.mark.parametrize("nbytes", range(1, 330, 13))
def test_a_session_opens_wherever_its_first_connection_breaks(nbytes: int) -> None:
    with wired(chain([nbytes], repeat(None))) as (_, wire):
        with wire.session(job="chief", index=0) as session:
            assert members(session) == ["chief:0"]
            assert session.variable("v", 1).read().tree == 1


# Who waits


def test_a_waiting_read_survives_a_cut() -> None:
    with wired() as (server, wire), wire.session() as session, wire.session() as other:
        variable = session.variable("v", 0)
        version = variable.version
        waiting = Call(lambda: variable.read(newer_than=version, timeout=None))
        until(lambda: server.service.parking.waiting(("variable", "v")))
        wire.cut()
        until(lambda: wire.carried >= 4)
        other.variable("v").assign(7)
        assert waiting.outcome().tree == 7


def test_a_wait_is_over_in_time_during_a_cut_and_changes_nothing() -> None:
    with wired() as (server, wire), wire.session() as session:
        queue = session.queue("q", 4)
        parking = server.service.parking
        waiting = Call(lambda: queue.dequeue(timeout=0.3))
        until(lambda: parking.waiting(("items", "q")))
        wire.refuses = True
        wire.cut()
        until(lambda: not parking.waiting(("items", "q")))
        assert waiting.is_alive()
        wire.refuses = False
        with pytest.raises(TimedOut, match=r"^dequeue of 1 items from 'q'"):
            waiting.outcome()
        queue.enqueue("x")
        assert queue.dequeue() == "x"


def test_what_is_said_while_there_is_no_connection_is_said_on_the_next() -> None:
    with wired() as (_, wire), wire.session() as session, wire.session() as other:
        queue = session.queue("q", 4)
        queue.enqueue("x")
        reply, _ = session.connection.exchange(m.Dequeue("q", 1, 1, 0.0))
        wire.refuses = True
        wire.cut()
        until(lambda: not session.connection._channel.connected)
        session.connection.tell(m.Receipt("q", reply.delivery))
        wire.refuses = False
        until(lambda: other.queue("q").stats()["delivered"] == 1)


def test_a_session_that_does_nothing_makes_another_connection_by_itself() -> None:
    with wired(linger=1.0) as (server, wire), wire.session() as session:
        for cuts in range(1, 4):
            wire.cut()
            until(lambda cuts=cuts: wire.carried == 1 + cuts)  # type: ignore[misc]
        until(lambda: session.connection._channel.connected and not server._lingering)
        assert members(session) == ["session:0"]


def test_a_connection_that_only_one_end_knows_to_be_broken_is_replaced() -> None:
    with wired() as (server, wire), wire.session() as session:
        variable = session.variable("v", 1)
        wire.drop_clients()
        until(lambda: wire.carried == 2)
        assert variable.assign(2) == variable.version
        assert len(server._peers) == 1
        assert not server._lingering


def test_it_counts_as_alive_while_it_makes_another_connection() -> None:
    with wired() as (_, wire), wire.session() as session:
        wire.refuses = True
        wire.cut()
        until(lambda: not session.connection._channel.connected)
        assert session.connection.alive()
        wire.refuses = False
        session.resources()
        assert session.connection.alive()


def test_an_interrupted_call_leaves_a_session_that_can_be_used() -> None:
    with wired() as (_, wire), wire.session() as session, wire.session() as other:
        variable = session.variable("v", np.zeros(64 * MB // 8))
        main = threading.main_thread().ident
        assert main is not None
        wire.deaf = True
        interrupt = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        listen = threading.Timer(0.6, setattr, (wire, "deaf", False))
        for timer in (interrupt, listen):
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            variable.assign(np.ones(64 * MB // 8))
        for timer in (interrupt, listen):
            timer.join()
        variable.assign(np.full(64 * MB // 8, 2.0))
        assert set(other.variable("v").read().tree[::MB]) == {2.0}


def test_a_snapshot_is_valid_whatever_happens_to_the_connection() -> None:
    with wired() as (_, wire), wire.session() as session:
        snapshot = session.variable("v", np.arange(MB)).read()
        wire.cut()
        until(lambda: wire.carried == 2)
        session.variable("v").assign(np.zeros(MB, np.int64))
        assert np.array_equal(snapshot.tree, np.arange(MB))


def test_a_server_keeps_no_reply_that_has_arrived() -> None:
    with wired() as (server, wire), wire.session() as session:
        variable = session.variable("v", np.arange(MB))
        held = variable.read()
        [peer] = server._peers.values()
        assert peer.window is not None
        until(lambda: len(peer.window or "") == 0)
        del held


# Who is lost


def test_what_a_lost_session_held_goes_back_and_it_is_told_why() -> None:
    with wired(linger=0.3) as (server, wire), wire.session() as session:
        queue = session.queue("q", 4)
        queue.enqueue("x")
        session.connection.exchange(m.Dequeue("q", 1, 1, 0.0))
        waiting = Call(lambda: session.variable("v", timeout=None))
        until(lambda: server.service.parking.waiting(("variable", "v")))
        wire.refuses = True
        wire.cut()
        until(lambda: not server.service.members.alive)
        wire.refuses = False
        said = r"the server has given up session 1, which had no connection for more than 0.3 s"
        for call in (waiting.outcome, session.resources, queue.dequeue):
            with pytest.raises(Disconnected, match=said):
                call()
        assert not session.connection.alive()
        with wire.session() as other:
            assert other.queue("q").dequeue() == "x"


def test_a_task_is_held_while_its_session_is_waited_for_and_free_after() -> None:
    with wired(linger=0.6) as (server, wire):
        first = wire.session(job="chief", index=0)
        first.variable("v", 5)
        wire.refuses = True
        wire.cut()
        until(lambda: server._lingering)
        wire.refuses = False
        # Nobody makes another connection for it.
        first.connection._channel.close()
        said = r"^task chief:0 is held by process \d+ and alive.*; its connection has broken, it "
        with pytest.raises(Refused, match=said):
            wire.session(job="chief", index=0)
        until(lambda: not server._lingering)
        with wire.session(job="chief", index=0) as again:
            assert again.variable("v").read().tree == 5
        first.close()


def test_a_session_that_leaves_is_not_waited_for() -> None:
    with wired(linger=60.0) as (server, wire):
        with wire.session(job="chief", index=0):
            pass
        with wire.session(job="chief", index=0) as again:
            assert members(again) == ["chief:0"]
        assert server.service.members.left == 2


def test_a_session_that_nobody_uses_any_more_ends() -> None:
    with wired(linger=0.1) as (server, wire):

        def forget(sessions: list[Session]) -> None:
            sessions.clear()
            gc.collect()
            until(lambda: not server.service.members.alive)
            # The warnings come on whichever thread lets go last.
            until(lambda: all(each.name != "paceline-line" for each in threading.enumerate()))

        with pytest.warns(ResourceWarning):
            forget([wire.session()])


def test_a_server_that_ends_says_so() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener):
        session = Session(f"tcp:{listener.place}", secret=SECRET)
        queue = session.queue("q", 1)
        waiting = Call(lambda: queue.dequeue(timeout=None))
        session.resources()
    began = time.monotonic()
    with pytest.raises(Disconnected, match=rf"^tcp:{listener.place}: the server has ended$"):
        waiting.outcome()
    with pytest.raises(Disconnected, match=r"the server has ended$"):
        session.resources()
    session.close()
    assert time.monotonic() - began < 2.0


def test_a_server_that_was_started_again_does_not_know_the_session() -> None:
    listener = TcpListener("127.0.0.1:0")
    with Wire(listener.place) as wire:
        with serve(listener) as server:
            server.service.epoch -= 1000
            server.service.lines._epoch -= 1000
            session = wire.session()
            variable = session.variable("v", 1)
            for peer in server._peers.values():
                # It is killed, so it says nothing.
                peer.window = None
            wire.refuses = True
        with serve(TcpListener(listener.place)):
            wire.refuses = False
            said = r"the server was started again since: what was shared before, and session 1, are"
            with pytest.raises(Disconnected, match=said):
                variable.read()
        session.close()


def test_a_killed_server_is_given_up_when_nobody_listens_for_some_seconds() -> None:
    with serving("tcp") as server:
        session = server.session()
        queue = session.queue("q", 4)
        waiting = Call(lambda: queue.dequeue(timeout=None))
        session.resources()
        server.kill()
        began = time.monotonic()
        with pytest.raises(Disconnected, match=r"connection broke 5 s ago, and then: no server at"):
            waiting.outcome()
        assert time.monotonic() - began < 10.0
        assert not session.connection.alive()


def test_closing_does_not_wait_for_a_server_that_is_away() -> None:
    with wired() as (_, wire):
        session = wire.session()
        wire.refuses = True
        wire.cut()
        until(lambda: not session.connection._channel.connected)
        began = time.monotonic()
        session.close()
        session.close()
        assert time.monotonic() - began < 2.0


# What breaks the protocol


def joined(server: Server, place: str, token: bytes) -> tuple[TcpChannel, m.Joined]:
    channel = tcp.connect(place, SECRET, 5.0)
    return channel, asked(channel, m.Join("session", -1, 0, token))


def asked(channel: TcpChannel, request: m.Request[Any], number: int = 1) -> Any:
    channel.send(Frame(REQUEST, number, m.encode(request)))
    frame = channel.receive(DEADLINE_SECONDS)
    assert frame is not None
    reply = m.decode_reply(frame.header)
    if frame.kind == ERROR:
        raise m.revived(reply)
    return reply


def test_a_session_is_taken_up_only_with_its_own_token() -> None:
    with wired() as (server, wire), wire.session() as session:
        for token in (b"", b"guess", bytes(16)):
            channel = tcp.connect(wire.place, SECRET, 5.0)
            request = m.Rejoin(1, token, server.service.epoch, 0)
            with pytest.raises(Disconnected, match=r"^the server has given up session 1, which"):
                asked(channel, request)
            channel.close()
        assert members(session) == ["session:0"]


@pytest.mark.parametrize("received", [2, 1 << 60])
def test_what_was_never_sent_cannot_have_arrived(received: int) -> None:
    token = bytes(range(16))
    with wired() as (server, wire):
        first, there = joined(server, wire.place, token)
        asked(first, m.Resources(), 2)
        second = tcp.connect(wire.place, SECRET, 5.0)
        said = rf"^{received} frames were acknowledged, 1 were sent$"
        with pytest.raises(ProtocolError, match=said):
            asked(second, m.Rejoin(there.session, token, there.epoch, received))
        # The session goes on as it was.
        assert asked(first, m.Resources(), 3).content["members"] == ["session:0"]
        for channel in (first, second):
            channel.close()


def test_a_peer_that_acknowledges_nothing_is_cut_off() -> None:
    with wired() as (server, wire), wire.session() as other:
        channel, _ = joined(server, wire.place, b"token")
        for number in range(UNACKNOWLEDGED + 1):
            asked(channel, m.Resources(), number + 2)
        with pytest.raises(ProtocolError, match=rf"^{UNACKNOWLEDGED + 1} replies were not ackn"):
            asked(channel, m.Resources(), 1)
        until(lambda: members(other) == ["session:0"])
        channel.close()


def test_a_peer_that_broke_the_protocol_cannot_take_its_session_up() -> None:
    token = bytes(range(16))
    with wired() as (server, wire):
        first, there = joined(server, wire.place, token)
        with pytest.raises(ProtocolError, match=r"joined twice$"):
            asked(first, m.Join("session", -1, 0, token))
        second = tcp.connect(wire.place, SECRET, 5.0)
        until(lambda: not server.service.members.alive)
        with pytest.raises(Disconnected, match=r"^the server has given up session"):
            asked(second, m.Rejoin(there.session, token, there.epoch, 0))
        for channel in (first, second):
            channel.close()


def test_over_a_unix_socket_the_end_of_the_connection_is_the_end_of_the_session() -> None:
    with serving("unix", where="thread") as server:
        session, other = server.session(), server.session()
        session.connection._channel.close()
        until(lambda: members(other) == ["session:1"])
