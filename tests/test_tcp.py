"""Over TCP: addresses, who gets in, large frames, and what a peer may announce."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until
from wires import ends, serve, server_and_client

from paceline.core.codec import MAX_INLINE, PREFIX, PROTOCOL, REQUEST, encode_envelope
from paceline.core.errors import Disconnected, OutOfMemory, Refused, TimedOut, UnknownName
from paceline.core.tree import Array
from paceline.server.loop import Server
from paceline.server.variable_desk import VariableDesk
from paceline.session import Session
from paceline.testing import serving
from paceline.transports import tcp
from paceline.transports.base import MOST, Address, Arena, Block, Frame, HeapArena
from paceline.transports.shared import RESERVED_AT_ONCE, SharedArena, SharedBlock
from paceline.transports.stream import OUTBOX_LIMIT
from paceline.transports.tcp import TcpListener, host_and_port
from paceline.transports.tcp_channel import TcpChannel
from paceline.transports.unix import UnixListener

MB = 1 << 20


@pytest.fixture
def server_end() -> Iterator[tuple[TcpChannel, TcpChannel]]:
    with server_and_client(TcpChannel, *ends()) as both:
        yield both


def numbered(nbytes: int) -> Array:
    return np.arange(nbytes // 8, dtype=np.int64)


def block_of(array: Array) -> Block:
    block = HeapArena().allocate(array.nbytes)
    block.view()[:] = array.view(np.uint8).data
    return block


# Addresses


@pytest.mark.parametrize(
    ("text", "place", "parts"),
    [
        ("tcp:127.0.0.1:4032", "127.0.0.1:4032", ("127.0.0.1", 4032)),
        ("tcp://node-7.cluster:0", "node-7.cluster:0", ("node-7.cluster", 0)),
        ("tcp:[::1]:65535", "[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_may_be_written_with_slashes_and_in_brackets(
    text: str, place: str, parts: tuple[str, int]
) -> None:
    address = Address.parse(text)
    assert (address.transport, address.place) == ("tcp", place)
    assert str(address) == f"tcp:{place}"
    assert host_and_port(place) == parts


@pytest.mark.parametrize("place", ["", "host", "host:", ":1", "::1", "[::1]", "h:65536", "h:-1"])
def test_what_is_no_address_is_refused_with_what_one_looks_like(place: str) -> None:
    said = rf"^no address 'tcp:{re.escape(place)}'; it is tcp:host:port, such as tcp:127"
    for use in (TcpListener, lambda place: tcp.connect(place, b"", 1.0)):
        with pytest.raises(UnknownName, match=said):
            use(place)


def test_a_port_of_0_is_one_that_the_kernel_chooses() -> None:
    listener = TcpListener("127.0.0.1:0")
    host, port = host_and_port(listener.place)
    assert host == "127.0.0.1"
    assert port > 0
    with serve(listener), Session(f"tcp:{listener.place}", secret=b"secret") as session:
        assert session.connection.address == f"tcp:{listener.place}"


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this host has no IPv6")
def test_version_6_of_the_protocol_is_spoken_too() -> None:
    listener = TcpListener("[::1]:0")
    assert re.fullmatch(r"\[::1\]:\d+", listener.place)
    with serve(listener), Session(f"tcp:{listener.place}", secret=b"secret") as session:
        assert session.variable("v", 1).read().tree == 1


def test_a_taken_port_is_refused_with_address_and_reason() -> None:
    listener = TcpListener("127.0.0.1:0")
    said = rf"^cannot listen at tcp:{listener.place}: Address already in use$"
    with pytest.raises(Refused, match=said):
        TcpListener(listener.place)
    listener.close()


def test_a_server_can_start_again_at_once_at_the_port_it_had() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener), Session(f"tcp:{listener.place}", secret=b"secret") as session:
        session.resources()
    again = TcpListener(listener.place)
    assert again.place == listener.place
    again.close()


def test_a_listener_is_at_its_own_address_and_at_no_other() -> None:
    listener = TcpListener("127.0.0.1:0")
    _, port = host_and_port(listener.place)
    with pytest.raises(Disconnected, match=rf"^no server at tcp:127.0.0.2:{port} \(Connection ref"):
        tcp.connect(f"127.0.0.2:{port}", b"", 5.0)
    listener.close()


def test_a_session_waits_for_a_server_that_is_not_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        place = f"127.0.0.1:{held.getsockname()[1]}"
    with pytest.raises(TimedOut, match=rf"^open a session on tcp:{place}, after 0.\d s: no server"):
        Session(f"tcp:{place}", timeout=0.2)
    opening = Call(lambda: Session(f"tcp:{place}", secret=b"secret", timeout=DEADLINE_SECONDS))
    with serve(TcpListener(place)):
        session: Session = opening.outcome()
        assert session.resources()["members"] == ["session:0"]
        session.close()


def test_a_client_that_reached_itself_has_reached_nobody() -> None:
    # The kernel joins a socket that calls its own port to itself.
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.connect(("127.0.0.1", port))
    with pytest.raises(Disconnected, match=rf"^no server at 127.0.0.1:{port} \(it called itself"):
        tcp.not_itself(sock)


def test_proxy_settings_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving("tcp", where="thread") as server:
        assert server.session().variable("v", 1).read().tree == 1


# Who gets in


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_that_others_reach_needs_a_secret(host: str) -> None:
    listener = TcpListener(f"{host}:0")
    said = rf"^cannot serve at {re.escape(listener.place)} without a secret: other hosts can reach"
    with pytest.raises(Refused, match=said):
        Server([listener], b"")
    listener.close()
    listener = TcpListener(f"{host}:0")
    _, port = host_and_port(listener.place)
    here = "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    with serve(listener), Session(f"tcp:{here}:{port}", secret=b"secret") as session:
        session.resources()


def test_a_secret_of_no_bytes_is_one_on_the_loopback() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener, secret=b""), Session(f"tcp:{listener.place}", secret=b"") as session:
        session.resources()


# One server, several listeners


def test_sessions_over_unix_and_tcp_share_everything() -> None:
    place = f"@paceline-test-{os.getpid()}-both"
    listener = TcpListener("127.0.0.1:0")
    large = numbered(2 * MB)
    with (
        serve(UnixListener(place), listener),
        Session(f"unix:{place}", secret=b"secret") as near,
        Session(f"tcp:{listener.place}", secret=b"secret") as far,
    ):
        here, there = near.variable("v", large), far.variable("v")
        assert np.array_equal(there.read().tree, large)
        there.assign(large + 1)
        assert np.array_equal(here.read().tree, large + 1)
        assert here.version == there.version
        queue = near.queue("q", 4)
        far.queue("q").enqueue({"a": large, "b": large[:3]})
        taken = queue.dequeue()
        assert np.array_equal(taken["a"], large)
        assert taken["b"].tolist() == [0, 1, 2]
        queue.enqueue(large)
        assert np.array_equal(far.queue("q").dequeue(), large)


def test_what_comes_over_tcp_is_one_copy_for_all_sessions_of_the_host() -> None:
    place = f"@paceline-test-{os.getpid()}-one-copy"
    listener = TcpListener("127.0.0.1:0")
    with (
        serve(UnixListener(place), listener) as server,
        Session(f"tcp:{listener.place}", secret=b"secret") as far,
    ):
        far.variable("v", numbered(2 * MB))
        stored = server.service.desk(VariableDesk).states["v"].stored
        assert isinstance(stored.memory, SharedBlock)
        inode = str(os.fstat(stored.memory.segment.fd).st_ino)
        del stored
        for _ in range(2):
            with Session(f"unix:{place}", secret=b"secret") as near:
                snapshot = near.variable("v").read()
                # The server's own mapping may be written, a reader's may not.
                assert sorted(mode for mode, node in mappings() if node == inode) == [
                    "r--s",
                    "rw-s",
                ]
                assert np.array_equal(snapshot.tree, numbered(2 * MB))
                del snapshot


def mappings() -> list[tuple[str, str]]:
    """The mode and inode of all of ours that is mapped: other devices have the same inodes."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    lines = [line for line in maps if "memfd:paceline" in line]
    return [(line.split()[1], line.split()[4]) for line in lines]


