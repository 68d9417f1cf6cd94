"""TLS over TCP: who gets in, what they hear, and that everything works as without."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until
from certified import files, sockets
from hands import cluster, ended, served, start, toml
from wires import SECRET, Wire, serve, server_and_client

from paceline import ClusterSpec, Refused, SchemaError, Server, Session, Tls
from paceline.core.codec import PREFIX, PROTOCOL, REQUEST, encode_envelope
from paceline.server.strangers import STRANGERS
from paceline.transports import tcp
from paceline.transports.base import MOST, Block, Frame, HeapArena
from paceline.transports.encrypted import AT_ONCE
from paceline.transports.tcp import TcpListener, host_and_port
from paceline.transports.tls_channel import TlsChannel

MB = 1 << 20
RECORD = 1 << 14
"""What TLS encrypts at once."""


@contextmanager
def serving(tls: Tls | None) -> Iterator[tuple[str, list[str]]]:
    """The place of a server, and what it told its operator."""
    notes: list[str] = []
    listener = TcpListener("127.0.0.1:0", tls=tls)
    with serve(listener, on_note=notes.append):
        yield listener.place, notes


def opened(place: str, tls: Tls | None, timeout: float = DEADLINE_SECONDS) -> Session:
    return Session(f"tcp:{place}", secret=SECRET, tls=tls, timeout=timeout)


def stranger(place: str) -> socket.socket:
    sock = socket.create_connection(host_and_port(place))
    sock.settimeout(DEADLINE_SECONDS)
    return sock


# As without


def test_sessions_share_everything_and_nothing_can_be_read_on_the_way(tmp_path: Path) -> None:
    source = np.frombuffer(b"what nobody may read" * 100_000, np.uint8)
    with serving(files(tmp_path)) as (place, _), Tap(place) as tap:
        with opened(tap.place, files(tmp_path)) as one, opened(place, files(tmp_path)) as two:
            one.variable("large", source)
            assert np.array_equal(two.variable("large").read().tree, source)
            assert np.array_equal(one.variable("large").read().tree, source)
            one.queue("q", 4).enqueue({"name": "what nobody may read"})
            assert two.queue("q", 4).dequeue() == {"name": "what nobody may read"}
    assert len(tap.heard) > 2 * source.nbytes
    assert b"nobody" not in tap.heard
    assert b"PACELINE" not in tap.heard


def test_threads_of_one_session_send_and_wait_at_once(tmp_path: Path) -> None:
    with serving(files(tmp_path)) as (place, _), opened(place, files(tmp_path)) as session:
        queue = session.queue("empty", 1)
        waiting = Call(lambda: queue.dequeue(timeout=DEADLINE_SECONDS))
        large = [np.full(300_000, n, np.float64) for n in range(4)]

        def work(n: int) -> bool:
            variable = session.variable(f"v{n}", large[n])
            for _ in range(10):
                variable.assign(large[n])
                if not np.array_equal(variable.read().tree, large[n]):
                    return False
            return True

        assert all(call.outcome() for call in [Call(work, n) for n in range(4)])
        queue.enqueue("now")
        assert waiting.outcome() == "now"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_work_and_older_ones_do_not(
    tmp_path: Path, version: ssl.TLSVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files(tmp_path).client().minimum_version == ssl.TLSVersion.TLSv1_2
    assert files(tmp_path).server().context.minimum_version == ssl.TLSVersion.TLSv1_2
    context = files(tmp_path).client()
    context.maximum_version = version
    monkeypatch.setattr(Tls, "client", lambda self: context)
    with serving(files(tmp_path)) as (place, _), opened(place, files(tmp_path)) as session:
        assert session.counter("c").add() == 1


def test_it_goes_on_over_another_connection(tmp_path: Path) -> None:
    tls = files(tmp_path)
    with serving(tls) as (place, _), Wire(place, iter([200_000, 150_000, 70_000, None])) as wire:
        with wire.session(tls=tls) as session:
            variable = session.variable("v", np.zeros(20_000))
            for n in range(10):
                variable.assign(np.full(20_000, float(n)))
            assert variable.read().tree[-1] == 9
            assert wire.carried == 4


def test_an_operation_of_a_server_has_a_session_of_its_own(tmp_path: Path) -> None:
    spec = cluster(tmp_path, ps=2, worker=1)
    tls = files(tmp_path)
    with served(spec, secret=SECRET, tls=tls) as (server, *_):

        @server.operation("next")
        def following(tree: int, session: Session) -> int:
            return int(session.counter("c").add()) + tree

        with Session(spec, secret=SECRET, tls=tls, job="worker", index=0) as session:
            assert session.run("next", 10) == 11


def test_a_spec_may_have_unix_sockets_too(tmp_path: Path) -> None:
    ports = cluster(tmp_path, ps=1).as_dict()["ps"]
    spec = ClusterSpec({"ps": [*ports, f"unix:{tmp_path}/s"], "worker": ["127.0.0.1:1"]})
    with served(spec, secret=SECRET, tls=files(tmp_path)):
        tls = files(tmp_path)
        with Session(spec, secret=SECRET, job="worker", index=0, tls=tls) as session:
            with session.device("ps:1"):
                assert session.counter("c").add() == 1


# Frames


@pytest.fixture
def server_end() -> Iterator[tuple[TlsChannel, TlsChannel]]:
    with server_and_client(TlsChannel, *sockets()) as both:
        yield both


def block_of(data: bytes) -> Block:
    block = HeapArena().allocate(len(data))
    block.view()[:] = data
    return block


def test_a_frame_is_heard_of_wherever_its_records_end() -> None:
    """No byte may stay decrypted and unread, since the socket does not tell of it."""
    one, two = sockets()
    channel = TlsChannel(two, HeapArena(), waits=False)
    sizes = [0, 3, 8193, 100, 20_000, 0, 8193, RECORD, 9000]
    parts = [os.urandom(size) for size in sizes]
    coded = encode_envelope(([(0, 0, size, 0) for size in sizes], [], [], []))
    prefix = PREFIX.pack(PROTOCOL, REQUEST, 0, 5, len(coded), sum(sizes), 7, 8, 9)
    data = prefix + b"hello" + coded + b"".join(parts)
    found: list[Frame] = []
    for step in (1000, RECORD - 1, RECORD, len(data)):
        found.clear()
        stream = data * 3
        for place in range(0, len(stream), step):
            one.sendall(stream[place : place + step])
            until(lambda: drained(channel, found))
        until(lambda: drained(channel, found) and len(found) == 3)
        for frame in found:
            assert [b"" if m is None else m.array().tobytes() for m in frame.buffers] == parts
    channel.close()
    one.close()


def drained(channel: TlsChannel, found: list[Frame]) -> bool:
    """Receive as a server does, and only when the socket says so; whether all is read."""
    while (frame := channel.receive(0)) is not None:
        found.append(frame)
        if not channel.more:
            break
    assert channel._tls.exhausted
    return not channel._readable.poll(0) and not channel.more


def test_a_servers_turn_is_short_and_it_never_waits(
    server_end: tuple[TlsChannel, TlsChannel],
) -> None:
    server, client = server_end
    data = os.urandom(16 * MB)
    sending = Call(client.send, Frame(REQUEST, 1, b"x", [block_of(data)]))
    missing = len(data)
    while (frame := server.receive(0)) is None:
        if server._arrival is not None:
            assert missing - server._arrival.missing <= MOST + AT_ONCE + RECORD
            missing = server._arrival.missing
    sending.outcome()
    assert frame.buffers[0] is not None
    assert frame.buffers[0].array().tobytes() == data
    backlog: list[object] = []
    server.on_backlog = backlog.append
    for number in range(4):
        server.send(Frame(REQUEST, number, b"x", [block_of(data)]))
    assert server.unsent
    assert server._outbox_bytes < MB
    for number in range(4):
        receiving = Call(client.receive, DEADLINE_SECONDS)
        while receiving.is_alive():
            server.send_more()
        frame = receiving.outcome()
        assert frame.request == number
        assert frame.buffers[0] is not None
        assert frame.buffers[0].array().tobytes() == data


# Who gets in


@pytest.mark.parametrize(
    ("server", "client", "said"),
    [
        (("server", None), (None, "other-ca"), "unable to get local issuer certificate"),
        (("server", None), (None, None), "unable to get local issuer certificate"),
        (("expired", None), (None, "ca"), "certificate has expired"),
        (("elsewhere", None), (None, "ca"), "IP address mismatch, certificate is not valid for"),
    ],
)
def test_a_servers_certificate_that_will_not_do_is_refused_with_the_reason(
    tmp_path: Path, server: tuple[str, None], client: tuple[None, str | None], said: str
) -> None:
    with serving(files(tmp_path, *server)) as (place, notes):
        whole = rf"^tcp:{place}: the server's certificate will not do: {said}"
        with pytest.raises(Refused, match=whole):
            opened(place, files(tmp_path, *client))
        until(lambda: notes)
        assert notes[0].startswith("refused a connection: no TLS: ")


@pytest.mark.parametrize(
    ("name", "said"), [(None, "certificate required"), ("stranger", "unknown ca")]
)
def test_a_server_with_a_ca_lets_in_only_those_whom_it_signed(
    tmp_path: Path, name: str | None, said: str
) -> None:
    with serving(files(tmp_path)) as (place, notes):
        whole = rf"^tcp:{place}: the server refused this process's certificate, or its TLS: {said}"
        with pytest.raises(Refused, match=whole):
            opened(place, files(tmp_path, name))
        until(lambda: notes)
        with opened(place, files(tmp_path, "worker")) as session:
            assert session.counter("c").add() == 1


def test_a_certificate_is_no_secret(tmp_path: Path) -> None:
    with serving(files(tmp_path)) as (place, _):
        with pytest.raises(Refused, match=r"^the server refused this session: its secret is"):
            Session(f"tcp:{place}", secret=b"another", tls=files(tmp_path))


def test_a_client_without_tls_hears_that_the_server_wants_it(tmp_path: Path) -> None:
    with serving(files(tmp_path)) as (place, _):
        began = time.monotonic()
        whole = rf"^tcp:{place}: the server wants TLS: give this process tls= too$"
        with pytest.raises(Refused, match=whole):
            opened(place, None)
        assert time.monotonic() - began < 8


def test_a_client_with_tls_hears_that_the_server_has_none(tmp_path: Path) -> None:
    with serving(None) as (place, notes):
        whole = rf"^tcp:{place}: the server speaks no TLS; give it tls= too, or leave it away here$"
        with pytest.raises(Refused, match=whole):
            opened(place, files(tmp_path))
        until(lambda: notes)
        assert notes == [
            "refused a connection: the client speaks TLS, and this process has no tls="
        ]


def test_who_is_in_between_with_a_certificate_of_the_same_ca_cannot_pass_proofs_on(
    tmp_path: Path,
) -> None:
    """It decrypts and encrypts again: the proof is bound to the certificate that the client saw."""
    real, context = files(tmp_path), files(tmp_path, "second").server().context
    with serving(real) as (place, notes), socket.create_server(("127.0.0.1", 0)) as between:
        false = f"127.0.0.1:{between.getsockname()[1]}"
        opening = Call(tcp.connect, false, SECRET, DEADLINE_SECONDS, real)
        sock, _ = between.accept()
        with context.wrap_socket(sock, server_side=True) as near:
            calling = real.client()
            with calling.wrap_socket(stranger(place), server_hostname="127.0.0.1") as far:
                near.sendall(far.recv(4096))
                far.sendall(near.recv(4096))
                near.sendall(far.recv(4096))
                with pytest.raises(Refused, match=r"^the server refused this session: its secret"):
                    opening.outcome()
        until(lambda: notes)
        assert notes == ["refused a connection: the peer does not know the secret"]


# What strangers cost


def test_strangers_that_say_nothing_or_half_of_it_hold_nobody_up(tmp_path: Path) -> None:
    tls = files(tmp_path)
    with serving(tls) as (place, _), ExitStack() as stack:
        session = stack.enter_context(opened(place, tls))
        for n in range(STRANGERS + 44):
            sock = stack.enter_context(stranger(place))
            if n % 3 == 0:
                with suppress(OSError):
                    sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            if n % 3 == 1:
                with suppress(OSError):
                    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
        assert session.counter("c").add() == 1
        with opened(place, tls) as another:
            assert another.counter("c").add() == 2


def test_who_begins_tls_and_stops_is_dropped_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.transports.greeting.SILENCE", 0.1)
    monkeypatch.setattr("paceline.transports.greeting.LIMIT", 0.3)
    with serving(files(tmp_path)) as (place, _), stranger(place) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert sock.recv(4096) == b""


# Files


def test_files_that_will_not_do_are_refused_by_name(tmp_path: Path) -> None:
    good = files(tmp_path)
    there = tmp_path / "server.key"
    empty = tmp_path / "empty.pem"
    empty.touch()

    def refusal(tls: Tls, said: str) -> None:
        with pytest.raises(Refused, match=said):
            TcpListener("127.0.0.1:0", tls=tls)

    refusal(Tls(ca=good.ca), r"^a server with tls= needs a certificate: Tls\(cert=, key=\)$")
    missing = tmp_path / "none.pem"
    refusal(Tls(missing), rf"^the file {missing} of tls= cannot be read: No such file")
    refusal(Tls(empty), rf"^the file {empty} of tls= has no certificate in PEM$")
    refusal(Tls(good.cert, missing), rf"^the file {missing} of tls= cannot be read: No such file")
    other = tmp_path / "second.key"
    refusal(Tls(good.cert, other), rf"^no certificate and key in .* and {other}: key values mismat")
    refusal(Tls(good.cert, good.key, empty), rf"^the file {empty} of tls= has no certificate in P")
    there.chmod(0o604)
    refusal(good, rf"^the key file {there} has mode 604: others may use it; chmod 600 it$")
    with pytest.raises(Refused, match=rf"^the key file {there} has mode 604"):
        opened("127.0.0.1:1", good)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    good = files(tmp_path)
    locked = tmp_path / "locked.key"
    locked.touch(mode=0o600)
    locked.write_text(LOCKED)
    with pytest.raises(Refused, match=r"^the key of tls= has a password, which nobody could type"):
        TcpListener("127.0.0.1:0", tls=Tls(good.cert, locked))


LOCKED = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAiKIYcS1qQlvwICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEHnrC9qWAcwA5VoHB/wjLIQEgZCm
+rIAUAEtpvbG/LLw2hjJ917kuHVqCrpZVXnvUQDVapN38yDqIqBjr4sdryFfMxV1
jrGM7yOhm2j6bEXSxi0Obdql0UuZphVPE6l/RZgNQ9vBUSHtnIg6IvbQcPaeyE6I
0oJ2jWNExpzUgyv6NOfLlYT0xcjRQfSkdYeenp1f+RHMbo9c/3xiLuRZhG9jhFE=
-----END ENCRYPTED PRIVATE KEY-----
"""


