"""The contract of a transport, as checks that any pair of channels can be put through."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from paceline.core.codec import ONE_WAY, REQUEST
from paceline.core.errors import Disconnected
from paceline.core.tree import Array
from paceline.transports.base import SMALL, Arena, Block, Channel, Frame, Memory

# For each thing that a check waits for.
DEADLINE_SECONDS = 30.0

SIZES = (0, 1, 63, 64, 8192, 8193, 1 << 20, (1 << 20) + 1, 64 << 20)
# More than the descriptors that one message of a Unix socket carries here.
MANY_SEGMENTS = 80
SEGMENT = (1 << 20) + 1
BIG = 12 << 20

MakePair: TypeAlias = Callable[[], tuple[Channel, Channel]]
MakeArena: TypeAlias = Callable[[], Arena]


def check_transport(make_pair: MakePair, make_arena: MakeArena) -> None:
    """Put a transport through the whole contract.

    `make_pair()` returns the two ends of a new connection, both of which may wait; `make_arena()`
    makes where the blocks come from that are sent over it.

    Raises:
        AssertionError: it breaks the contract; the traceback shows which part.
    """
    for check in TRANSPORT_CHECKS:
        check(make_pair, make_arena)


def check_frames_arrive_whole_and_in_order(make_pair: MakePair, make_arena: MakeArena) -> None:
    """Everything that a frame says arrives, both ways, in the order sent."""
    with _pair(make_pair) as (one, two):
        for here, there in ((one, two), (two, one)):
            for number in range(100):
                here.send(Frame(REQUEST, number + 1, b"h%d" % number, (), 7, 1 << 40))
            for number in range(100):
                frame = _received(there)
                found = (frame.kind, frame.request, frame.header, frame.session, frame.received)
                assert found == (REQUEST, number + 1, b"h%d" % number, 7, 1 << 40)
                assert len(frame.buffers) == 0


def check_buffers_of_every_size(make_pair: MakePair, make_arena: MakeArena) -> None:
    """Buffers of 0 bytes to 64 MB arrive with every byte, alone and together."""
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        for nbytes in SIZES:
            frame = _carried(one, two, Frame(REQUEST, 1, b"x", (_filled(arena, nbytes),)))
            _check_filled(frame.buffers[0], nbytes)
        several = (0, 8193, 1, 1 << 20, 64, 0)
        buffers = [None, *(_filled(arena, nbytes) for nbytes in several)]
        found = _carried(one, two, Frame(REQUEST, 2, b"x", buffers)).buffers
        assert len(found) == len(buffers)
        assert found[0] is None
        for memory, nbytes in zip(found[1:], several, strict=True):
            _check_filled(memory, nbytes)


def check_large_and_small_buffers_keep_their_places(
    make_pair: MakePair, make_arena: MakeArena
) -> None:
    """A frame of hundreds of buffers, large, small and empty ones mixed, arrives as it was."""
    sizes = [(0, 5, 8192, 8193, 70_000)[number * number % 5] for number in range(400)]
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        for header in (b"x", bytes(100_000)):
            for among in (sizes, [size for size in sizes if size <= 8192], sizes[::-1], [0] * 9):
                blocks = [_filled(arena, nbytes) for nbytes in among]
                frame = _carried(one, two, Frame(REQUEST, 1, header, blocks))
                assert frame.header == header
                assert len(frame.buffers) == len(among)
                for memory, nbytes in zip(frame.buffers, among, strict=True):
                    _check_filled(memory, nbytes)
                del blocks, frame, memory


def check_large_buffers_can_be_looked_at_as_any_type(
    make_pair: MakePair, make_arena: MakeArena
) -> None:
    """A buffer that frameworks may alias begins at a multiple of 64 bytes."""
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        several = [_filled(arena, nbytes) for nbytes in (8193, 77, 20_000, 100_000, SEGMENT)]
        for memory in _carried(one, two, Frame(REQUEST, 1, b"x", several)).buffers:
            array = _bytes(memory)
            assert array.nbytes <= SMALL or array.ctypes.data % 64 == 0


def check_both_ends_send_large_frames_at_once(make_pair: MakePair, make_arena: MakeArena) -> None:
    """While each end sends what the other has not read yet, both go on."""
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        frames = [Frame(REQUEST, number, b"x", (_filled(arena, BIG),)) for number in range(3)]
        threads = [
            threading.Thread(target=_send_all, args=(end, frames), daemon=True)
            for end in (one, two)
        ]
        for thread in threads:
            thread.start()
        for number in range(3):
            for end in (one, two):
                frame = _received(end)
                assert frame.request == number
                _check_filled(frame.buffers[0], BIG)
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()


def check_one_frame_carries_many_segments(make_pair: MakePair, make_arena: MakeArena) -> None:
    """A frame may bring any number of buffers that the other end has never seen."""
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        blocks = [arena.allocate(SEGMENT) for _ in range(MANY_SEGMENTS)]
        for number, block in enumerate(blocks):
            block.view()[:2] = number.to_bytes(2, "little")
        frame = _carried(one, two, Frame(REQUEST, 1, b"x", blocks))
        one.send(Frame(REQUEST, 2, b"y"))
        assert [int.from_bytes(_bytes(b)[:2].tobytes(), "little") for b in frame.buffers] == list(
            range(MANY_SEGMENTS)
        )
        assert _received(two).header == b"y"


def check_received_buffers_are_read_only(make_pair: MakePair, make_arena: MakeArena) -> None:
    """Who receives a buffer cannot write it, unless it is the sender's own block."""
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        several = [_filled(arena, nbytes) for nbytes in (64, 8193, SEGMENT)]
        for memory in _carried(one, two, Frame(REQUEST, 1, b"x", several)).buffers:
            assert memory is not None
            if not isinstance(memory, Block):
                assert not memory.array().flags.writeable


