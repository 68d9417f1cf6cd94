"""Who has not proved the secret: refused, or dropped, at a price that is bounded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from calls import DEADLINE_SECONDS, Call, until
from wires import SECRET, Wire, serve

import paceline
from paceline.core.errors import Refused, SchemaError
from paceline.core.handshake import (
    ANSWER,
    CHALLENGE,
    MAGIC,
    NONCE,
    VERDICT,
    ClientSide,
    ServerSide,
)
from paceline.server.loop import UNNAMED
from paceline.server.strangers import STRANGERS, TOLD, Strangers
from paceline.session import Session
from paceline.testing import Serving, serving
from paceline.transports import tcp, unix
from paceline.transports.base import Address
from paceline.transports.greeting import Greeting
from paceline.transports.tcp import TcpListener, host_and_port
from paceline.transports.unix import UnixListener


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Serving]:
    with serving(request.param, where="thread") as made:
        yield made


def called(target: str, host: str = "127.0.0.1") -> socket.socket:
    """A connection that has not said anything, over TCP from that address of this host."""
    address = Address.parse(target)
    if address.transport == "tcp":
        sock = socket.create_connection(host_and_port(address.place), source_address=(host, 0))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(unix.socket_name(address.place))
    sock.settimeout(DEADLINE_SECONDS)
    return sock


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def verdict(sock: socket.socket, answer: bytes) -> bytes:
    sock.sendall(answer)
    return exactly(sock, VERDICT)


# The proof


class Recording:
    """Passes bytes on, both ways, and keeps them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent = self.heard = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)

    def recv(self, nbytes: int) -> bytes:
        self.heard += (data := self._sock.recv(nbytes))
        return data


def good(sock: socket.socket, secret: bytes) -> Recording:
    """A whole handshake of somebody who knows the secret."""
    line = Recording(sock)
    side = ClientSide(secret, os.urandom(NONCE))
    line.sendall(side.answer(line.recv(CHALLENGE)))
    side.check(line.recv(VERDICT))
    return line


def test_a_good_handshake_said_again_is_refused(server: Serving) -> None:
    with called(server.target) as sock:
        line = good(sock, server.secret)
    with called(server.target) as sock:
        assert exactly(sock, CHALLENGE) != line.heard[:CHALLENGE]
        assert verdict(sock, line.sent) == bytes([1]) + bytes(32)
        assert sock.recv(1) == b""
    # A server that plays its part again is none either.
    side = ClientSide(server.secret, os.urandom(NONCE))
    side.answer(line.heard[:CHALLENGE])
    with pytest.raises(Refused, match=r"^the server did not prove that it knows the cluster's"):
        side.check(line.heard[CHALLENGE:])


def test_a_challenge_sent_back_is_refused(server: Serving) -> None:
    with called(server.target) as sock:
        challenge = exactly(sock, CHALLENGE)
        mirrored = challenge + bytes(ANSWER - CHALLENGE)
        assert verdict(sock, mirrored) == bytes([1]) + bytes(32)


def test_no_server_answers_the_challenge_of_another() -> None:
    with ExitStack() as stack:
        places = [TcpListener("127.0.0.1:0") for _ in range(2)]
        for listener in places:
            stack.enter_context(serve(listener))
        one, two = (stack.enter_context(called(f"tcp:{each.place}")) for each in places)
        first, second = (exactly(sock, CHALLENGE) for sock in (one, two))
        # The one's challenge as this end's own, to hear what the other would prove with it.
        told = verdict(two, MAGIC + first[len(MAGIC) :] + bytes(32))
        assert told == bytes([1]) + bytes(32)
        assert verdict(one, second + told[1:]) == bytes([1]) + bytes(32)


def test_what_a_server_proves_is_nothing_that_a_client_could_use() -> None:
    secret, challenge, own = b"s" * 32, bytes(NONCE), b"n" * NONCE
    server, client = ServerSide(secret, challenge), ClientSide(secret, own)
    answer = client.answer(server.challenge())
    accepted, told = server.judge(answer)
    assert accepted
    assert told[1:] != answer[-32:]
    assert ServerSide(secret, challenge).judge(answer[:-32] + told[1:])[0] is False


def test_a_proof_is_bound_to_what_encrypts_the_connection() -> None:
    server = ServerSide(b"s" * 32, bytes(NONCE), b"one certificate")
    for binding, fits in ((b"one certificate", True), (b"another", False), (b"", False)):
        client = ClientSide(b"s" * 32, b"n" * NONCE, binding)
        accepted, told = server.judge(client.answer(server.challenge()))
        assert accepted is fits
        if fits:
            client.check(told)


def test_the_secret_is_never_sent() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener), socket.create_server(("127.0.0.1", 0)) as between:
        place = f"127.0.0.1:{between.getsockname()[1]}"
        opening = Call(lambda: tcp.connect(place, SECRET, 10.0).close())
        client, _ = between.accept()
        with client, called(f"tcp:{listener.place}") as far:
            said = exactly(far, CHALLENGE)
            client.sendall(said)
            said += (answer := exactly(client, ANSWER))
            far.sendall(answer)
            said += (told := exactly(far, VERDICT))
            client.sendall(told)
            opening.outcome()
    assert len(said) == CHALLENGE + ANSWER + VERDICT
    assert SECRET not in said


# What they cost