def test_what_is_no_tls_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^tls is a paceline\.Tls, not True$"):
        Session("tcp:127.0.0.1:1", tls=True)  # type: ignore[arg-type]


# Specs and commands


def test_a_file_of_a_cluster_names_certificates_beside_it(tmp_path: Path) -> None:
    files(tmp_path)
    path = toml(cluster(tmp_path, ps=1, worker=1), tmp_path / "cluster.toml")
    table = '[tls]\ncert = "server.pem"\nkey = "server.key"\nca = "ca.pem"\n'
    path.write_text(path.read_text() + table)
    spec = ClusterSpec.from_file(path)
    assert spec.tls == {
        name: f"{tmp_path}/{file}"
        for name, file in (("cert", "server.pem"), ("key", "server.key"), ("ca", "ca.pem"))
    }
    plain = ClusterSpec(spec.as_dict())
    assert spec == plain
    with Server(spec, job_name="ps", secret=SECRET) as server:
        with Session(spec, secret=SECRET, job="worker", index=0) as session:
            assert session.counter("c").add() == 1
        with pytest.raises(Refused, match="the server wants TLS"):
            Session(server.target, secret=SECRET)
    for bad, said in (
        (
            "[tls]\nchain = 'x'",
            r"tls\.chain: it is the path of one of \['cert', 'key', 'ca'\], not",
        ),
        ("[tls]\nca = 7", r"tls\.ca: it is the path of one of"),
    ):
        path.write_text('[cluster]\nps = ["127.0.0.1:1"]\n' + bad)
        with pytest.raises(SchemaError, match=rf"^{re.escape(str(path))}: {said}"):
            ClusterSpec.from_file(path)
    path.write_text('tls = 7\n[cluster]\nps = ["127.0.0.1:1"]\n')
    with pytest.raises(SchemaError, match=r"tls: it is a table of files, .* not 7$"):
        ClusterSpec.from_file(path)


