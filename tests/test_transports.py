"""Transports: the contract, and what only shared memory and Unix sockets can get wrong."""

import os
import re
import socket
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from calls import Call
from certified import tls_pair
from wires import ends

from paceline.core.codec import ONE_WAY, PREFIX, PROTOCOL, REQUEST, encode_envelope
from paceline.core.errors import Disconnected, OutOfMemory, ProtocolError, Refused, UnknownName
from paceline.testing.transports import DEADLINE_SECONDS, TRANSPORT_CHECKS
from paceline.transports import unix
from paceline.transports.base import (
    Address,
    Arena,
    Channel,
    Frame,
    HeapArena,
    HeapBlock,
    Lease,
    Memory,
    Stuck,
    transport,
)
from paceline.transports.memory import MemoryChannel
from paceline.transports.shared import Segment, SharedArena, SharedBlock, size_class
from paceline.transports.tcp_channel import TcpChannel
from paceline.transports.unix_channel import UnixChannel

PAGE = 4096


def unix_pair() -> tuple[UnixChannel, UnixChannel]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return UnixChannel(one, waits=True), UnixChannel(two, waits=True)


def tcp_pair() -> tuple[TcpChannel, TcpChannel]:
    one, two = ends()
    return TcpChannel(one, HeapArena(), waits=True), TcpChannel(two, HeapArena(), waits=True)


PAIRS: dict[str, tuple[Callable[[], tuple[Channel, Channel]], Callable[[], Arena]]] = {
    "memory": (MemoryChannel.pair, HeapArena),
    "unix": (unix_pair, SharedArena),
    "tcp": (tcp_pair, HeapArena),
    "tcp from shared memory": (tcp_pair, SharedArena),
    "tls": (tls_pair, HeapArena),
}


over_sockets = pytest.mark.parametrize("carrier", ["unix", "tcp"])


def raw_and_channel(carrier: str) -> tuple[socket.socket, Channel]:
    """A socket to say anything at, and the channel that hears it."""
    if carrier == "tcp":
        raw, sock = ends()
        return raw, TcpChannel(sock, HeapArena(), waits=True)
    raw, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return raw, UnixChannel(sock, waits=True)