# Large frames


def pumped(server: TcpChannel, client: TcpChannel) -> Frame:
    """The next frame at the client, while the server's loop does its part."""
    frame = client.receive(0)
    while frame is None:
        server.send_more()
        frame = client.receive(0.01)
    return frame


def test_a_server_never_waits_and_copies_nothing_for_a_client_that_reads_late(
    server_end: tuple[TcpChannel, TcpChannel],
) -> None:
    server, client = server_end
    large = block_of(numbered(OUTBOX_LIMIT // 2 + MB))
    told: list[object] = []
    server.on_backlog = told.append
    # Twice what may be copied for one peer: it waits where it is.
    for number in range(4):
        server.send(Frame(REQUEST, number, b"x", [large, block_of(numbered(64))]))
    assert server.unsent
    assert told[0] is server
    assert server._outbox_bytes < MB
    for number in range(4):
        frame = pumped(server, client)
        assert frame.request == number
        assert frame.buffers[0] is not None
        assert frame.buffers[0].array()[-8:].tobytes() == large.array()[-8:].tobytes()
    assert not server.unsent


def test_a_server_notices_how_long_a_peer_has_taken_nothing(
    server_end: tuple[TcpChannel, TcpChannel],
) -> None:
    server, client = server_end
    assert server.stalled == 0.0
    server.send(Frame(REQUEST, 1, b"x", [block_of(numbered(64 * MB))]))
    until(lambda: server.stalled > 0.05)
    pumped(server, client)
    assert server.stalled == 0.0


def test_a_servers_turn_with_one_peer_is_short(server_end: tuple[TcpChannel, TcpChannel]) -> None:
    server, client = server_end
    sending = Call(client.send, Frame(REQUEST, 1, b"x", [block_of(numbered(64 * MB))]))
    missing = 64 * MB
    while (frame := server.receive(0)) is None:
        if server._arrival is not None:
            assert missing - server._arrival.missing <= MOST
            missing = server._arrival.missing
    sending.outcome()
    assert frame.buffers[0] is not None
    assert np.array_equal(frame.buffers[0].array().view(np.int64), numbered(64 * MB))


def test_a_frame_may_come_byte_by_byte(server_end: tuple[TcpChannel, TcpChannel]) -> None:
    raw, sock = ends()
    channel = TcpChannel(sock, HeapArena(), waits=False)
    sizes = [0, 3, 8193, 100, 20_000, 0]
    parts = [os.urandom(size) for size in sizes]
    coded = encode_envelope(([(0, 0, size, 0) for size in sizes], [], [], []))
    frame = PREFIX.pack(PROTOCOL, REQUEST, 0, 5, len(coded), sum(sizes), 7, 8, 9)
    data = frame + b"hello" + coded + b"".join(parts)
    found: list[Frame] = []
    for step in (1, 7, 8192, 8200, len(data), len(data) * 2):
        stream = data * 2
        for place in range(0, len(stream), step):
            raw.sendall(stream[place : place + step])
            while (arrived := channel.receive(0)) is not None:
                found.append(arrived)
        until(lambda: drained(channel, found))
    for one in found:
        assert (one.header, one.session, one.request) == (b"hello", 7, 8)
        assert [b"" if m is None else m.array().tobytes() for m in one.buffers] == parts
    assert len(found) == 12
    channel.close()
    raw.close()


def drained(channel: TcpChannel, found: list[Frame]) -> bool:
    while (arrived := channel.receive(0)) is not None:
        found.append(arrived)
    return len(found) % 2 == 0


# What a peer may announce


def announced(sizes: list[int], more: bytes = b"") -> bytes:
    """A frame that says it has buffers of these sizes, and then ends early."""
    coded = encode_envelope(([(0, 0, size, 0) for size in sizes], [], [], []))
    prefix = PREFIX.pack(PROTOCOL, REQUEST, 0, 1, len(coded), sum(sizes), 0, 1, 0)
    return b"".join((prefix, b"x", coded, more))


class Counting(SharedArena):
    """Knows what memory it has really taken."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Block] = []

    def announced(self, nbytes: int) -> Block:
        self.made.append(super().announced(nbytes))
        return self.made[-1]

    @property
    def taken(self) -> int:
        """Bytes that the kernel counts."""
        blocks = [block for block in self.made if isinstance(block, SharedBlock)]
        return sum(os.fstat(block.segment.fd).st_blocks * 512 for block in blocks)


@pytest.mark.parametrize("sizes", [[4 << 30], [RESERVED_AT_ONCE] * 64, [8193] * 10_000])
def test_a_peer_that_announces_much_and_sends_little_gets_little(sizes: list[int]) -> None:
    raw, sock = ends()
    arena = Counting()
    channel = TcpChannel(sock, arena, waits=False)
    raw.sendall(announced(sizes, b"little"))
    until(lambda: channel.receive(0) is None and channel._arrival is not None)
    for _ in range(10):
        assert channel.receive(0) is None
    assert arena.taken <= RESERVED_AT_ONCE + 8 * MB
    channel.close()
    arena.made.clear()
    arena.close()
    raw.close()


def test_memory_is_taken_as_the_bytes_come_and_is_used_again() -> None:
    raw, sock = ends()
    arena = Counting()
    channel = TcpChannel(sock, arena, waits=False)
    size = 2 * RESERVED_AT_ONCE + 64
    data = numbered(size)
    raw.sendall(announced([size]))
    sent = 0
    for part in np.split(data[:-8], 8):
        sending = Call(raw.sendall, part.data)
        while sending.is_alive():
            assert channel.receive(0) is None
        sent += part.nbytes
        assert arena.taken <= sent + RESERVED_AT_ONCE + MB
    assert arena.taken > size - 8 * MB
    raw.sendall(data[-8:].data)
    while (frame := channel.receive(0)) is None:
        pass
    memory = frame.buffers[0]
    del frame
    assert memory is not None
    assert np.array_equal(memory.array().view(np.int64), data)
    block = arena.made.pop()
    assert isinstance(block, SharedBlock)
    segment = block.segment.uid
    del block, memory
    again = arena.announced(size)
    assert isinstance(again, SharedBlock)
    assert again.segment.uid == segment
    del again
    arena.made.clear()
    channel.close()
    arena.close()
    raw.close()


def send_all(channel: TcpChannel, frames: list[Frame]) -> None:
    for frame in frames:
        channel.send(frame)


class Poor(HeapArena):
    """Has memory for buffers up to a size."""

    def announced(self, nbytes: int) -> Block:
        if nbytes > MB:
            raise OutOfMemory(f"{nbytes} bytes are too many here")
        return super().announced(nbytes)


@pytest.mark.parametrize("sizes", [[2 * MB], [9000, 20, 3 * MB, 9000, 10], [70_000, MB + 1]])
def test_a_frame_without_memory_for_it_arrives_with_the_error(sizes: list[int]) -> None:
    one, two = ends()
    sender = TcpChannel(one, HeapArena(), waits=True)
    channel = TcpChannel(two, Poor(), waits=True)
    arena: Arena = HeapArena()
    frames = [
        Frame(REQUEST, 1, b"too much", [arena.allocate(size) for size in sizes]),
        Frame(REQUEST, 2, b"little", [arena.allocate(9000)]),
    ]
    sending = Call(send_all, sender, frames)
    first, second = (channel.receive(DEADLINE_SECONDS) for _ in frames)
    sending.outcome()
    assert first is not None
    assert second is not None
    assert (first.header, len(first.buffers)) == (b"too much", 0)
    assert re.fullmatch(r"\d+ bytes are too many here", str(first.error))
    assert (second.header, second.error, len(second.buffers)) == (b"little", None, 1)
    sender.close()
    channel.close()


def test_a_request_that_the_server_has_no_memory_for_fails_and_the_session_goes_on() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener) as server:
        server._arena.announced = Poor().announced  # type: ignore[method-assign]
        with Session(f"tcp:{listener.place}", secret=b"secret") as session:
            variable = session.variable("v", numbered(MB))
            queue = session.queue("q", 4)
            for call in (
                lambda: session.variable("w", numbered(2 * MB)),
                lambda: queue.enqueue(numbered(2 * MB)),
            ):
                with pytest.raises(OutOfMemory, match=rf"^{2 * MB} bytes are too many here$"):
                    call()
            assert variable.assign(numbered(MB)) == variable.version
            assert queue.stats()["accepted"] == 0


def test_a_reply_that_a_session_has_no_memory_for_goes_back() -> None:
    with serving("tcp", where="thread") as server:
        session = server.session()
        queue = session.queue("q", 4)
        queue.enqueue(numbered(2 * MB))
        session.connection._channel._inner._arena = Poor()  # type: ignore[attr-defined]
        with pytest.raises(OutOfMemory, match=rf"^{2 * MB} bytes are too many here$"):
            queue.dequeue()
        assert queue.stats()["stored"] == 1
        assert server.session().queue("q").dequeue().nbytes == 2 * MB


def test_a_server_with_a_peer_that_announces_all_it_may_serves_the_others() -> None:
    with serving("tcp", where="thread") as server:
        address = Address.parse(server.target)
        channel = tcp.connect(address.place, server.secret, 5.0)
        channel._sock.sendall(announced([MAX_INLINE], bytes(MB)))
        session = server.session()
        queue = session.queue("q", 4)
        for number in range(100):
            queue.enqueue(numbered(MB // 8) + number)
            assert queue.dequeue()[0] == number
        channel.close()
