"""Servers whose process is stopped: they are there, and say nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, until
from hands import cluster, start, toml

from paceline import Disconnected, Session, TimedOut, Variable, connection
from paceline.transports import stream

SECRET = b"stopped"
N, WIDTH = 100_000, 8
MANY = 300_000
"""Rows of 19 MB: more than the sockets of both ends hold."""

SERVE = """
import sys
import paceline

spec = paceline.ClusterSpec.from_file("cluster.toml")
with paceline.Server(spec, job_name="ps", task_index=int(sys.argv[1]), secret=b"stopped") as server:
    print("serves", flush=True)
    server.join()
"""


class Away:
    """Two servers in processes of their own, and a session; the second can be stopped."""

    def __init__(self, folder: Path, carrier: str) -> None:
        self.spec = cluster(folder, carrier, ps=2, worker=4)
        toml(self.spec, folder / "cluster.toml")
        (folder / "serve.py").write_text(SERVE)
        self.programs = [start("serve.py", str(n), folder=folder) for n in (0, 1)]
        self.sessions: list[Session] = []
        for program in self.programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "serves\n"

    def session(self) -> Session:
        index = len(self.sessions)
        self.sessions.append(Session(self.spec, job="worker", index=index, secret=SECRET))
        return self.sessions[-1]

    @property
    def second(self) -> subprocess.Popen[str]:
        return self.programs[1]

    def stop(self) -> None:
        self.second.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.second.pid}/task")
        until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))

    def go_on(self) -> None:
        self.second.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        # Nor kept: a test's arguments outlive it.
        while self.sessions:
            self.sessions.pop().close()
        for program in self.programs:
            program.kill()
            program.communicate()


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(params=["unix", "tcp"])
def away(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Away]:
    if not os.path.exists("/proc/self/task"):
        pytest.skip("who is stopped is seen in /proc")
    monkeypatch.setattr(connection, "GRACE", 2.0)
    monkeypatch.setattr(stream, "SEND_LIMIT", 2.0)
    made = Away(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


def table(session: Session, kind: str) -> Variable[Any]:
    """Zeros, all on the second server or shared by both."""
    if kind == "plain":
        with session.device("ps:1"):
            return session.variable("v", np.zeros((N, WIDTH)))
    return session.spread("v", np.zeros((N, WIDTH)), placement=lambda leaves: [["ps:0", "ps:1"]])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [10, MANY])
@pytest.mark.parametrize("kind", ["plain", "spread"])
@pytest.mark.parametrize("asked", ["gather", "scatter_add"])
def test_a_stopped_server_holds_nobody_who_wants_rows_for_ever(
    away: Away, asked: str, kind: str, count: int
) -> None:
    one = away.session()
    made = table(one, kind)
    indices, rows = np.resize([N - 1, 0], count), np.ones((count, WIDTH))
    away.stop()
    call = (
        Call(lambda: made.gather(indices, timeout=0.5))
        if asked == "gather"
        else Call(lambda: made.scatter_add(indices, rows, timeout=0.5))
    )
    with pytest.raises((TimedOut, Disconnected), match=r"(unix|tcp):.*(no verdict|no server at)"):
        call.outcome()
    away.go_on()
    two = away.session()
    found: Variable[Any] = two.variable("v")
    before = float(found.gather([1]).tree[0, 0]), found.gather([0, N - 1]).tree
    # All of it or nothing.
    assert before[0] == 0
    assert len(np.unique(before[1])) == 1
    if kind == "spread" or asked == "gather":
        assert not before[1].any()
    version = found.version
    assert found.scatter_add([0, N - 1], np.ones((2, WIDTH)), timeout=30) == version + 1
    assert (found.gather([0, N - 1]).tree == before[1] + 1).all()