def test_a_thousand_that_say_nothing_and_keep_coming_hold_nobody_up(server: Serving) -> None:
    session = server.session()
    counter = session.counter("honest")
    silent: list[socket.socket] = []
    try:
        descriptors = len(os.listdir("/proc/self/fd"))
        for n in range(1000):
            if len(silent) == 300:
                # They come again where they were dropped.
                silent.pop(0).close()
            silent.append(called(server.target))
            if n % 50 == 0:
                counter.add()
            if n % 250 == 0:
                server.session(timeout=DEADLINE_SECONDS).counter("honest").add()
        opened = len(os.listdir("/proc/self/fd")) - descriptors
        # Both ends of these connections are in this process.
        assert opened <= 300 + STRANGERS + 50
        assert counter.value == 24
    finally:
        for sock in silent:
            sock.close()
    # Some were dropped as they left; nobody else was.
    assert all(note.startswith("refused a connection: ") for note in server.notes)


def test_who_calls_most_makes_room_and_not_who_calls_once() -> None:
    listener = TcpListener("127.0.0.1:0")
    target = f"tcp:{listener.place}"
    with serve(listener), ExitStack() as stack:
        honest = stack.enter_context(called(target, "127.0.0.2"))
        challenge = exactly(honest, CHALLENGE)
        for _ in range(2 * STRANGERS):
            sock = stack.enter_context(called(target))
            # So that the server has taken it in.
            exactly(sock, CHALLENGE)
        side = ClientSide(SECRET, os.urandom(NONCE))
        side.check(verdict(honest, side.answer(challenge)))


def test_half_closed_slow_and_talkative_strangers_end_by_themselves(server: Serving) -> None:
    with called(server.target) as half, called(server.target) as much, called(server.target) as one:
        half.shutdown(socket.SHUT_WR)
        assert exactly(half, CHALLENGE + 1)[CHALLENGE:] == b""
        with suppress(OSError):
            for _ in range(64):
                much.sendall(bytes(1 << 16))
        with suppress(OSError):
            assert exactly(much, CHALLENGE + 1)[CHALLENGE:] == b""
        # Byte by byte is as good as at once.
        side = ClientSide(server.secret, os.urandom(NONCE))
        for byte in side.answer(exactly(one, CHALLENGE)):
            one.sendall(bytes([byte]))
        side.check(exactly(one, VERDICT))
    until(lambda: len(server.notes) >= 2)
    assert sorted(server.notes)[-2:] == [
        "refused a connection: the client is not paceline: it sent"
        " b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'",
        "refused a connection: the peer left before it proved itself",
    ]


def test_who_does_not_prove_itself_in_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.transports.greeting.LIMIT", 0.1)
    listener = TcpListener("127.0.0.1:0")
    with serve(listener), called(f"tcp:{listener.place}") as sock:
        assert len(exactly(sock, CHALLENGE + 1)) == CHALLENGE


def test_many_refusals_are_told_in_few_lines() -> None:
    notes: list[str] = []
    dropped: list[Greeting] = []
    strangers = Strangers(dropped.append, notes.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for n in range(3 * TOLD):
            with socket.create_connection(listener.getsockname()) as sock:
                greeting = Greeting(sock, SECRET, lambda sock: None, "host")  # type: ignore[arg-type,return-value]
                strangers.add(greeting)
                strangers.refused(greeting, n)
    assert notes == [f"refused a connection: {n}" for n in range(TOLD)]
    assert len(dropped) == 3 * TOLD
    assert not strangers


# How many connections


def test_more_sessions_than_allowed_are_refused_with_the_limit() -> None:
    listener = TcpListener("127.0.0.1:0")
    target = f"tcp:{listener.place}"
    notes: list[str] = []
    with serve(listener, max_connections=2, on_note=notes.append), ExitStack() as stack:
        two = [stack.enter_context(Session(target, secret=SECRET)) for _ in range(2)]
        said = r"^the server takes no more sessions: it has 2 connections, max_connections=2$"
        with pytest.raises(Refused, match=said):
            Session(target, secret=SECRET)
        # Those that do not go when they are refused are dropped.
        for _ in range(UNNAMED + 1):
            good(stack.enter_context(called(target)), SECRET)
        until(lambda: notes)
        assert notes[0].startswith("dropped a connection: it has 2 connections, max_connections=2")
        two.pop().close()


def test_a_session_that_lost_its_connection_is_not_one_more() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener, max_connections=1), Wire(listener.place) as wire:
        with wire.session() as session:
            counter = session.counter("c")
            counter.add()
            wire.drop_clients()
            counter.add()
            assert counter.value == 2


# Unix sockets


def test_a_socket_file_is_its_owners(tmp_path: Path) -> None:
    listener = UnixListener(str(tmp_path / "socket"))
    assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
    listener.close()


OTHER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + sys.argv[1][1:])
    print(len(sock.recv(1)))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_users_process_is_not_listened_to() -> None:
    with serving("unix", where="thread") as made:
        place = Address.parse(made.target).place
        done = subprocess.run(
            [sys.executable, "-c", OTHER, place], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "0\n", done.stderr
        assert made.session().resources()["members"] == ["session:0"]


def test_a_server_of_no_connections_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^max_connections is a whole number, 1 or more, not 0$"):
        paceline.Server(
            {"ps": [f"unix:{tmp_path}/s"]}, job_name="ps", max_connections=0, secret=SECRET
        )
