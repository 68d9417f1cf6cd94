"""Large blocks of a session over TCP lie in memory that is used again, and are never shared."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import OutOfMemory
from paceline.testing import serving
from paceline.transports.base import Block
from paceline.transports.kept import LARGE, SPARE, KeptArena

MB = 1 << 20


def place(block: Block) -> int:
    address: int = block.array().ctypes.data
    return address


def test_a_large_block_lies_where_one_lay_that_nobody_looks_at() -> None:
    arena = KeptArena()
    block = arena.allocate(LARGE)
    was = place(block)
    assert was % 4096 == 0
    del block
    block = arena.allocate(LARGE - 1000)
    assert place(block) != was
    block = arena.allocate(LARGE)
    assert (place(block), block.nbytes) == (was, LARGE)
    arena.close()


@pytest.mark.parametrize(
    ("nbytes", "again"),
    [(2 * LARGE, True), (2 * LARGE + 1, False), (LARGE, True), (4 * LARGE, False)],
)
def test_memory_is_used_again_for_what_fills_half_of_it(nbytes: int, again: bool) -> None:
    arena = KeptArena()
    block = arena.allocate(2 * LARGE)
    was = place(block)
    del block
    # Somebody else's new mapping would be where a freed one was.
    (spare,) = arena._back
    block = arena.allocate(nbytes)
    assert (place(block) == was) is again
    assert block.array().nbytes == block.view().nbytes == nbytes
    del spare
    arena.close()


def test_memory_is_not_used_again_while_a_view_of_it_is_left() -> None:
    arena = KeptArena()
    block = arena.allocate(LARGE)
    block.view()[:] = bytes(range(256)) * (LARGE // 256)
    view = block.array()[1000:][::2].view(np.int8).reshape(-1, 4)
    kept = view.copy()
    del block
    for _ in range(4):
        other = arena.allocate(LARGE)
        other.array()[:] = 7
        del other
    assert np.array_equal(view, kept)
    assert len(arena._spare) + len(arena._back) == 1
    del view
    assert len(arena._spare) + len(arena._back) == 2
    arena.close()


def test_a_few_blocks_are_kept_and_none_after_the_end() -> None:
    arena = KeptArena()
    blocks = [arena.allocate(LARGE) for _ in range(4 * SPARE)]
    last = arena.allocate(LARGE)
    del blocks
    assert len(arena._back) == SPARE
    arena.close()
    assert len(arena._back) == len(arena._spare) == 0
    del last
    assert len(arena._back) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LazyFree is Linux's")
def test_memory_that_is_kept_is_the_kernels_to_take() -> None:
    def lazy() -> int:
        gc.collect()
        found = re.search(r"LazyFree: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        assert found is not None
        return int(found[1]) * 1024

    arena = KeptArena()
    block = arena.allocate(64 * MB)
    block.array()[:] = 1
    before = lazy()
    del block
    assert lazy() - before > 60 * MB
    block = arena.allocate(64 * MB)
    block.array()[:] = 2
    assert lazy() - before < 4 * MB
    assert (block.array() == 2).all()
    del block
    arena.close()


def test_more_than_there_can_be_is_refused_with_the_number() -> None:
    arena = KeptArena()
    for nbytes in (1 << 62, 1 << 70):
        with pytest.raises(OutOfMemory, match=rf"^no memory of {nbytes} bytes for this process$"):
            arena.allocate(nbytes)
    arena.close()


def test_snapshots_over_tcp_stay_as_they_were_read() -> None:
    with serving("tcp", where="thread") as server:
        variable = server.session().variable("v", np.zeros(LARGE // 8))
        reader = server.session().variable("v")
        snapshots = []
        for value in range(6):
            variable.assign(np.full(LARGE // 8, float(value)))
            snapshots.append(reader.read())
            if value % 2:
                # Every other one is let go of, and its memory is used again.
                del snapshots[-1]
        for value, snapshot in zip((0, 2, 4), snapshots, strict=True):
            assert (snapshot.tree == value).all()
