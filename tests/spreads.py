"""What the tests of spread variables share: several servers in one process."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from hands import cluster

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

    def close(self) -> None:
        self.stack.close()
        # Nor kept: a test's arguments outlive it.
        while self.running:
            self.running.popitem()[1].close()