def check_views_outlive_frame_and_channel(make_pair: MakePair, make_arena: MakeArena) -> None:
    """A view is valid for as long as it is held, whatever else has ended."""
    views = []
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        for nbytes in (64, 8193, SEGMENT):
            frame = _carried(one, two, Frame(REQUEST, 1, b"x", (_filled(arena, nbytes),)))
            views.append(_bytes(frame.buffers[0])[nbytes // 2 :])
            del frame
    gc.collect()
    for view, nbytes in zip(views, (64, 8193, SEGMENT), strict=True):
        assert np.array_equal(view, _pattern(nbytes)[nbytes // 2 :])


def check_blocks_are_not_reused_while_held(make_pair: MakePair, make_arena: MakeArena) -> None:
    """Memory that the other end still looks at is not handed out again; then it may be."""
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:
        for nbytes in (8193, SEGMENT):
            frame = _carried(one, two, Frame(REQUEST, 1, b"x", (_filled(arena, nbytes),)))
            view = _bytes(frame.buffers[0])[1:-1]
            del frame
            two.send(Frame(ONE_WAY, 0, b"x"))
            _received(one)
            for _ in range(8):
                arena.allocate(nbytes).view()[:] = bytes(nbytes)
            assert np.array_equal(view, _pattern(nbytes)[1:-1]), "a block in use was written"
            del view
            two.flush()
            two.send(Frame(ONE_WAY, 0, b"x"))
            _received(one)
            _filled(arena, nbytes)


def check_receive_waits_as_long_as_told(make_pair: MakePair, make_arena: MakeArena) -> None:
    """`receive(timeout)` returns `None` when the time is up, and no sooner."""
    with _pair(make_pair) as (one, two):
        for timeout in (0.0, 0.05, 1.2):
            began = time.monotonic()
            assert two.receive(timeout) is None
            took = time.monotonic() - began
            assert timeout - 0.01 <= took < timeout + 0.5, f"receive({timeout}) took {took} s"
        one.send(Frame(REQUEST, 1, b"x"))
        assert _received(two).header == b"x"
        for limit in (0.0, 0.05, 5.0, None):
            one.send(Frame(REQUEST, 1, b"x"))
            assert two.receive(limit) is not None, f"receive({limit}) missed what is there"


def check_a_waiting_receive_wakes(make_pair: MakePair, make_arena: MakeArena) -> None:
    """A frame ends the wait of another thread, and so does the end of the connection."""
    for end in ("send", "close here", "close there"):
        with _pair(make_pair) as (one, two):
            outcome: list[object] = []

            def wait(two: Channel = two, outcome: list[object] = outcome) -> None:
                try:
                    outcome.append(two.receive(None))
                except Disconnected as e:
                    outcome.append(e)

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            if end == "send":
                one.send(Frame(REQUEST, 1, b"x"))
            else:
                (two if end == "close here" else one).close()
            thread.join(DEADLINE_SECONDS)
            assert outcome, f"a waiting receive slept through {end!r}"
            assert isinstance(outcome[0], Frame if end == "send" else Disconnected)


def check_the_other_end_sees_a_close(make_pair: MakePair, make_arena: MakeArena) -> None:
    """What was sent before a close arrives; after it both ends say `Disconnected`."""
    with _pair(make_pair) as (one, two):
        assert one.alive()
        assert two.alive()
        one.send(Frame(REQUEST, 1, b"last"))
        one.close()
        one.close()
        assert _received(two).header == b"last"
        assert not one.alive()
        assert not two.alive()
        for goes_on in (_send_until_it_ends, _receive_until_it_ends):
            for channel in (one, two):
                assert _ends(goes_on, channel), "a closed connection goes on"
        one.flush()
        two.flush()


def check_several_threads_send(make_pair: MakePair, make_arena: MakeArena) -> None:
    """Frames of several threads never mix, and each thread's stay in order."""
    threads, frames = 4, 100
    with _pair(make_pair) as (one, two), _arena(make_arena) as arena:

        def send(thread: int) -> None:
            for number in range(frames):
                block = _filled(arena, 100 * number)
                one.send(Frame(REQUEST, number, b"t%d" % thread, (block,)))

        senders = [threading.Thread(target=send, args=(n,), daemon=True) for n in range(threads)]
        for sender in senders:
            sender.start()
        seen: dict[bytes, int] = {}
        for _ in range(threads * frames):
            frame = _received(two)
            assert frame.request == seen.get(frame.header, 0), "a thread's frames changed places"
            seen[frame.header] = frame.request + 1
            _check_filled(frame.buffers[0], 100 * frame.request)
        for sender in senders:
            sender.join(DEADLINE_SECONDS)
        assert two.receive(0) is None


def check_several_threads_ask_whether_it_is_alive(
    make_pair: MakePair, make_arena: MakeArena
) -> None:
    """`alive` may be asked by any thread while another receives."""
    with _pair(make_pair) as (one, two):
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                for _ in range(2000):
                    assert two.alive()
            except BaseException as e:
                failures.append(e)

        asking = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in asking:
            thread.start()
        for number in range(200):
            one.send(Frame(REQUEST, number, b"x"))
            assert _received(two).request == number
        for thread in asking:
            thread.join(DEADLINE_SECONDS)
        assert not failures, failures[0]


TRANSPORT_CHECKS = (
    check_frames_arrive_whole_and_in_order,
    check_buffers_of_every_size,
    check_large_and_small_buffers_keep_their_places,
    check_large_buffers_can_be_looked_at_as_any_type,
    check_both_ends_send_large_frames_at_once,
    check_one_frame_carries_many_segments,
    check_received_buffers_are_read_only,
    check_views_outlive_frame_and_channel,
    check_blocks_are_not_reused_while_held,
    check_receive_waits_as_long_as_told,
    check_a_waiting_receive_wakes,
    check_the_other_end_sees_a_close,
    check_several_threads_send,
    check_several_threads_ask_whether_it_is_alive,
)


@contextmanager
def _pair(make: MakePair) -> Iterator[tuple[Channel, Channel]]:
    one, two = make()
    try:
        yield one, two
    finally:
        one.close()
        two.close()


@contextmanager
def _arena(make: MakeArena) -> Iterator[Arena]:
    made = make()
    try:
        yield made
    finally:
        made.close()


def _received(channel: Channel) -> Frame:
    frame = channel.receive(DEADLINE_SECONDS)
    assert frame is not None, f"no frame came within {DEADLINE_SECONDS} s"
    return frame


def _carried(one: Channel, two: Channel, frame: Frame) -> Frame:
    """A frame as it arrives; large ones go on their way while the other end receives."""
    sender = threading.Thread(target=_send_all, args=(one, [frame]), daemon=True)
    sender.start()
    arrived = _received(two)
    sender.join(DEADLINE_SECONDS)
    assert not sender.is_alive(), "the frame has arrived, and sending it goes on"
    return arrived


def _send_all(channel: Channel, frames: Sequence[Frame]) -> None:
    for frame in frames:
        channel.send(frame)


def _ends(use: Callable[[Channel], None], channel: Channel) -> bool:
    try:
        use(channel)
    except Disconnected:
        return True
    return False


def _receive_until_it_ends(channel: Channel) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        channel.receive(1.0)


def _send_until_it_ends(channel: Channel) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        channel.send(Frame(REQUEST, 1, b"x"))


def _pattern(nbytes: int) -> Array:
    """Bytes of which none is where it would be in a pattern of another size."""
    return (np.arange(nbytes, dtype=np.uint32) * 167 + nbytes).astype(np.uint8)


def _filled(arena: Arena, nbytes: int) -> Block:
    block = arena.allocate(nbytes)
    assert block.nbytes == nbytes
    block.view()[:] = _pattern(nbytes).data
    return block


def _bytes(memory: Memory | None) -> Array:
    assert memory is not None
    return memory.array()


def _check_filled(memory: Memory | None, nbytes: int) -> None:
    if memory is None:
        assert nbytes == 0, f"a buffer of {nbytes} bytes came as none"
        return
    assert memory.nbytes == nbytes
    assert np.array_equal(memory.array(), _pattern(nbytes)), f"{nbytes} bytes arrived damaged"
