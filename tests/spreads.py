"""What the tests of spread variables share: several servers in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hands import cluster, toml

import paceline
from paceline import Session

SECRET = b"spread"


class Servers:
    """Servers in this process, each of which can be ended and started again."""

    def __init__(self, folder: Path, carrier: str, count: int = 3) -> None:
        self.spec = cluster(folder, carrier, ps=count, worker=4)
        self.running: dict[int, paceline.Server] = {}
        self.stack = ExitStack()
        self.joined = 0
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> None:
        self.running[index] = paceline.Server(
            self.spec, task_index=index, job_name="ps", secret=SECRET
        )

    def end(self, index: int) -> None:
        self.running.pop(index).close()

    def session(self) -> Session:
        made = Session(self.spec, job="worker", index=self.joined, secret=SECRET)
        self.joined += 1
        return self.stack.enter_context(made)

    def parts(self, session: Session, name: str = "v") -> dict[str, int]:
        """How many stages each server has."""
        found = session.resources()["parts"]
        return {
            key.rpartition(" ")[2]: part["stages"]
            for key, part in found.items()
            if key.startswith(f"{name} ")
        }

    @contextmanager
    def stager(self, program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
        """A process of its own that has staged something, and goes no further."""
        toml(self.spec, folder / "cluster.toml")
        (folder / "stager.py").write_text(program)
        with subprocess.Popen(
            [sys.executable, "stager.py"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "staged\n"
            yield process

    def close(self) -> None:
        self.stack.close()
        # Nor kept: a test's arguments outlive it.
        while self.running:
            self.running.popitem()[1].close()
