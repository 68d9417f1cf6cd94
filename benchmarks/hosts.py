"""One model to the workers of several hosts: what crosses the links, and when the last has it.

python benchmarks/hosts.py [--hosts 4] [--workers 2] [--megabytes 64] [--versions 5] [--rate 1gbit]

Hosts are network namespaces of this machine, so it needs root; server and chief are on one more.
Beside paceline with mirrors and without stand plain sockets, one to each worker, and Ray, whose
nodes are the same hosts. Each version is assigned when all have looked at all of the one before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from afar import Afar
from hands import ended, lines_until
from namespaces import Host, Network, lacking

MB = 1 << 20

FOLLOW = """
import time
import paceline

with paceline.Session.from_environment() as session:
    policy, seen, ready = session.variable("policy"), session.queue("seen"), session.queue("ready")
    if {mirrors}:
        policy.read()
        while session.mirror() is None:
            time.sleep(0.2)
            policy.read().tree.sum()
    ready.enqueue(1)
    begin = session.barrier("begin", {n} + 1)
    begin.wait()
    version = policy.read().version
    begin.wait()
    for _ in range({versions}):
        snapshot = policy.read(newer_than=version)
        version = snapshot.version
        snapshot.tree[::4096].sum()
        seen.enqueue(time.monotonic())
        del snapshot
"""

ASSIGN = """
import time
import numpy as np
import paceline

with paceline.Session.from_environment() as session:
    model = np.ones({megabytes} << 20, np.uint8)
    policy = session.variable("policy", model)
    seen, ready = session.queue("seen", 100), session.queue("ready", 100)
    def touch():
        policy.assign(model)
        time.sleep(0.3)
    left = {n}
    while left:
        try:
            ready.dequeue(timeout=0.5)
            left -= 1
        except paceline.TimedOut:
            touch()
    begin = session.barrier("begin", {n} + 1)
    begin.wait()
    begin.wait()
    print("ready", flush=True)
    input()
    for _ in range({versions}):
        began = time.monotonic()
        policy.assign(model)
        print("took", seen.dequeue_many({n}).data.max() - began, flush=True)
    print("done", flush=True)
    input()
"""

TAKE = """
import socket, sys, time
size, place = int(sys.argv[1]), memoryview(bytearray(int(sys.argv[1])))
with socket.create_connection((sys.argv[2], 4000), 60) as sock:
    for _ in range(int(sys.argv[3])):
        filled = 0
        while filled < size:
            filled += sock.recv_into(place[filled:])
        sock.sendall(b"%020.6f" % time.monotonic())
"""

SEND = """
import socket, sys, threading, time
size, address, n, versions = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = bytes(size)
with socket.create_server((address, 4000)) as listener:
    print("listens", flush=True)
    socks = [listener.accept()[0] for _ in range(n)]
print("ready", flush=True)
input()
for _ in range(versions):
    began = time.monotonic()
    threads = [threading.Thread(target=sock.sendall, args=(model,)) for sock in socks]
    for each in threads:
        each.start()
    at = [float(s.recv(20, socket.MSG_WAITALL)) for s in socks]
    for each in threads:
        each.join()
    print("took", max(at) - began, flush=True)
print("done", flush=True)
input()
"""

ACTORS = """
import sys, time
import numpy as np
import ray

