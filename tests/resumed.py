"""A program that launches a cluster with checkpoints, started again whenever it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from clusters import LIMIT, descendants, runs, until

from paceline import checkpoints
from paceline.testing import Fault

TRAIN = """
import json, os, sys
import numpy as np
import paceline

os.chdir(os.path.dirname(__file__))

def follows(policy, worker):
    while True:
        yield float(policy.read().tree[0])

with paceline.Cluster(2, checkpoint="run", save_every=0.05, progress="quiet") as cluster:
    policy, net = cluster.variable("policy", np.zeros(1)), np.zeros(1)
    version = policy.read_into(net)
    print(json.dumps([version, net[0]]), flush=True)
    batches = cluster.collect(follows, policy, batch_size=2)
    while sys.stdin.readline():
        batches.next(timeout=30)
        net += 1
        print(json.dumps([policy.assign(net), net[0]]), flush=True)
"""


class Run:
    """Such a program: its steps are those of its training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version, self._value = -1, 0.0
        self._kin: set[int] = set()
        self._program: subprocess.Popen[str] | None = None
        self._start()

    def _start(self) -> None:
        saved = checkpoints.latest(self._folder / "run")
        (self._folder / "train.py").write_text(TRAIN)
        self._program = subprocess.Popen(
            [sys.executable, str(self._folder / "train.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        version, value = self._said()
        # It begins with what was saved last, under a version that there never was.
        assert value == (0.0 if saved is None else saved.read("policy")[0])
        assert value <= self._value
        assert version > self._version
        self._version, self._value = version, value

    def processes(self) -> dict[str, int]:
        """The chief, until all that it had started have ended with it."""
        if self._program is not None and self._program.poll() is not None:
            assert self._program.returncode == -signal.SIGKILL, self._program.communicate()
            if not any(map(runs, self._kin)):
                self._program.communicate()
                self._program = None
        return {} if self._program is None else {"chief:0": self._program.pid}

    def step(self) -> None:
        """Until a batch was trained on; by a new chief if there is none."""
        if self._program is None:
            self._start()
        assert self._program is not None
        assert self._program.stdin is not None
        self._program.stdin.write("\n")
        self._program.stdin.flush()
        version, value = self._said()
        assert (version, value) == (self._version + 1, self._value + 1)
        self._version, self._value = version, value
        self._kin = descendants(self._program.pid)

    def check(self, fault: Fault) -> None:
        """What was saved is good, and not beyond what was seen."""
        found = checkpoints.latest(self._folder / "run")
        assert found is not None
        assert found.read("policy")[0] <= self._value

    def _said(self) -> tuple[int, float]:
        assert self._program is not None
        assert self._program.stdout is not None
        version, value = json.loads(self._program.stdout.readline())
        return version, value

    def close(self) -> None:
        """End it."""
        if self._program is not None:
            self._program.kill()
            self._program.communicate(timeout=LIMIT)
        until(lambda: not any(map(runs, self._kin)))
