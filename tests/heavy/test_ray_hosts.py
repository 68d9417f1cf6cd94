"""A Ray cluster whose nodes are hosts with an address each: what crosses their links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hands import ended, lines_until
from namespaces import Host, Network, needs_namespaces

ray = pytest.importorskip("ray")

MB = 1 << 20
FOLDER = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
"""Where Ray notes what is there; names of sockets in it may not be long."""

ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": FOLDER.name}
VERSIONS, NBYTES = 20, 4 * MB

PROGRAM = """
import sys, time
import numpy as np
import paceline

VERSIONS, NBYTES = map(int, sys.argv[2:])

def play(policy, worker):
    while True:
        snapshot = policy.read()
        yield {"by": worker.index, "whole": len(set(snapshot.tree.tolist()[::4096])) == 1,
               "mirrored": worker.session.mirror() is not None}

place = {"resources": {"serves": 1}}
engine = paceline.Ray(address=sys.argv[1], ps=place, strategy="SPREAD", wait=60)
with paceline.Cluster(4, engine=engine, progress="quiet") as cluster:
    policy = cluster.variable("policy", np.zeros(NBYTES, np.uint8))
    mirrored = {}
    with cluster.collect(play, policy, batch_size=4, max_lag=None) as batches:
        while len(mirrored) < 4 or not all(mirrored.values()):
            batch = batches.next(timeout=60)
            assert batch.data["whole"].all()
            mirrored |= zip(batch.data["by"].tolist(), batch.data["mirrored"].tolist())
            policy.assign(np.full(NBYTES, len(mirrored), np.uint8))
            time.sleep(0.05)
        print("mirrored", flush=True)
        input()
        for n in range(VERSIONS):
            version = policy.assign(np.full(NBYTES, n, np.uint8))
            seen = set()
            while len(seen) < 4:
                batch = batches.next(timeout=60)
                made = zip(batch.data["by"].tolist(), batch.version)
                seen |= {by for by, v in made if v >= version}
        print("done", flush=True)
        input()
"""


UNREACHED = """
import sys
import paceline

engine = paceline.Ray(address=sys.argv[1], ps={"resources": {"serves": 1}}, wait=60)
try:
    with paceline.Cluster(1, engine=engine, progress="quiet"):
        print("reached")
except paceline.Disconnected as e:
    print(e)
"""

CALLING, SERVING = "50000-50999", "61000-61999"
"""Ports that the kernels of a host that calls and of one that serves choose from; not Ray's."""


@contextmanager
def ray_over(count: int, serves: int) -> Iterator[list[Host]]:
    """A head, and nodes with room for two workers each; the one of that number serves."""
    with Network(count) as network:
        head = network.hosts[0]
        for host in network.hosts:
            start = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
            start += ["--min-worker-port=20000", "--max-worker-port=20999"]
            start += ["--node-manager-port=21000", "--object-manager-port=21001"]
            if host is head:
                start += ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
            else:
                start += [f"--address={head.address}:6379", "--num-cpus=2"]
            if host is network.hosts[serves]:
                start += ["--resources", '{"serves": 1}']
            start.append(f"--node-ip-address={host.address}")
            made = host.start(sys.executable, *start, env=ENVIRONMENT)
            lines_until(made, "Ray runtime started")
        yield network.hosts


@pytest.fixture
def nodes() -> Iterator[list[Host]]:
    with ray_over(3, serves=0) as hosts:
        yield hosts


@needs_namespaces
@pytest.mark.timeout(240)
def test_each_version_crosses_to_a_node_once(nodes: list[Host], tmp_path: Path) -> None:
    head, *others = nodes
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [str(program), f"{head.address}:6379", str(VERSIONS), str(NBYTES)]
    chief = head.python(*words, stdin=subprocess.PIPE, env=ENVIRONMENT)
    assert chief.stdin is not None
    lines_until(chief, "mirrored")
    before = [host.carried()[0] for host in others]
    chief.stdin.write("\n")
    chief.stdin.flush()
    lines_until(chief, "done")
    came = [host.carried()[0] - b for host, b in zip(others, before, strict=True)]
    chief.stdin.write("\n")
    chief.stdin.flush()
    ended(chief)
    for nbytes in came:
        assert VERSIONS * NBYTES <= nbytes < 1.2 * VERSIONS * NBYTES, came


@needs_namespaces
@pytest.mark.timeout(240)
def test_a_chief_that_cannot_reach_the_servers_says_where_they_are(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNREACHED)
    with ray_over(2, serves=1) as (head, node):
        for host, ports in ((head, CALLING), (node, SERVING)):
            host.run("sysctl", "-qw", f"net.ipv4.ip_local_port_range={ports.replace('-', ' ')}")
        # As a firewall would have it: Ray's ports are open, and those of servers are shut.
        rule = ("to", node.address, "ipproto", "tcp", "sport", CALLING, "dport", SERVING)
        head.run("ip", "rule", "add", *rule, "unreachable")
        words = (str(program), f"{head.address}:6379")
        out, _ = ended(head.python(*words, env=ENVIRONMENT))
    port = re.escape(node.address) + r":61\d{3}"
    assert re.search(
        rf"^the chief cannot reach the servers that run as ps:0 at near:{port}: .*; no server at"
        rf" tcp:{port} \(Network is unreachable\); .* this host has to reach these addresses: see"
        r" its network, and firewalls$",
        out,
        re.MULTILINE,
    ), out
