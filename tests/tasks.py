"""A cluster by hand that is there for campaigns of faults: its programs, and who starts them again.

Items go from workers to the chief, and from it to whoever holds the cluster: with marks that show
what is lost, torn, out of order or done twice. `python tests/tasks.py JOB INDEX FILE` is a task.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from clusters import LIMIT, accounted
from hands import cluster

import paceline
from paceline.core.versions import count_of, epoch_of
from paceline.testing import Fault, Relay

SECRET = b"what all tasks know"
CAPACITY, SEEN = 4, 64
"""What is seen has room enough for the chief to wait for items, not for whoever takes those."""

WORKERS = 2
WIDE = 9000


def tree(value: float) -> dict[str, Any]:
    """The parameters after so many assigns: that number in every place."""
    return {"a": np.full(WIDE, float(value)), "b": np.full(7, float(value))}


def whole(snapshot: paceline.Snapshot[Any]) -> float:
    """The number that is in every place, if the snapshot is not torn."""
    found = {float(x) for leaf in snapshot.tree.values() for x in (leaf.min(), leaf.max())}
    assert len(found) == 1, f"a torn read of version {snapshot.version}: {found}"
    value = found.pop()
    # The first assign of an epoch brings 0, each other one adds 1.
    assert value == count_of(snapshot.version) - 1
    return value


def serve(about: dict[str, Any], index: int) -> None:
    """A server."""
    with paceline.Server(
        about["cluster"], job_name="ps", task_index=index, secret=SECRET, on_news=print
    ) as server:
        server.join()


def work(session: paceline.Session, index: int) -> None:
    """Make items for ever; only this task adds to its counter."""
    added = session.counter(f"added-{index}")
    policy = session.variable("policy", timeout=LIMIT)
    items = session.queue("items", CAPACITY)
    count = added.value
    while True:
        count += 1
        assert added.add() == count
        made = time.monotonic()
        snapshot = policy.read()
        whole(snapshot)
        items.enqueue(
            {
                "index": index,
                "pid": os.getpid(),
                "count": count,
                "version": snapshot.version,
                "made": made,
                "array": np.full(3000, count),
            },
            timeout=LIMIT,
        )


def train(session: paceline.Session, index: int) -> None:
    """Take items, assign, and pass each item on with the version that came of it."""
    policy = session.variable("policy", tree(0))
    items, seen = session.queue("items", CAPACITY), session.queue("seen", SEEN)
    snapshot = policy.read()
    value, version = whole(snapshot), snapshot.version
    while True:
        batch = items.dequeue_many(2, timeout=LIMIT).data
        assert (batch["array"] == batch["count"][:, None]).all()
        value += 1
        before, version = version, policy.assign(tree(value))
        assert version == before + 1
        marks = ("index", "pid", "count", "version", "made")
        passed = [{key: batch[key][n] for key in marks} for n in (0, 1)]
        seen.enqueue_many([{**item, "assigned": version} for item in passed], timeout=LIMIT)


TASKS: dict[str, Callable[[paceline.Session, int], None]] = {"chief": train, "worker": work}


def task(job: str, index: int, about: dict[str, Any]) -> None:
    """A task that goes on, with what it finds anew, when a server was started again."""
    while True:
        with ExitStack() as leaves:
            try:
                session = opened(about, job, index)
                # It does not end as a task that is done, but by being killed.
                leaves.callback(session.close)
                while True:
                    try:
                        TASKS[job](session, index)
                    except paceline.Disconnected:
                        if about["relay"]:
                            raise
            except paceline.Disconnected:
                continue


def opened(about: dict[str, Any], job: str, index: int | None = None) -> paceline.Session:
    """A session on the cluster, or through the relay where there is one."""
    where = about["relay"] or paceline.ClusterSpec(about["cluster"])
    limit = 1.0 if job == "session" else LIMIT
    return paceline.Session(where, job=job, index=index, secret=SECRET, timeout=limit)


class Tasks:
    """The tasks as processes of their own. Whoever was killed is started again once noticed."""

    def __init__(self, folder: Path, carrier: str) -> None:
        spec = cluster(folder, carrier, ps=1, chief=1, worker=WORKERS)
        self.relay = Relay(spec.target("ps", 0)) if carrier == "tcp" else None
        self._about = {
            "cluster": spec.as_dict(),
            "relay": self.relay.target if self.relay else None,
        }
        self._folder = folder
        (folder / "about.json").write_text(json.dumps(self._about))
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._session: paceline.Session | None = None
        self._counts: dict[tuple[int, int], int] = {}
        self._assigned = 0
        self.names = ["ps:0", "chief:0", *(f"worker:{n}" for n in range(WORKERS))]
        for name in self.names:
            self._start(name)
        try:
            self.step()
        except BaseException:
            self.close()
            raise

    def _start(self, name: str) -> None:
        with open(self._folder / f"{name}.log", "ab") as log:
            self._programs[name] = subprocess.Popen(
                [sys.executable, "-W", "error", __file__, *name.split(":"), "about.json"],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def processes(self) -> dict[str, int]:
        """Who lives, and who was killed without that the server noticed."""
        found = {}
        for name, program in list(self._programs.items()):
            if program.poll() is not None:
                assert program.returncode == -signal.SIGKILL, self._told()
                if name == "ps:0" or name not in self._members():
                    self._start(name)
                    continue
            found[name] = program.pid
        return found

    def _told(self) -> str:
        """What those say that ended by themselves."""
        ends = [(name, each.poll()) for name, each in self._programs.items()]
        return "\n".join(
            f"{name} ended with {status}: {(self._folder / f'{name}.log').read_text()[-1000:]}"
            for name, status in ends
            if status not in (None, -signal.SIGKILL)
        )

    def step(self) -> None:
        """Until an item of each worker, made from now on, has come through the chief."""
        began, missing = time.monotonic(), set(range(WORKERS))
        while missing:
            item = self._take(began + LIMIT)
            index = int(item["index"])
            # In the order in which its maker made them, which counts on when it was killed: none
            # twice. A server that was started again begins anew.
            epoch = epoch_of(int(item["assigned"]))
            count = int(item["count"])
            assert count > self._counts.get((epoch, index), 0), (item, self._counts)
            self._counts[epoch, index] = count
            # Two items come with each version, and versions only grow, whoever assigns.
            assert int(item["assigned"]) >= self._assigned
            self._assigned = int(item["assigned"])
            assert int(item["version"]) < self._assigned
            if (
                float(item["made"]) >= began
                and int(item["pid"]) == self._programs[f"worker:{index}"].pid
            ):
                missing.discard(index)

    def check(self, fault: Fault) -> None:
        """What is accepted is accounted for, what is read is whole, and everybody is there."""
        session = self._opened()
        queues = session.resources()["queues"]
        assert all(accounted(queues[name]) for name in ("items", "seen")), queues
        snapshot = session.variable("policy", timeout=LIMIT).read()
        assert snapshot.version >= self._assigned
        whole(snapshot)
        there = self._members()
        assert sorted(there) == sorted([*self.names[1:], "session:0"]), there
        assert sorted(self.processes()) == sorted(self.names)

    def _take(self, deadline: float) -> Any:
        error: paceline.PacelineError | None = None
        while time.monotonic() < deadline:
            self.processes()
            try:
                return self._opened().queue("seen", SEEN).dequeue(timeout=1.0)
            except paceline.Closed:
                # Only a chief that failed ends this cluster.
                self._programs["chief:0"].wait(LIMIT)
                raise AssertionError(self._told()) from None
            except paceline.TimedOut as e:
                error = e
            except paceline.Disconnected as e:
                error = e
                self._closed()
        raise AssertionError(f"nothing comes: {error}")

    def _members(self) -> list[str]:
        found: list[str] = self._opened().resources()["members"]
        return found

    def _opened(self) -> paceline.Session:
        if self._session is None:
            self._session = opened(self._about, "session")
        return self._session

    def _closed(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """End all of it."""
        self._closed()
        for program in self._programs.values():
            program.kill()
            program.wait()
        if self.relay:
            self.relay.close()


if __name__ == "__main__":
    _, role, number, file = sys.argv
    known = json.loads(Path(file).read_text())
    if role == "ps":
        serve(known, int(number))
    else:
        task(role, int(number), known)
