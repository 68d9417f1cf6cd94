"""One line to a server: threads, time limits, ends, secrets, and peers that break the protocol."""

import fcntl
import gc
import itertools
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until

from paceline.core import codec
from paceline.core import messages as m
from paceline.core.codec import MAX_HEADER, PREFIX, PROTOCOL, REQUEST
from paceline.core.elements import MOST
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    ProtocolError,
    Refused,
    SchemaError,
    TimedOut,
    UnknownName,
)
from paceline.core.handshake import ANSWER, CHALLENGE, MAGIC, ServerSide
from paceline.session import Session
from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier
from paceline.transports import tcp, unix
from paceline.transports.base import Address, Frame
from paceline.transports.stream import StreamChannel
from paceline.transports.tcp import host_and_port


@pytest.fixture
def unix_server() -> Iterator[Serving]:
    with serving("unix", where="thread") as made:
        yield made


@pytest.fixture(params=["unix", "tcp"])
def socket_server(request: pytest.FixtureRequest) -> Iterator[Serving]:
    carrier: Carrier = request.param
    with serving(carrier, where="thread") as made:
        yield made


def dialled(server: Serving) -> StreamChannel:
    """A connection to it that has proved the secret, and said nothing yet."""
    address = Address.parse(server.target)
    connect = tcp.connect if address.transport == "tcp" else unix.connect
    return connect(address.place, server.secret, 5.0)


# Threads


