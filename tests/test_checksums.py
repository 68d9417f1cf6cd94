"""No item is ever half-written or mixed: each carries the checksum of its own bytes."""

import signal
import subprocess
import sys
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from paceline.testing import serving

# Sizes on both sides of each border: beside the header, in a slab, in a segment of its own.
PRODUCE = """
import itertools, sys, zlib
import numpy as np
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="producer")
queue = session.queue("q")
rng = np.random.default_rng(int(sys.argv[3]))
for n in itertools.count() if sys.argv[4] == "for ever" else range(int(sys.argv[4])):
    a = rng.integers(0, 256, int(rng.choice([10, 3000, 50_000, 1_500_000])), np.uint8)
    b = rng.random(int(rng.integers(1, 2000)))
    check = zlib.crc32(b.tobytes(), zlib.crc32(a.tobytes()))
    queue.enqueue({"a": a, "n": n, "b": b, "check": check, "who": sys.argv[3]})
session.close()
"""


def whole(item: Any) -> bool:
    found = zlib.crc32(item["b"].tobytes(), zlib.crc32(item["a"].tobytes()))
    return bool(found == item["check"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("carrier", ["unix", pytest.param("tcp", marks=pytest.mark.slow)])
def test_every_item_is_whole_also_of_producers_that_are_killed(carrier: Any) -> None:
    items, rounds = 150, 3
    with serving(carrier) as server:
        queue = server.session().queue("q", 20, capacity_bytes=1 << 24)

        def producer(seed: int, many: object) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", PRODUCE, server.target, server.secret.hex()]
            return subprocess.Popen([*command, str(seed), str(many)])

        steady = [producer(seed, items) for seed in range(2)]
        killed = producer(100, "for ever")
        next_of: Counter[str] = Counter()
        deaths = 0
        while deaths < rounds or min(next_of["0"], next_of["1"]) < items:
            batch = queue.dequeue_up_to(7, timeout=30)
            for item in batch.items():
                assert whole(item)
                assert item["n"] == next_of[item["who"]]
                next_of[item["who"]] += 1
            if deaths < rounds and next_of[str(100 + deaths)] >= 15:
                killed.kill()
                assert killed.wait(30) == -signal.SIGKILL
                deaths += 1
                if deaths < rounds:
                    killed = producer(100 + deaths, "for ever")
        assert [process.wait(30) for process in steady] == [0, 0]
        assert next_of["0"] == next_of["1"] == items


def test_a_read_of_an_assigned_tree_has_the_checksum_that_was_assigned_with_it() -> None:
    rng = np.random.default_rng(0)
    with serving("unix", where="thread") as server:
        first: Any = {"a": np.zeros(200_000, np.uint8), "check": 0}
        variable, reading = server.session().variable("v", first), server.session().variable("v")
        for _ in range(200):
            a = rng.integers(0, 256, 200_000, np.uint8)
            variable.assign({"a": a, "check": zlib.crc32(a.tobytes())})
            snapshot = reading.read()
            variable.assign(first)
            assert zlib.crc32(snapshot.tree["a"].tobytes()) == snapshot.tree["check"]
