"""Each version is stored once per host, whoever looks at it, and given back when nobody does."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import descendants, quiet, until

import paceline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

MB = 1 << 20
READERS = 8
LARGE = 64 * MB


def memory_of(pid: int | str, *fields: str) -> int:
    """Bytes of a process, by the names of the kernel."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split()[0].rstrip(":"): line.split()[1] for line in lines[1:]}
    return sum(int(found[field]) for field in fields) * 1024


def own() -> int:
    return memory_of("self", "Private_Clean", "Private_Dirty")


def shared() -> int:
    """Bytes of shared memory that this process and all it started have mapped, each page once."""
    mine = os.getpid()
    return sum(memory_of(pid, "Pss_Shmem") for pid in (mine, *descendants(mine)))


def looking(policy: paceline.Variable[Any]) -> Iterator[Any]:
    """Look at all of each version, and say what that cost this process."""
    before = own()
    version = None
    while True:
        snapshot = policy.read(newer_than=version, timeout=60)
        version = snapshot.version
        total = int(snapshot.tree.sum())
        yield {"own": own() - before, "value": total // snapshot.tree.size}
        # Or it would look at two while the next one arrives.
        del snapshot


@pytest.mark.timeout(120)
def test_readers_of_a_large_variable_share_one_copy_of_each_version() -> None:
    before = shared()
    with quiet(READERS) as cluster:
        policy = cluster.variable("policy", np.zeros(LARGE // 8, np.int64))
        batches = cluster.collect(looking, policy, batch_size=READERS, max_lag=None)
        for n in range(1, 4):
            batch = batches.next(timeout=60)
            assert batch.data["own"].max() < LARGE // 8
            # All readers look at the same bytes: the current version's, or the last one's.
            assert shared() - before < 3 * LARGE
            policy.assign(np.full(LARGE // 8, n, np.int64))


@pytest.mark.timeout(120)
def test_versions_that_readers_have_left_behind_are_given_back() -> None:
    size = 4 * MB
    with quiet(4) as cluster:
        policy = cluster.variable("policy", np.zeros(size // 8, np.int64))
        batches = cluster.collect(looking, policy, batch_size=4, max_lag=None)
        for n in range(1, 51):
            policy.assign(np.full(size // 8, n, np.int64))
            kept = policy.memory()
            # One that is current, and at most one that each of them looks at.
            assert kept["bytes"] <= 5 * size
            if n % 5 == 0:
                batches.next(timeout=60)
        batches.close()
        until(lambda: policy.memory()["bytes"] == size)