def test_a_waiting_call_blocks_no_other_threads_call(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", np.zeros(3))
    queue = session.queue("q", 4)
    waiting = [Call(lambda: queue.dequeue(timeout=None)) for _ in range(3)]
    for _ in range(200):
        variable.assign(np.ones(3))
        variable.read()
    for _ in waiting:
        queue.enqueue("x")
    assert [call.outcome() for call in waiting] == ["x"] * 3


def test_a_call_times_out_in_time_while_another_thread_waits_for_ever(server: Serving) -> None:
    session = server.session()
    queue = session.queue("q", 4)
    waiting = Call(lambda: queue.dequeue(timeout=None))
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(TimedOut):
            queue.dequeue_many(2, timeout=0.1)
        assert 0.1 <= time.monotonic() - began < 2.0
    queue.enqueue("x")
    assert waiting.outcome() == "x"


def test_many_threads_share_one_session_and_get_their_own_replies(server: Serving) -> None:
    session = server.session()
    variables = [session.variable(f"v{n}", np.full(2, n)) for n in range(8)]

    def work(n: int) -> None:
        for _ in range(100):
            assert variables[n].read().tree[0] == n
            variables[n].assign(np.full(2, n))
            with pytest.raises(UnknownName, match=f"^no queue 'none{n}'"):
                session.connection.call(m.QueueStats(f"none{n}"))

    for call in [Call(work, n) for n in range(8)]:
        call.outcome()


def test_threads_that_read_what_is_unchanged_do_not_disturb_each_other(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(3))

    def work() -> None:
        for _ in range(3000):
            variable.read()

    for call in [Call(work) for _ in range(4)]:
        call.outcome()


# Ends


def test_closing_a_session_ends_the_waits_of_its_threads(server: Serving) -> None:
    session = server.session()
    queue = session.queue("q", 4)
    waiting = [Call(lambda: queue.dequeue(timeout=None)) for _ in range(3)]
    other = server.session().queue("q", 4)
    other.enqueue("first")
    until(lambda: other.stats()["delivered"] == 1)
    session.close()
    outcomes = []
    for call in waiting:
        try:
            outcomes.append(call.outcome())
        except Closed as e:
            outcomes.append("ended" if "this session was closed" in str(e) else str(e))
    assert sorted(map(str, outcomes)) == ["ended", "ended", "first"]


def test_every_waiting_call_ends_when_the_server_is_killed() -> None:
    with serving("unix") as server:
        session = server.session()
        variable = session.variable("v", np.zeros(3))
        queue, full = session.queue("q", 4), session.queue("full", 1)
        full.enqueue(0)
        calls: list[Callable[[], object]] = [
            lambda: queue.dequeue(timeout=None),
            lambda: queue.dequeue_many(3, timeout=500),
            lambda: full.enqueue(1, timeout=None),
            lambda: variable.read(newer_than=variable.version, timeout=None),
            lambda: session.variable("other", timeout=None),
            lambda: session.queue("other", timeout=None),
        ]
        waiting = [Call(call) for call in calls]
        session.resources()
        server.kill()
        began = time.monotonic()
        for call in waiting:
            with pytest.raises(Disconnected, match=r"^unix:@paceline-\w+: the other end is gone"):
                call.outcome()
        assert time.monotonic() - began < 1.0
        for again in calls[:2]:
            with pytest.raises(Disconnected):
                again()
        with pytest.raises(Disconnected):
            variable.read()
        began = time.monotonic()
        session.close()
        session.close()
        assert time.monotonic() - began < 1.0


def test_a_snapshot_outlives_its_server() -> None:
    with serving("unix") as server:
        tree = server.session().variable("v", np.arange(1 << 18)).read().tree
        server.kill()
    assert np.array_equal(tree, np.arange(1 << 18))
    del tree


# Ctrl-C

INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
from paceline.session import Session

session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
variable = session.variable("v", np.zeros(3))
queue, full = session.queue("q", 8), session.queue("full", 1)
calls = {
    "dequeue": lambda: queue.dequeue(timeout=None),
    "dequeue_many": lambda: queue.dequeue_many(5, timeout=None),
    "enqueue": lambda: full.enqueue(1, timeout=None),
    "read": lambda: variable.read(newer_than=variable.version, timeout=None),
    "variable": lambda: session.variable("other", timeout=None),
}
for name, call in calls.items():
    print("ready", flush=True)
    try:
        call()
    except KeyboardInterrupt:
        print("interrupted", name, flush=True)
print(queue.stats()["stored"], full.stats()["stored"], variable.read().tree.sum(), flush=True)
sys.stdin.readline()
session.close()
"""


def child(program: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def parked(pid: int) -> bool:
    """Whether the process's only thread waits in the kernel."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def test_ctrl_c_cancels_what_waits_and_loses_nothing(socket_server: Serving) -> None:
    session = socket_server.session()
    queue, full = session.queue("q", 8), session.queue("full", 1)
    full.enqueue(0)
    with child(INTERRUPTED, socket_server.target, socket_server.secret.hex()) as process:
        assert process.stdin is not None
        for name in ("dequeue", "dequeue_many", "enqueue", "read", "variable"):
            assert line(process) == "ready"
            until(lambda: parked(process.pid))
            os.kill(process.pid, signal.SIGINT)
            assert line(process) == f"interrupted {name}"
        assert line(process) == "0 1 0.0"
        # Nothing that was cancelled takes what comes later.
        for number in range(5):
            queue.enqueue(number)
        assert queue.stats()["stored"] == 5
        assert full.dequeue() == 0
        assert full.size == 0
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.returncode == 0


def test_ctrl_c_in_the_own_process_leaves_the_session_usable(server: Serving) -> None:
    session = server.session()
    queue = session.queue("q", 8)
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        queue.dequeue(timeout=None)
    interrupt.join()
    queue.enqueue("x")
    assert queue.size == 1
    assert queue.dequeue(timeout=1) == "x"


# Who gets in


def test_a_wrong_secret_is_refused_at_once(socket_server: Serving) -> None:
    began = time.monotonic()
    with pytest.raises(Refused, match=r"^the server refused this session: its secret is another"):
        Session(socket_server.target, secret=b"guess")
    assert time.monotonic() - began < 2.0
    until(lambda: socket_server.notes)
    assert socket_server.notes == ["refused a connection: the peer does not know the secret"]
    assert socket_server.session().resources()["members"] == ["session:0"]


class Impostor:
    """Something else at an address: it answers one connection as it is told to."""

    def __init__(self, carrier: str, answer: Callable[[socket.socket], None]) -> None:
        if carrier == "tcp":
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self.place = f"@paceline-impostor-{os.getpid()}-{next(_numbers)}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(unix.socket_name(self.place))
            self._listener.listen()
        self._connect = tcp.connect if carrier == "tcp" else unix.connect
        self._thread = threading.Thread(target=self._serve, args=(answer,), daemon=True)
        self._thread.start()

    def _serve(self, answer: Callable[[socket.socket], None]) -> None:
        sock, _ = self._listener.accept()
        with sock:
            answer(sock)

    def call(self) -> None:
        """Take it for a server."""
        self._connect(self.place, b"secret", 5.0)

    def close(self) -> None:
        self._thread.join(DEADLINE_SECONDS)
        self._listener.close()


_numbers = itertools.count()
over_sockets = pytest.mark.parametrize("carrier", ["unix", "tcp"])


@over_sockets
def test_a_server_that_does_not_know_the_secret_is_refused(carrier: str) -> None:
    def answer(sock: socket.socket) -> None:
        side = ServerSide(b"another", bytes(32))
        sock.sendall(side.challenge())
        sock.recv(ANSWER)
        # It lets everybody in, to hear what they say.
        sock.sendall(bytes([0]) + bytes(32))
        sock.recv(1)

    impostor = Impostor(carrier, answer)
    with pytest.raises(Refused, match=r"^the server did not prove that it knows the cluster's"):
        impostor.call()
    impostor.close()


@over_sockets
def test_a_server_of_another_protocol_is_refused_with_both_numbers(carrier: str) -> None:
    def answer(sock: socket.socket) -> None:
        sock.sendall(MAGIC[:8] + (7).to_bytes(2, "little") + bytes(32))
        sock.recv(1)

    impostor = Impostor(carrier, answer)
    said = rf"^{carrier}:{impostor.place}: the server speaks protocol 7, this process {PROTOCOL}$"
    with pytest.raises(Refused, match=said):
        impostor.call()
    impostor.close()


@over_sockets
def test_a_server_that_is_something_else_is_refused(carrier: str) -> None:
    impostor = Impostor(carrier, lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 2))
    with pytest.raises(Refused, match=r"the server is not paceline: it sent b'HTTP/1\.1 4'$"):
        impostor.call()
    impostor.close()


