"""A live cluster under attack: `make fuzz ARGS="--frames 100000 --seed 7"`.

Two servers in processes of their own, one over a Unix socket and one over TCP, for half of the
frames through TLS; two honest clients
that share variables, a spread one, a queue, a counter and an accumulator, and check all they get;
and attackers that know the secret and speak nonsense. It shows how many frames the servers were
told, what became of them, and the servers' memory meanwhile; and fails when a server ended, met an
error that it had not foreseen, or grew beyond `--slack`, or when an honest client was harmed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from certified import files
from fuzz.parts import SECRET
from hands import free_ports, toml

from paceline import ClusterSpec, Session

MB = 1 << 20
CARRIERS = ["tcp", "tls"]
SETTLED = 10.0
"""Seconds of honest work before the memory of the beginning is taken."""

TABLE = '[tls]\ncert = "server.pem"\nkey = "server.key"\nca = "ca.pem"\n'

UNFORESEEN = re.compile(r"after an error|Traceback|goes on after the end")


def resident(pid: int) -> int:
    """Bytes of memory that a process has to itself, and its share of what it has with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


class Program:
    """A part of the campaign that runs: what it said last, and what it noted."""

    def __init__(self, *words: Any) -> None:
        self.said: Any = None
        self.notes: Counter[str] = Counter()
        self.unforeseen: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "fuzz.parts", *map(str, words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.words = words
        self.pid = self._process.pid
        self.first = threading.Event()
        self._readers = [threading.Thread(target=self._hear), threading.Thread(target=self._note)]
        for reader in self._readers:
            reader.start()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said = json.loads(line)
            self.first.set()
        self.first.set()

    def _note(self) -> None:
        assert self._process.stderr is not None
        more = 0
        for line in self._process.stderr:
            self.notes["lines"] += 1
            if UNFORESEEN.search(line):
                more = 40
            if more and len(self.unforeseen) < 200:
                self.unforeseen.append(line)
                more -= 1

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def end(self, limit: float = 180.0) -> Any:
        """Have it end, and what it said last."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(limit)
        finally:
            self._process.kill()
            for reader in self._readers:
                reader.join()
        return self.said


@contextmanager
def cluster(folder: Path, carrier: str) -> Iterator[tuple[Path, list[Program]]]:
    """Two servers; the file of their spec."""
    folder.mkdir()
    port, *others = free_ports(3)
    places = [f"unix:{folder}/ps", f"127.0.0.1:{port}"]
    workers = [f"127.0.0.1:{each}" for each in others]
    path = toml(ClusterSpec({"ps": places, "worker": workers}), folder / "cluster.toml")
    if carrier == "tls":
        files(folder)
        path.write_text(path.read_text() + TABLE)
    with ExitStack() as stack:
        servers = [Program("serve", path, index) for index in range(2)]
        for server in servers:
            stack.callback(server.end)
        for server in servers:
            assert server.first.wait(60.0)
            assert server.said == "serves", server.unforeseen
        yield path, servers


class Campaign:
    """One run of it, with TCP as it is or through TLS."""

    def __init__(self, options: argparse.Namespace, carrier: str, frames: int) -> None:
        self.carrier = carrier
        self.frames = frames
        self.options = options
        self.failures: list[str] = []
        self.memory: list[list[int]] = []
        self.told: Counter[str] = Counter()
        self.honest: dict[str, Any] = {}
        self.recent: dict[str, list[str]] = {}
        self.seconds = 0.0

    def run(self, folder: Path) -> None:
        with cluster(folder / self.carrier, self.carrier) as (path, servers):
            pair = [Program(role, path) for role in ("give", "take")]
            attackers: list[Program] = []
            try:
                self._settle(servers, pair)
                began = time.monotonic()
                attackers += self._attackers(path)
                self._watch(servers, pair, attackers)
                self.seconds = time.monotonic() - began
            finally:
                self._end(attackers, pair)
            self._sample(servers)
            self._look(path, servers)

    def _attackers(self, path: Path) -> list[Program]:
        options = self.options
        if options.again:
            return [Program("again", path, options.again)]
        each = -(-self.frames // options.attackers)
        return [
            Program("attack", path, options.seed, index, each) for index in range(options.attackers)
        ]

    def _settle(self, servers: list[Program], pair: list[Program]) -> None:
        until = time.monotonic() + SETTLED
        while time.monotonic() < until and all(one.running for one in pair):
            time.sleep(0.2)
        self._sample(servers)

    def _sample(self, servers: list[Program]) -> None:
        if all(server.running for server in servers):
            self.memory.append([resident(server.pid) for server in servers])

    def _watch(self, servers: list[Program], pair: list[Program], attackers: list[Program]) -> None:
        shown = time.monotonic()
        while any(one.running for one in attackers):
            time.sleep(1.0)
            self._sample(servers)
            for one in (*servers, *pair):
                if not one.running:
                    self.failures.append(f"{one.words[0]} has ended")
            if self.failures or any(server.unforeseen for server in servers):
                return
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                frames = sum((one.said or {}).get("frames", 0) for one in attackers)
                used = ", ".join(f"{nbytes / MB:.0f} MB" for nbytes in self.memory[-1])
                print(f"{frames} frames; the servers have {used}", flush=True)

    def _end(self, attackers: list[Program], pair: list[Program]) -> None:
        for attacker in attackers:
            said = attacker.end() or {}
            self.failures += said.pop("failures", ["an attacker has failed"])
            print("\n".join(said.pop("heard", [])))
            self.recent |= said.pop("recent", {})
            self.told += Counter(said)
        for one in pair:
            self.honest |= one.end() or {}
        for one in (*attackers, *pair):
            if one.unforeseen:
                self.failures.append("".join(one.unforeseen))
        if "taken" not in self.honest or self.honest.get("given") != self.honest["taken"]:
            self.failures.append(f"the honest clients were harmed: {self.honest}")

    def _look(self, path: Path, servers: list[Program]) -> None:
        """Whether they serve, and what they had not foreseen."""
        with Session(ClusterSpec.from_file(path), secret=SECRET, job="late") as session:
            session.variable("late", 1).assign(2)
            assert session.variable("late").read().tree == 2
        for index, server in enumerate(servers):
            if server.unforeseen:
                text = "".join(server.unforeseen)
                self.failures.append(f"ps:{index} had not foreseen:\n{text}")
                for name in set(re.findall(r"mad-\d+\.\d+\.\d+", text)) & self.recent.keys():
                    self.failures.append("\n".join([f"{name} had said", *self.recent[name]]))
            grown = self.memory[-1][index] - self.memory[0][index]
            if grown > self.options.slack * MB:
                self.failures.append(f"ps:{index} has grown by {grown / MB:.1f} MB")

    def show(self) -> None:
        told = self.told
        print(f"\n{self.carrier}, seed {self.options.seed}: {told['frames']} broken frames were")
        print(f"  taken in over {told['connections']} connections in {self.seconds:.0f} s")
        for name, count in sorted(told.items(), key=lambda item: -item[1]):
            if name not in ("frames", "connections"):
                print(f"  {count:9d} {name}")
        print("honest clients:", ", ".join(f"{n} {what}" for what, n in self.honest.items()))
        for index in range(2):
            used = [sample[index] / MB for sample in self.memory]
            print(
                f"memory of ps:{index}: {used[0]:.1f} MB at the beginning, {max(used):.1f} at most,"
                f" {used[-1]:.1f} at the end"
            )
        for failure in self.failures:
            print(f"FAILED: {failure}")
        if self.failures:
            options = f"--seed {self.options.seed} --frames {self.frames} --carrier {self.carrier}"
            print(f'again: make fuzz ARGS="{options}"')
            print('or what one connection said, in a file: make fuzz ARGS="--again FILE"')


def main() -> int:
    """What the command line says; the exit status."""
    parser = argparse.ArgumentParser("fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--attackers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--slack", type=float, default=64, help="MB that a server may grow by")
    parser.add_argument("--again", default="", help="a file with what a connection said")
    parser.add_argument("--carrier", choices=CARRIERS, help="by default each has its share")
    options = parser.parse_args()
    carriers = [options.carrier] if options.carrier else CARRIERS
    if options.again:
        # What went through TLS cannot be said again.
        carriers = ["tcp"]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    failed = False
    for carrier in carriers:
        campaign = Campaign(options, carrier, -(-options.frames // len(carriers)))
        with tempfile.TemporaryDirectory() as folder:
            campaign.run(Path(folder))
        campaign.show()
        failed = failed or bool(campaign.failures)
    return failed


if __name__ == "__main__":
    sys.exit(main())
