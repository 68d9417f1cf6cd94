"""Servers whose process is stopped: they are there, and say nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from calls import Call, until
from hands import cluster, start, toml

from paceline import Disconnected, Session, TimedOut, Variable, connection, pending

SECRET = b"stopped"
N, WIDTH = 100_000, 8
MANY = 300_000
"""Rows of 19 MB: more than the sockets of both ends hold."""

SERVE = """
import sys
import paceline

spec = paceline.ClusterSpec.from_file("cluster.toml")
with paceline.Server(spec, job_name="ps", task_index=int(sys.argv[1]), secret=b"stopped") as server:
    @server.operation("double")
    def double(tree):
        return tree * 2

    print("serves", flush=True)
    server.join()
"""

LIMIT, SLACK = 2.0, 2.0
"""Seconds that calls are given, and how much later they may end."""


class Away:
    """Two servers in processes of their own, and a session; the second can be stopped."""

    def __init__(self, folder: Path, carrier: str) -> None:
        self.spec = cluster(folder, carrier, ps=2, worker=4)
        toml(self.spec, folder / "cluster.toml")
        (folder / "serve.py").write_text(SERVE)
        self.folder = folder
        self.programs = [self.started(n) for n in (0, 1)]
        self.sessions: list[Session] = []

    def started(self, index: int) -> subprocess.Popen[str]:
        program = start("serve.py", str(index), folder=self.folder)
        assert program.stdout is not None
        assert program.stdout.readline() == "serves\n"
        return program

    def session(self) -> Session:
        index = len(self.sessions)
        self.sessions.append(Session(self.spec, job="worker", index=index, secret=SECRET))
        return self.sessions[-1]

    @property
    def second(self) -> subprocess.Popen[str]:
        return self.programs[1]

    def stop(self, index: int = 1) -> None:
        self.programs[index].send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.programs[index].pid}/task")
        until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))

    def asked(self, session: Session) -> bool:
        """Whether a call of that session waits for the first server."""
        return bool(session.connection._waiters)

    def kill(self, index: int) -> None:
        self.programs[index].kill()
        self.programs[index].communicate()

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
def away(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Away]:
    if not os.path.exists("/proc/self/task"):
        pytest.skip("who is stopped is seen in /proc")
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
@pytest.mark.parametrize("count", [pytest.param(10, marks=pytest.mark.slow), MANY])
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


@pytest.mark.timeout(120)
def test_who_asks_where_a_name_is_goes_on_with_a_first_server_started_again(away: Away) -> None:
    one = away.session()
    with one.device("ps:1"):
        one.variable("v", 7)
    two = away.session()
    away.stop(0)
    asking = Call(lambda: two.variable("v", timeout=30).read().tree)
    until(lambda: away.asked(two))
    away.kill(0)
    away.programs[0] = away.started(0)
    # It hears where the name is from whoever knows.
    assert one.variable("v").read().tree == 7
    assert asking.outcome() == 7


Asking: TypeAlias = tuple[Callable[[], object], Callable[[], object]]
"""What waits for a stopped server, and how it is seen later that nothing was mixed up or lost."""


def _variables(session: Session) -> dict[str, Asking]:
    with session.device("ps:1"):
        mine = {name: session.variable(name, np.zeros(4)) for name in "raiws"}
        replica = session.replica("net", {"w": np.zeros(4)})
    read, assign, add, into, rows = mine.values()
    first, target = read.version, np.ones(4)
    # So that there is something to pull.
    session.variable("net").assign({"w": np.ones(4)})

    def pushed() -> bool:
        replica.push({"w": np.full(4, 7.0)})
        replica.pull()
        return bool((replica.leaves()["w"] == 7).all())

    return {
        "read": (
            lambda: read.read(newer_than=first, timeout=LIMIT),
            lambda: read.assign(np.full(4, 3.0)) == first + 1 and read.read().tree[0] == 3,
        ),
        "assign": (
            lambda: assign.assign(np.ones(4), timeout=LIMIT),
            # It was sent, and is done when the server goes on.
            lambda: bool((assign.read().tree == 1).all()),
        ),
        "assign_add": (
            lambda: add.assign_add(np.ones(4), timeout=LIMIT),
            lambda: add.assign_add(np.ones(4)) > 0 and bool((add.read().tree == 2).all()),
        ),
        "tagged": (
            lambda: into.read_into(target, tag="none", timeout=LIMIT),
            lambda: into.read_into(target) == into.version and not target.any(),
        ),
        "gather": (
            lambda: rows.gather([3], timeout=LIMIT),
            lambda: rows.gather([3]).tree.shape == (1,),
        ),
        "scatter_add": (
            lambda: rows.scatter_add([0, 0], np.ones(2), timeout=LIMIT),
            # As with assign.
            lambda: rows.read().tree.tolist() == [2, 0, 0, 0],
        ),
        "pull": (lambda: replica.pull(timeout=LIMIT), pushed),
        "push": (lambda: replica.push({"w": np.ones(4)}, timeout=LIMIT), pushed),
    }


def _spread(session: Session) -> dict[str, Asking]:
    """One that has its home on the stopped server, and one with a part there."""
    found: dict[str, Asking] = {}
    for home in ("ps:0", "ps:1"):
        with session.device(home):
            made = session.spread(home, np.zeros((4, 2)), placement=lambda _: [["ps:0", "ps:1"]])

        def whole(made: Variable[Any] = made) -> bool:
            tree = made.read().tree
            return made.assign(np.ones((4, 2))) > 0 and len(np.unique(tree)) == 1

        # So that there is something to read.
        made.assign(np.ones((4, 2)))
        calls: dict[str, Callable[..., object]] = {
            "read": lambda v=made: v.read(timeout=LIMIT),
            "assign": lambda v=made: v.assign(np.full((4, 2), 5.0), timeout=LIMIT),
            "assign_add": lambda v=made: v.assign_add(np.ones((4, 2)), timeout=LIMIT),
            "gather": lambda v=made: v.gather([0, 3], timeout=LIMIT),
        }
        found |= {f"{verb} spread {home}": (call, whole) for verb, call in calls.items()}
    return found


def _others(session: Session) -> dict[str, Asking]:
    with session.device("ps:1"):
        full, empty, some = (session.queue(name, 2) for name in ("full", "empty", "some"))
        gradients = session.accumulator("gradients", like=np.zeros(2))
        given = session.accumulator("given", like=np.zeros(2))
        counter, barrier = session.counter("counter"), session.barrier("barrier", 2)
        steps, unmet = session.counter("steps"), session.barrier("unmet", 2)
        reader, stream = (
            session.reader("reader", ["one"]),
            session.reader("stream", [], stream=True),
        )
        named = session.variable("named", np.zeros(1))
    full.enqueue_many([1, 2])
    some.enqueue(9)

    def next_is(queue: Any, *items: object) -> bool:
        return [queue.dequeue(timeout=30) for _ in items] == list(items)

    def refilled() -> object:
        full.close(cancel_pending_enqueues=True)
        return next_is(full, 1, 2) and full.size == 0

    def passed() -> object:
        # Whoever waited there in vain is no longer there.
        other = Call(lambda: barrier.wait(30))
        return {barrier.wait(30), other.outcome()} == {0, 1}

    def both() -> object:
        return session.run([counter.adding(1), counter.adding(1)])[1] == counter.value

    return {
        "enqueue": (lambda: full.enqueue(3, timeout=LIMIT), refilled),
        "dequeue": (lambda: some.dequeue(timeout=LIMIT), lambda: next_is(some, 9)),
        "dequeue_many": (
            lambda: empty.dequeue_many(2, timeout=LIMIT),
            lambda: empty.enqueue_many([4, 5]) is None and next_is(empty, 4, 5),
        ),
        "take": (
            lambda: gradients.take(1, on_leave="wait", timeout=LIMIT),
            lambda: gradients.stats()["taken"] == 0,
        ),
        "apply": (
            lambda: given.apply(np.ones(2), timeout=LIMIT),
            lambda: given.stats()["held"] == 1,
        ),
        "wait_for": (lambda: counter.wait_for(100, timeout=LIMIT), both),
        "run requests": (lambda: session.run([counter.adding(1)], timeout=LIMIT), both),
        "barrier": (lambda: barrier.wait(LIMIT), passed),
        # They were sent, and are done when the server goes on.
        "add": (lambda: steps.add(timeout=LIMIT), lambda: steps.value == 1),
        "abort": (lambda: unmet.abort(timeout=LIMIT), lambda: unmet.abort() is None),
        "add to a stream": (
            lambda: stream.add(["two"], timeout=LIMIT),
            lambda: stream.next(30).value == "two",
        ),
        "next": (lambda: reader.next(LIMIT), lambda: reader.next(30).value == "one"),
        "run": (
            lambda: session.run("double", np.ones(2), task="ps:1", timeout=LIMIT),
            lambda: session.run("double", np.ones(2), task="ps:1").tolist() == [2, 2],
        ),
        "find": (lambda: session.variable("named", timeout=LIMIT), lambda: named.version > 0),
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("of", [_variables, _spread, _others])
def test_calls_end_in_their_time_and_the_session_goes_on_with_the_server(
    away: Away, of: Callable[[Session], dict[str, Asking]]
) -> None:
    session = away.session()
    asking = of(session)
    away.stop()

    def timed(ask: Callable[[], object]) -> tuple[float, BaseException | None]:
        began = time.monotonic()
        try:
            ask()
        except BaseException as e:
            return time.monotonic() - began, e
        return 0.0, None

    calls = {name: Call(timed, ask) for name, (ask, _) in asking.items()}
    for name, call in calls.items():
        took, error = call.outcome()
        assert isinstance(error, Disconnected), (name, error)
        assert re.search(r"^ps:[01] at (unix|tcp):.*: no verdict", str(error)), (name, error)
        assert LIMIT <= took < LIMIT + SLACK + 1, (name, took)
    away.go_on()
    for name, (_, right) in asking.items():
        assert right(), name


@pytest.mark.timeout(120)
def test_what_is_sent_without_a_limit_holds_up_no_call_that_has_one(away: Away) -> None:
    session = away.session()
    made = table(session, "plain")
    rows = np.ones((MANY, WIDTH))
    away.stop()
    large = Call(lambda: made.scatter_add(np.arange(N).repeat(3), rows, timeout=None))
    began = time.monotonic()
    with pytest.raises(Disconnected, match=r"^ps:1 at (unix|tcp):.*: no verdict"):
        made.gather([0], timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK + 1
    away.go_on()
    version = large.outcome()
    assert made.gather([0, N - 1]).version == version
    assert (made.gather([0, N - 1]).tree == 3).all()


@pytest.mark.timeout(120)
def test_a_session_is_opened_in_its_time_or_not_at_all(away: Away) -> None:
    away.stop()
    began = time.monotonic()
    with pytest.raises(
        TimedOut,
        match=r"^open the session of worker:3, after .*: ps:1 at .* cannot be reached; ps:0 a",
    ):
        Session(away.spec, job="worker", index=3, secret=SECRET, timeout=LIMIT)
    assert LIMIT <= time.monotonic() - began < LIMIT + SLACK + 1
    away.go_on()
    assert away.session().resources()["variables"] == {}


@pytest.mark.timeout(120)
def test_a_call_without_a_timeout_ends_alone_and_the_session_goes_on(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "GRACE", 1.0)
    session = away.session()
    with session.device("ps:1"):
        counter = session.counter("counter")
    away.stop()
    for _ in range(2):
        with pytest.raises(
            Disconnected,
            match=r"^ps:1 at (unix|tcp):\S+: no verdict 1\.\d s after the request: the server has ",
        ):
            counter.add(timeout=None)
    away.go_on()
    # Both had been sent.
    assert counter.add() == 3


@pytest.mark.timeout(120)
def test_a_session_goes_on_after_ctrl_c_on_a_stopped_server(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CANCEL_LIMIT", 0.5)
    session = away.session()
    with session.device("ps:1"):
        queue = session.queue("queue", 2)
    queue.enqueue(1)
    away.stop()
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        queue.dequeue(timeout=None)
    ctrl_c.join()
    away.go_on()
    # What was given to a call that had ended came back.
    assert queue.dequeue(timeout=30) == 1