def stranger(server: Serving) -> socket.socket:
    address = Address.parse(server.target)
    if address.transport == "tcp":
        sock = socket.create_connection(host_and_port(address.place))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(unix.socket_name(address.place))
    sock.settimeout(DEADLINE_SECONDS)
    return sock


def test_a_client_of_another_protocol_is_refused_with_both_numbers(socket_server: Serving) -> None:
    with stranger(socket_server) as sock:
        assert len(sock.recv(CHALLENGE)) == CHALLENGE
        sock.sendall(MAGIC[:8] + (9).to_bytes(2, "little") + bytes(ANSWER - len(MAGIC)))
        assert sock.recv(1) == b""
    until(lambda: socket_server.notes)
    assert socket_server.notes == [
        "refused a connection: the client speaks protocol 9, this process 2"
    ]


def test_strangers_that_say_nothing_keep_nobody_out(socket_server: Serving) -> None:
    silent = [stranger(socket_server) for _ in range(300)]
    session = socket_server.session(timeout=10)
    assert session.resources()["members"] == ["session:0"]
    for sock in silent:
        sock.close()


# What breaks the protocol

AT_THE_SOCKET = [
    b"GET / HTTP/1.1\r\n\r\n" * 4,
    PREFIX.pack(PROTOCOL, REQUEST, 0, MAX_HEADER + 1, 0, 0, 0, 0, 0),
    PREFIX.pack(PROTOCOL, REQUEST, 0, 4, 0, 0, 0, 5, 0) + b"\xc1abc",
    PREFIX.pack(PROTOCOL, 2, 0, 4, 0, 0, 0, 5, 0) + b"\xc1abc",
    PREFIX.pack(PROTOCOL, REQUEST, 0, 1, 1, 0, 0, 5, 0) + b"x\xc1",
]