address, megabytes, n, versions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ray.init(address=address, log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Worker:
    def look(self, kept):
        ray.get(kept[0])[::4096].sum()
        return time.monotonic()

model = np.ones(megabytes << 20, np.uint8)
workers = [Worker.remote() for _ in range(n)]
ray.get([each.look.remote([ray.put(model)]) for each in workers])
print("ready", flush=True)
input()
for _ in range(versions):
    began = time.monotonic()
    kept = [ray.put(model)]
    print("took", max(ray.get([each.look.remote(kept) for each in workers])) - began, flush=True)
print("done", flush=True)
input()
"""


def run(chief: subprocess.Popen[str], hosts: list[Host]) -> tuple[list[float], list[int]]:
    """Let a chief assign; the seconds of each version, and the bytes that came to each host."""
    assert chief.stdin is not None
    lines_until(chief, "ready")
    before = [host.carried()[0] for host in hosts]
    chief.stdin.write("\n")
    chief.stdin.flush()
    try:
        lines = lines_until(chief, "done")
    except AssertionError as e:
        raise SystemExit(f"{e}: {chief.communicate()[1]}") from None
    took = [float(line.split()[1]) for line in lines if "took" in line]
    came = [host.carried()[0] - b for host, b in zip(hosts, before, strict=True)]
    chief.stdin.write("\n")
    chief.stdin.flush()
    return took, came


class Bench:
    """A network, and what was asked for."""

    def __init__(self, options: argparse.Namespace, network: Network, folder: Path) -> None:
        self.asked = options
        self.network = network
        self.folder = folder
        self.head, *self.others = network.hosts
        self.n = options.hosts * options.workers
        self.size = options.megabytes * MB

    def paceline(self, *, mirrors: bool) -> tuple[list[float], list[int]]:
        """Through a server, with a mirror on each host or without."""
        given = {
            "n": self.n, "versions": self.asked.versions, "megabytes": self.asked.megabytes,
            "mirrors": mirrors,
        }  # fmt: skip
        place = [1 + host for host in range(self.asked.hosts) for _ in range(self.asked.workers)]
        folder = self.folder / f"mirrors-{mirrors}"
        folder.mkdir()
        afar = Afar(
            folder, self.network, {"ps": [0], "chief": [0], "worker": place},
            follow=FOLLOW.format(**given), assign=ASSIGN.format(**given),
        )  # fmt: skip
        server = afar.serve()
        lines_until(server, "missing")
        made = [afar.paceline(host, "mirror") for host in self.others if mirrors]
        for mirror in made:
            lines_until(mirror, "a mirror of ps:0")
        workers = [afar.run("follow.py", "worker", number) for number in range(self.n)]
        chief = afar.paceline(
            self.head, "run", "assign.py", "--job", "chief", "--task", "0", stdin=subprocess.PIPE
        )
        found = run(chief, self.others)
        for program in (*workers, chief, *made, server):
            ended(program)
        return found

    def sockets(self) -> tuple[list[float], list[int]]:
        """A socket to each worker."""
        versions = str(self.asked.versions)
        words = [str(self.size), self.head.address]
        chief = self.head.python("-c", SEND, *words, str(self.n), versions, stdin=subprocess.PIPE)
        lines_until(chief, "listens")
        workers = [
            host.python("-c", TAKE, *words, versions)
            for host in self.others
            for _ in range(self.asked.workers)
        ]
        found = run(chief, self.others)
        for program in (*workers, chief):
            ended(program)
        return found

    def ray(self) -> tuple[list[float], list[int]]:
        """`ray.put`, and `ray.get` in an actor for each worker."""
        nodes = []
        # What Ray notes of clusters on this machine is of no use to others.
        folder = self.folder / "ray"
        environment = {
            **os.environ, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        folder.mkdir()
        for host in self.network.hosts:
            words = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
            if host is self.head:
                words += ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
            else:
                words += [f"--address={self.head.address}:6379"]
                words += [f"--num-cpus={self.asked.workers}"]
            nodes.append(
                host.start(
                    sys.executable, *words, f"--node-ip-address={host.address}", env=environment
                )
            )
            lines_until(nodes[-1], "Ray runtime started")
        asked = (self.asked.megabytes, self.n, self.asked.versions)
        chief = self.head.python(
            "-c", ACTORS, f"{self.head.address}:6379", *map(str, asked),
            stdin=subprocess.PIPE, env=environment,
        )  # fmt: skip
        found = run(chief, self.others)
        ended(chief)
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.communicate(timeout=60)
        return found


def main() -> None:
    """Measure one way after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="of each host")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--rate", help="of each host's link, as tc writes it: 1gbit")
    parser.add_argument("--without-ray", action="store_true")
    options = parser.parse_args()
    if lacking():
        raise SystemExit(lacking())
    table = Table(caption=f"{options.megabytes} MB, {os.cpu_count()} cores for all hosts")
    for heading in ("how", "MB to a host", "s to the last read", "from - to"):
        table.add_column(heading, justify="left" if heading == "how" else "right")
    with tempfile.TemporaryDirectory() as folder, Network(1 + options.hosts) as network:
        for host in network.hosts:
            if options.rate:
                host.limit(options.rate)
        bench = Bench(options, network, Path(folder))
        ways: dict[str, Callable[[], tuple[list[float], list[int]]]] = {
            "paceline, with mirrors": lambda: bench.paceline(mirrors=True),
            "paceline, without": lambda: bench.paceline(mirrors=False),
            "a socket to each worker": bench.sockets,
        }
        if not options.without_ray:
            ways["ray.put, ray.get"] = bench.ray
        for how, way in ways.items():
            took, came = way()
            mean = statistics.mean(came) / options.versions / MB
            times = f"{min(took):.2f} - {max(took):.2f}"
            table.add_row(how, f"{mean:.1f}", f"{statistics.median(took):.2f}", times)
    Console().print(table)


if __name__ == "__main__":
    main()