@pytest.fixture
def server_end() -> Iterator[tuple[UnixChannel, UnixChannel]]:
    """An end that never waits, as a server's, and the client's end of the same connection."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    server, client = UnixChannel(one, waits=False), UnixChannel(two, waits=True)
    yield server, client
    server.close()
    client.close()


def segments(arena: SharedArena, count: int) -> list[SharedBlock]:
    """Small blocks, each in a segment of its own that says its number."""
    blocks = [SharedBlock(arena, Segment.create(PAGE), 0, PAGE, PAGE) for _ in range(count)]
    for number, block in enumerate(blocks):
        block.view()[:2] = number.to_bytes(2, "little")
    return blocks


def number_of(memory: Memory | None) -> int:
    assert memory is not None
    return int.from_bytes(memory.array()[:2].tobytes(), "little")


def received(channel: Channel) -> Frame:
    frame = channel.receive(DEADLINE_SECONDS)
    assert frame is not None
    return frame


@pytest.mark.parametrize("carrier", PAIRS)
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds(check: Callable[..., None], carrier: str) -> None:
    check(*PAIRS[carrier])


@pytest.mark.parametrize("carrier", PAIRS)
def test_what_is_not_read_in_time_goes_whole_and_before_the_next(carrier: str) -> None:
    one, two = PAIRS[carrier][0]()
    with closing(one), closing(two):
        large = Frame(REQUEST, 1, bytes(8 << 20))
        frames = [large, Frame(REQUEST, 2, b"2"), Frame(ONE_WAY, 3, b"3")]
        sent = []
        for frame in frames:
            began = time.monotonic()
            with suppress(Stuck):
                one.send(frame, began + 0.1)
                sent.append(frame)
            assert time.monotonic() - began < DEADLINE_SECONDS / 2
        # The second would have had to wait, and nothing of it was sent.
        assert sent == (frames if carrier == "memory" else frames[::2])
        last = Call(one.send, Frame(REQUEST, 4, b"4"))
        for frame in (*sent, Frame(REQUEST, 4, b"4")):
            found = received(two)
            assert (found.request, found.header) == (frame.request, frame.header)
        last.outcome()


@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_a_frame_carries_more_descriptors_than_one_message(count: int) -> None:
    one, two = unix_pair()
    arena = SharedArena()
    blocks = segments(arena, count)
    one.send(Frame(REQUEST, 1, b"x", blocks))
    assert [number_of(memory) for memory in received(two).buffers] == list(range(count))
    arena.close()
    one.close()
    two.close()


def test_a_server_never_waits_for_a_client_that_reads_late(
    server_end: tuple[UnixChannel, UnixChannel],
) -> None:
    server, client = server_end
    arena = SharedArena()
    open_before = len(os.listdir("/proc/self/fd"))
    blocks = segments(arena, 70)
    frames = 60
    for number in range(frames):
        extra = blocks if number in (50, 55) else [arena.allocate(8192)]
        server.send(Frame(REQUEST, number, bytes(8192), extra))
    backlog = server.unsent
    assert backlog
    for number in range(frames):
        frame = client.receive(0)
        while frame is None:
            server.send_more()
            frame = client.receive(0.01)
        assert frame.request == number
        if number in (50, 55):
            assert [number_of(memory) for memory in frame.buffers] == list(range(70))
    assert not server.unsent
    del frame, extra, blocks
    # The client gives its buffers back; then nobody holds the segments.
    client.send(Frame(REQUEST, 1, b"x"))
    assert received(server).request == 1
    arena.close()
    server.send(Frame(REQUEST, 1, b"x"))
    received(client)
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1


def test_a_peer_that_reads_nothing_is_cut_off(server_end: tuple[UnixChannel, UnixChannel]) -> None:
    server, _ = server_end
    big = bytes(1 << 26)
    for _ in range(4):
        server.send(Frame(REQUEST, 1, big))
    with pytest.raises(Disconnected, match=r"^the peer left \d+ bytes unread$"):
        server.send(Frame(REQUEST, 1, big))


def test_views_of_received_memory_cannot_be_made_writable() -> None:
    one, two = unix_pair()
    arena = SharedArena()
    block = arena.allocate(1 << 20)
    one.send(Frame(REQUEST, 1, b"x", (block,)))
    memory = received(two).buffers[0]
    assert memory is not None
    view = memory.array()[10:20].view(np.uint16)
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    arena.close()
    one.close()
    two.close()


def test_freed_blocks_are_used_again() -> None:
    arena = SharedArena()
    for nbytes in (100_000, 3 << 20):
        first = arena.allocate(nbytes)
        assert isinstance(first, SharedBlock)
        place = first.segment.uid, first.offset
        second = arena.allocate(nbytes)
        assert isinstance(second, SharedBlock)
        assert (second.segment.uid, second.offset) != place
        del first
        third = arena.allocate(nbytes)
        assert isinstance(third, SharedBlock)
        assert (third.segment.uid, third.offset) == place
    arena.close()


@pytest.mark.parametrize("nbytes", [8193, 65536, 65537, 1 << 20, (1 << 20) + 1, 64 << 20])
def test_a_block_wastes_at_most_an_eighth_and_a_page(nbytes: int) -> None:
    assert nbytes <= size_class(nbytes) <= nbytes * 9 // 8 + PAGE


def test_memory_that_is_not_there_is_an_error_with_numbers() -> None:
    arena = SharedArena()
    with pytest.raises(
        OutOfMemory, match=r"^shared memory of \d{16} bytes was asked for; \d+ are available"
    ):
        arena.allocate(1 << 52)
    arena.close()


def test_a_segment_that_could_shrink_is_refused() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ProtocolError, match=r"^a segment was sent that is not sealed"):
        Segment.received(unsealed, PAGE)


def test_a_segment_smaller_than_said_is_refused() -> None:
    made = Segment.create(PAGE)
    fd = os.dup(made.fd)
    with pytest.raises(ProtocolError, match=f"^a segment of {PAGE} bytes was sent as one of 9999$"):
        Segment.received(fd, 9999)


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(PROTOCOL + 1, REQUEST, 0, 1, 0, 0, 0, 0, 0) + b"x",
        PREFIX.pack(PROTOCOL, 200, 0, 1, 0, 0, 0, 0, 0) + b"x",
        PREFIX.pack(PROTOCOL, REQUEST, 0, (1 << 32) - 1, 0, 0, 0, 0, 0),
        PREFIX.pack(PROTOCOL, REQUEST, 0, 1, 0, 1 << 60, 0, 0, 0),
        PREFIX.pack(PROTOCOL, REQUEST, 0, 1, 3, 0, 0, 0, 0) + b"xabc",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a browser\r\n\r\n",
        bytes(200),
    ],
)
@over_sockets
def test_what_is_no_frame_is_refused(carrier: str, data: bytes) -> None:
    raw, channel = raw_and_channel(carrier)
    with raw, closing(channel):
        raw.sendall(data)
        with pytest.raises(ProtocolError):
            channel.receive(DEADLINE_SECONDS)
        with pytest.raises(Disconnected):
            channel.receive(0)


@pytest.mark.parametrize(
    "envelope",
    [
        ([(7, 0, 64, 1)], [], [], []),
        ([(0, 0, 64, 0)], [], [], []),
        ([(0, 0, -64, 0)], [], [], []),
        ([], [(3, PAGE)], [], []),
    ],
    ids=["unknown segment", "no inline bytes", "less than no bytes", "no descriptor"],
)
@over_sockets
def test_buffers_that_are_nowhere_are_refused(carrier: str, envelope: tuple[object, ...]) -> None:
    coded = encode_envelope(envelope)
    raw, channel = raw_and_channel(carrier)
    with raw, closing(channel):
        raw.sendall(PREFIX.pack(PROTOCOL, REQUEST, 0, 1, len(coded), 0, 0, 0, 0) + b"x" + coded)
        with pytest.raises(ProtocolError):
            channel.receive(DEADLINE_SECONDS)


def test_too_few_descriptors_are_said_with_numbers() -> None:
    program = """