@pytest.mark.parametrize("data", AT_THE_SOCKET, ids=range(len(AT_THE_SOCKET)))
def test_a_malformed_frame_ends_its_connection_and_no_other(
    socket_server: Serving, data: bytes
) -> None:
    other = socket_server.session()
    queue = other.queue("q", 4)
    channel = dialled(socket_server)
    channel._sock.sendall(data)

    def ended() -> bool:
        try:
            channel.receive(1.0)
        except PacelineError:
            return True
        return False

    until(ended)
    channel.close()
    queue.enqueue("x")
    assert queue.dequeue() == "x"
    assert len(socket_server.notes) == 1


def announced(channel: StreamChannel, nbytes: int, fds: list[int], count: int = 1) -> None:
    """Say that a segment comes, with these descriptors."""
    envelope = codec.encode_envelope(codec.Envelope([], [(7, nbytes)] * count))
    header = m.encode(m.Stats())
    prefix = PREFIX.pack(PROTOCOL, REQUEST, 0, len(header), len(envelope), 0, 0, 2, 0)
    socket.send_fds(channel._sock, [prefix + header + envelope], fds)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has nameless memory")
@pytest.mark.parametrize(
    ("size", "there", "said", "count", "why"),
    [
        (1 << 40, 0, 1 << 40, 1, rf"a segment of {1 << 40} bytes was sent with 0 in memory$"),
        (8192, 4096, 8192, 1, r"a segment of 8192 bytes was sent with 4096 in memory$"),
        (4096, 4096, 8192, 1, r"a segment of 4096 bytes was sent as one of 8192$"),
        (4096, 4096, -1, 1, r"a segment of 4096 bytes was sent as one of -1$"),
        (4096, 4096, 4096, 0, r"1 descriptors came without a segment$"),
        (4096, 4096, 4096, 2, r"a segment was announced without its descriptor$"),
        (4096, 4096, 4096, 1, None),
    ],
)
def test_a_segment_is_as_large_as_was_said_and_all_there(
    unix_server: Serving, size: int, there: int, said: int, count: int, why: str | None
) -> None:
    channel = dialled(unix_server)
    channel.send(Frame(REQUEST, 1, m.encode(m.Join("worker", 0, os.getpid()))))
    assert channel.receive(DEADLINE_SECONDS) is not None
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        if there:
            os.posix_fallocate(fd, 0, there)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        announced(channel, said, [fd], count)
    finally:
        os.close(fd)
    if why is None:
        assert channel.receive(DEADLINE_SECONDS) is not None
    else:
        with pytest.raises(Disconnected):
            channel.receive(DEADLINE_SECONDS)
    channel.close()
    unix_server.session().queue("q", 1).enqueue("x")
    assert [bool(re.search(why or "", note)) for note in unix_server.notes] == [True] * bool(why)


ODD_REQUESTS: dict[str, m.Request[Any] | bytes] = {
    "an unknown request": b"\x91\xcd\x27\x0f",
    "an array for a map": b"\x80",
    "a deep nest": b"\x91" * 100_000,
    "a NaN limit": m.Await("nobody", float("nan")),
    "a negative limit": m.Await("nobody", -1.0),
    "no such layout": m.Define("x", m.Head(b"nonsense", [])),
    "a layout without its bytes": m.Define("x", m.Head(b"\x92\xc0\x91\x92\xa3<f8\x91\x05", [])),
    "a layout of objects": m.Define("x", m.Head(b"\x92\xc0\x91\x92\xa1O\x91\x05", [])),
    "a negative shape": m.Define("x", m.Head(b"\x92\xc0\x91\x92\xa3<f8\x91\xff", [])),
    "an empty name": m.DefineQueue("", 1, 1),
    "a long name": m.DefineQueue("x" * 257, 1, 1),
    "no capacity": m.DefineQueue("x", 0, 1),
    "a second join": m.Join("a", 0, 0),
    "a queue that is not there": m.Enqueue("nope", [], None),
}