def test_the_environment_may_name_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = files(tmp_path, "worker")
    with serving(files(tmp_path)) as (place, _):
        for name in ("cert", "key", "ca"):
            monkeypatch.setenv(f"PACELINE_TLS_{name.upper()}", str(getattr(tls, name)))
        with opened(place, None) as session:
            assert session.counter("c").add() == 1


WORKER = """
import paceline
with paceline.Session.from_environment() as session:
    print(session.counter("c").add())
"""


def test_commands_take_the_files(tmp_path: Path) -> None:
    files(tmp_path)
    toml(cluster(tmp_path, ps=1, worker=2), tmp_path / "cluster.toml")
    (tmp_path / "worker.py").write_text(WORKER)
    own = ["--cluster", "cluster.toml", "--tls-ca", "ca.pem"]
    certified = ["--tls-cert", "server.pem", "--tls-key", "server.key"]
    command = ["-m", "paceline", "serve", *own, *certified, "--job", "ps"]
    server = start(*command, folder=tmp_path)
    for index in ("0", "1"):
        words = [*own, *certified, "--job", "worker", "--task", index]
        out, _ = ended(start("-m", "paceline", "run", "worker.py", *words, folder=tmp_path))
        assert out.splitlines()[-1] == str(int(index) + 1)
    ended(server)


class Tap:
    """Carries one connection to a server, and keeps what it hears."""

    def __init__(self, place: str) -> None:
        self.heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._run, args=(place,))]
        self._threads[0].start()

    def _run(self, place: str) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(host_and_port(place))
        back = threading.Thread(target=self._carry, args=(far, near))
        back.start()
        self._carry(near, far)
        back.join(DEADLINE_SECONDS)
        near.close()
        far.close()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads[0].join(DEADLINE_SECONDS)
        self._listener.close()