import resource, socket
from paceline.core.errors import Disconnected, OutOfMemory
from paceline.transports.base import Frame
from paceline.transports.shared import Segment, SharedArena, SharedBlock
from paceline.transports.unix_channel import UnixChannel

one, two = (UnixChannel(s, waits=True) for s in socket.socketpair())
arena = SharedArena()
blocks = [SharedBlock(arena, Segment.create(4096), 0, 4096, 4096) for _ in range(20)]
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
try:
    kept = [arena.allocate(2 << 20) for _ in range(40)]
except OutOfMemory as e:
    print(e)
one.send(Frame(0, 1, b"x", blocks))
try:
    two.receive(5)
except Disconnected as e:
    print(e)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    told = done.stdout.splitlines()
    assert len(told) == 2, done.stderr
    assert re.search(r"Too many open files; .* of 32 file descriptors", told[0]) or re.search(
        r"32 file descriptors are allowed", told[0]
    )
    assert re.search("32 file descriptors", told[1])
    assert "ulimit -n" in told[1]


# Addresses


def test_a_socket_path_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    place = str(tmp_path / ("x" * 120))
    for use in (unix.UnixListener, lambda place: unix.connect(place, b"", 1.0)):
        with pytest.raises(
            Refused, match=rf"^the socket path is {len(place)} bytes long, the kernel takes 107: "
        ):
            use(place)


def test_a_path_of_107_bytes_is_not_too_long() -> None:
    assert unix.socket_name("/" + "x" * 106) == "/" + "x" * 106


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    first = socket.socket(socket.AF_UNIX)
    first.bind(place)
    first.close()
    listener = unix.UnixListener(place)
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    listener.close()
    assert not os.path.exists(place)


def test_a_living_servers_socket_file_is_not_replaced(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    listener = unix.UnixListener(place)
    with pytest.raises(Refused, match=f"^cannot listen at unix:{place}: Address already in use$"):
        unix.UnixListener(place)
    listener.close()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text("precious")
    with pytest.raises(Refused, match=f"^cannot listen at unix:{file}: Address already in use$"):
        unix.UnixListener(str(file))
    assert file.read_text() == "precious"


def test_nobody_listens() -> None:
    with pytest.raises(Disconnected, match=r"^no server at unix:@nobody-there \("):
        unix.connect("@nobody-there", b"", 1.0)


@pytest.mark.parametrize("text", ["udp://host:1", "nothing", "", "@name"])
def test_an_address_of_no_transport_is_refused(text: str) -> None:
    with pytest.raises(UnknownName, match=r"^no transport for the address .*there are \['memory'"):
        Address.parse(text)


def test_an_address_is_written_as_it_is_read() -> None:
    assert str(Address.parse("unix:@a:b")) == "unix:@a:b"


def test_an_unknown_transport_names_those_there_are() -> None:
    with pytest.raises(
        UnknownName, match=r"^no transport 'pigeon'; there are \['memory', 'tcp', 'unix'"
    ):
        transport("pigeon")


def test_a_part_of_a_part_is_a_part_of_the_whole() -> None:
    block = HeapBlock(100)
    block.array()[:] = np.arange(100)
    part = block.part(20, 60).part(5, 10)
    assert part.array().tolist() == list(range(25, 35))
    assert part.array().base is not None
    assert part.nbytes == 10


def test_what_is_let_go_of_in_the_midst_of_sending_is_told_right_after() -> None:
    one, two = unix_pair()
    arena = SharedArena()
    held: list[Lease] = []

    class Late(bytes):
        """A header whose length is asked for last, when the envelope is made already."""

        def __len__(self) -> int:
            held.clear()
            return super().__len__()

    with closing(one), closing(two), closing(arena):
        block = arena.allocate(1 << 21)
        lent = weakref.ref(block)
        one.send(Frame(REQUEST, 1, b"x", (block,)))
        del block
        memory = received(two).buffers[0]
        assert memory is not None
        held.append(Lease(memory, two.flush))
        del memory
        two.send(Frame(REQUEST, 1, Late(b"x"), (HeapBlock(1),)))
        received(one)
        # Nothing but a goodbye may be needed to hear of it.
        assert one.receive(0) is None
        assert lent() is None
