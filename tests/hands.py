"""What the tests of clusters by hand share: specs on free places, programs, sessions."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusters import until

import paceline

PATIENCE = 90.0
"""Seconds within which programs end, each of which takes a second to start where nobody else does
anything."""


def free_ports(count: int) -> list[int]:
    """Ports at 127.0.0.1 that nobody listens at, and that the kernel gives to nobody who asks."""
    found: list[int] = []
    draw = random.SystemRandom()
    while len(found) < count:
        port = draw.randrange(10_000, 32_000)
        if port in found:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


def cluster(folder: Path, carrier: str = "tcp", **jobs: int) -> paceline.ClusterSpec:
    """A spec with that many tasks of each job; all but servers are at places of no meaning."""
    ports = iter(free_ports(sum(jobs.values())))

    def place() -> str:
        port = next(ports)
        return f"127.0.0.1:{port}" if carrier == "tcp" else f"unix:{folder}/{port}"

    return paceline.ClusterSpec({job: [place() for _ in range(n)] for job, n in jobs.items()})


def toml(spec: paceline.ClusterSpec, path: Path) -> Path:
    """The spec as a file."""
    lines = [f"{job} = {tasks!r}".replace("'", '"') for job, tasks in spec.as_dict().items()]
    path.write_text("[cluster]\n" + "\n".join(lines) + "\n")
    return path


@contextmanager
def served(spec: paceline.ClusterSpec, **options: Any) -> Iterator[list[paceline.Server]]:
    """All servers of a spec, in this process."""
    made: list[paceline.Server] = []
    try:
        for job, index in spec.servers(options.get("servers")):
            made.append(paceline.Server(spec, job_name=job, task_index=index, **options))
        yield made
    finally:
        for server in made:
            server.close()


def start(*words: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a Python program in a folder, which is also its user's home."""
    names = ("TF_CONFIG", "PACELINE_CLUSTER", "PACELINE_SECRET_FILE")
    kept = {name: text for name, text in os.environ.items() if name not in names}
    return subprocess.Popen(
        [sys.executable, "-u", "-W", "error", *words],
        cwd=folder,
        env={**kept, "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(program: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What a program printed, and its errors, when it has ended with that exit status."""
    out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == code, (program.args, program.returncode, out, err)
    return out, err


Programs = list[subprocess.Popen[str]]


class Hand:
    """Somebody at several terminals, with programs in a folder."""

    def __init__(self, folder: Path, spec: paceline.ClusterSpec, **programs: str) -> None:
        self.folder = folder
        self.spec = spec
        self.started: Programs = []
        toml(spec, folder / "cluster.toml")
        for name, text in programs.items():
            (folder / f"{name}.py").write_text(text)

    def paceline(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        made = start("-m", "paceline", *words, folder=self.folder, **environment)
        self.started.append(made)
        return made

    def serve(self, index: int, job: str = "ps", *more: str) -> subprocess.Popen[str]:
        return self.paceline(
            "serve", "--cluster", "cluster.toml", "--job", job, "--task", str(index), *more
        )

    def run(self, script: str, job: str, index: int, *more: str) -> subprocess.Popen[str]:
        return self.paceline(
            "run", script, "--cluster", "cluster.toml", "--job", job, "--task", str(index), *more
        )

    def close(self) -> None:
        for program in self.started:
            program.kill()
            program.communicate()


def lines_until(program: subprocess.Popen[str], said: str, *, errors: bool = False) -> list[str]:
    """What a program printed up to a line with these words; or what it said of errors."""
    stream = program.stderr if errors else program.stdout
    assert stream is not None
    found: list[str] = []
    for line in stream:
        found.append(line)
        if said in line:
            return found
    raise AssertionError(f"it never said {said!r}: {found}")


def when_ended(running: Programs) -> list[float]:
    """The times at which programs end."""
    times: dict[int, float] = {}

    def all_have() -> bool:
        for place, program in enumerate(running):
            if place not in times and program.poll() is not None:
                times[place] = time.monotonic()
        return len(times) == len(running)

    until(all_have, within=PATIENCE)
    return [times[place] for place in range(len(running))]