@pytest.mark.parametrize("odd", ODD_REQUESTS)
def test_an_odd_request_gets_an_error_and_the_server_goes_on(server: Serving, odd: str) -> None:
    request = ODD_REQUESTS[odd]
    other = server.session()
    queue = other.queue("q", 4)
    session = server.session()
    channel = session.connection._channel
    data = request if isinstance(request, bytes) else m.encode(request)
    channel.send(Frame(REQUEST, 99, data))
    frame = channel.receive(DEADLINE_SECONDS)
    assert frame is not None
    assert frame.request == 99
    failed = m.decode_reply(frame.header)
    assert isinstance(m.revived(failed), (ProtocolError, SchemaError, UnknownName)), failed
    queue.enqueue("x", timeout=5)
    assert queue.dequeue(timeout=5) == "x"


def test_a_request_before_join_is_refused(socket_server: Serving) -> None:
    channel = dialled(socket_server)
    channel.send(Frame(REQUEST, 1, m.encode(m.Resources())))
    frame = channel.receive(5.0)
    assert frame is not None
    assert m.decode_reply(frame.header).text == "Resources came before Join"
    with pytest.raises(Disconnected):
        channel.receive(5.0)
    channel.close()


@pytest.mark.parametrize("timeout", [1e7, 1e18])
def test_a_very_long_limit_is_a_limit_like_any_other(server: Serving, timeout: float) -> None:
    session = server.session()
    queue = session.queue("q", 4)
    waiting = Call(lambda: queue.dequeue(timeout=timeout))
    server.session().queue("q", 4).enqueue("x")
    assert waiting.outcome() == "x"


def test_too_many_plain_bytes_in_one_step_are_refused(server: Serving) -> None:
    queue = server.session().queue("q", 4)
    with pytest.raises(SchemaError, match=r"^\d+ bytes of plain values in one step, \d+ are allow"):
        queue.enqueue(bytes(MAX_HEADER))
    queue.enqueue(np.zeros(MAX_HEADER + 1, np.uint8))
    assert queue.dequeue().nbytes == MAX_HEADER + 1


def test_too_many_plain_values_in_one_step_are_refused(unix_server: Serving) -> None:
    queue = unix_server.session().queue("q", 2 * MOST)
    with pytest.raises(
        SchemaError, match=rf"^more than {MOST} plain values in one step, or \d+ lis"
    ):
        queue.enqueue_many([0] * (MOST + 1))
    queue.enqueue("x")
    assert queue.dequeue() == "x"


def test_a_forked_process_is_told_to_open_a_session_of_its_own() -> None:
    program = """
import os
from paceline.session import Session
session = Session()
session.queue("q", 1)
read, write = os.pipe()
if os.fork() == 0:
    try:
        session.queue("q", 1)
    except Exception as e:
        os.write(write, str(e).encode())
    os._exit(0)
os.wait()
print(os.read(read, 1000).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert "a forked process opens one of its own" in done.stdout, done.stderr


def test_a_server_without_descriptors_goes_on_with_those_it_has(unix_server: Serving) -> None:
    session = unix_server.session()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket(socket.AF_UNIX)
    free = os.dup(sock.fileno())
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        sock.connect(unix.socket_name(unix_server.target.partition(":")[2]))
        until(lambda: unix_server.notes)
        for _ in range(100):
            session.resources()
        # It does not spin on what it cannot take in.
        assert len(unix_server.notes) < 5
        assert unix_server.notes[0] == (
            "cannot accept connections, will try again in 0.5 s: Too many open files"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        sock.close()
    # Who knocked meanwhile has gone again; new ones get in.
    assert "session:1" in unix_server.session().resources()["members"]


def test_an_error_keeps_nothing_of_its_caller_alive(server: Serving) -> None:
    session = server.session()

    class Held:
        """What a caller has in its hands."""

    def ask() -> weakref.ref[Held]:
        held = Held()
        found = weakref.ref(held)
        try:
            session.variable("absent", timeout=0)
        except TimedOut:
            return found
        raise AssertionError("it was there")

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()
