"""Mirrors on hosts: what crosses their links, counted there."""

from __future__ import annotations

from pathlib import Path

import pytest
from afar import Afar
from hands import ended, lines_until
from namespaces import Network, needs_namespaces

MB = 1 << 20
VERSIONS, WORKERS = 5, 3

FOLLOW = """
import paceline

with paceline.Session.from_environment() as session:
    policy, done = session.variable("policy"), session.barrier("round", {n})
    for _ in range({versions}):
        done.wait()
        tree = policy.read().tree
        assert (tree == tree[0]).all()
        done.wait()
    print("mirror", session.mirror() is not None, flush=True)
"""

ASSIGN = """
import numpy as np
import paceline

with paceline.Session.from_environment() as session:
    policy = session.variable("policy", np.zeros({numbers}))
    done = session.barrier("round", {n})
    for value in range({versions}):
        policy.assign(np.full({numbers}, float(value)))
        done.wait()
        done.wait()
"""


def carried(folder: Path, mirrors: int) -> int:
    """Bytes that came to a host with several workers while all of them read each version."""
    numbers = {"n": WORKERS + 1, "versions": VERSIONS, "numbers": MB // 2}
    where = {"ps": [0], "chief": [0], "worker": [1] * WORKERS}
    with Network(2) as network:
        afar = Afar(
            folder, network, where,
            follow=FOLLOW.format(**numbers), assign=ASSIGN.format(**numbers),
        )  # fmt: skip
        server = afar.serve()
        lines_until(server, "missing")
        made = [afar.paceline(network.hosts[1], "mirror") for _ in range(mirrors)]
        for mirror in made:
            lines_until(mirror, "a mirror of ps:0")
        before, _ = network.hosts[1].carried()
        workers = [afar.run("follow.py", "worker", n) for n in range(WORKERS)]
        ended(afar.run("assign.py", "chief", 0))
        for program in workers:
            assert f"mirror {bool(mirrors)}\n" in ended(program)[0]
        for program in (*made, server):
            ended(program)
        return network.hosts[1].carried()[0] - before


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(180)
def test_a_version_crosses_the_link_of_a_host_once(tmp_path: Path) -> None:
    found = []
    for mirrors in (0, 1):
        folder = tmp_path / str(mirrors)
        folder.mkdir()
        found.append(carried(folder, mirrors))
    once = VERSIONS * 4 * MB
    assert WORKERS * once <= found[0] < 1.1 * WORKERS * once
    assert once <= found[1] < 1.1 * once
