"""Operations: functions of a server's process, called by sessions of others."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from calls import DEADLINE_SECONDS, Call, until, waits
from hands import cluster, ended, served, start, toml
from spreads import Servers

import paceline
from paceline import (
    Closed,
    OperationFailed,
    SchemaError,
    Server,
    Session,
    TimedOut,
    UnknownName,
)

SECRET = b"a secret of sixteen bytes"

pytestmark = pytest.mark.timeout(120)


class Place:
    """A server and a session on it, which go with it even if somebody keeps this object."""

    def __init__(self, folder: Path, carrier: str) -> None:
        spec = cluster(folder, carrier, ps=1, worker=4)
        server = Server(spec, job_name="ps", secret=SECRET)
        self._opened: tuple[Server, Session] | None = (server, joined(server))

    def opened(self) -> tuple[Server, Session]:
        assert self._opened
        return self._opened

    def close(self) -> None:
        server, session = self.opened()
        self._opened = None
        session.close()
        server.close()


@pytest.fixture(params=["unix", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, request.param)
    yield made
    made.close()


def joined(server: Server, **options: Any) -> Session:
    return Session(server.target, secret=SECRET, **options)


def counters(session: Session, name: str) -> dict[str, int]:
    """Its counters, whose sum is right."""
    stats = session.resources()["operations"][name]
    parts = ("done", "failed", "dropped", "waiting", "running")
    assert stats["calls"] == sum(stats[part] for part in parts)
    return {part: stats[part] for part in parts if stats[part]}


def waiting(session: Session, name: str, n: int) -> Callable[[], bool]:
    """Whether so many calls wait to begin."""
    return lambda: counters(session, name).get("waiting") == n


class Gate:
    """An operation that begins, and goes on when it is let."""

    def __init__(self, server: Server, name: str = "gate", **options: Any) -> None:
        self.begun: list[Any] = []
        self.open = threading.Event()
        server.operation(name, **options)(self.pass_through)

    def pass_through(self, tree: Any) -> Any:
        self.begun.append(tree)
        assert self.open.wait(DEADLINE_SECONDS)
        return tree


# What goes there and back


def test_an_operation_runs_in_the_servers_process_with_arrays_of_its_own(place: Place) -> None:
    server, session = place.opened()

    @server.operation("add_one")
    def add_one(tree: Any) -> Any:
        tree["x"] += 1
        return {"x": tree["x"], "on": threading.current_thread().name, "n": tree["n"] * 2}

    mine = np.zeros(100_000)
    found = session.run("add_one", {"x": mine, "n": 3})
    assert (found["n"], found["on"]) == (6, "paceline-operation-all")
    assert (found["x"] == 1).all()
    assert (mine == 0).all()
    found["x"] += 1
    assert add_one({"x": np.zeros(1), "n": 0})["n"] == 0
    assert counters(session, "add_one") == {"done": 1}


class Pair(NamedTuple):
    a: Any
    b: Any


def test_torch_goes_through_and_named_tuples_come_back_like_they_went(place: Place) -> None:
    server, session = place.opened()
    net = torch.nn.Linear(2, 1)

    @server.operation("forward")
    def forward(tree: Any) -> Any:
        return Pair(net(torch.from_numpy(tree)), net)

    x = np.ones((3, 2), np.float32)
    out, weights = session.run("forward", x)
    assert (out == net(torch.from_numpy(x)).detach().numpy()).all()
    assert set(weights) == {"weight", "bias"}
    like = Pair(np.zeros((3, 1), np.float32), {k: np.zeros_like(v) for k, v in weights.items()})
    assert isinstance(session.run("forward", x, like=like), Pair)


def test_a_function_may_have_no_argument_and_a_session_that_is_made_once(place: Place) -> None:
    server, session = place.opened()
    sessions = []

    @server.operation("count")
    def count(session: Session) -> int:
        sessions.append(session)
        return session.counter("n").add()

    assert [session.run("count") for _ in range(2)] == [1, 2]
    assert sessions[0] is sessions[1]
    assert sessions[0].task == "ps.operations:0"
    assert session.counter("n").value == 2
    with pytest.raises(SchemaError, match=r"^run 'count': it takes no argument$"):
        session.run("count", 1)
    assert counters(session, "count") == {"done": 2, "failed": 1}


def test_an_operation_uses_variables_and_queues_of_its_own_server(place: Place) -> None:
    server, session = place.opened()

    @server.operation("train")
    def train(tree: Any, *, session: Session) -> float:
        weights, data = session.variable("w"), session.queue("data")
        total = float(data.dequeue(timeout=DEADLINE_SECONDS).sum())
        weights.assign_add(np.full(2, total))
        return total

    weights, data = session.variable("w", np.zeros(2)), session.queue("data", 4)
    running = Call(session.run, "train")
    until(lambda: waits(session, "items") == 1)
    data.enqueue(np.ones(3))
    assert running.outcome() == 3.0
    assert weights.read().tree.tolist() == [3.0, 3.0]


# Order, threads, time


def test_operations_run_in_the_order_of_arrival_and_hold_nobody_up(
    place: Place,
) -> None:
    server, session = place.opened()
    gate = Gate(server)
    order: list[int] = []
    server.operation("note")(order.append)
    running = Call(session.run, "gate", 0)
    until(lambda: gate.begun)
    others = []
    with joined(server) as one, joined(server) as two:
        for number in range(6):
            others.append(Call((one, two)[number % 2].run, "note", number))
            until(waiting(session, "note", number + 1))
        assert session.variable("v", 1.0).read(timeout=1).tree == 1.0
        assert order == []
        gate.open.set()
        assert running.outcome() == 0
        assert [each.outcome() for each in others] == [None] * 6
    assert order == list(range(6))


def test_an_operation_with_threads_of_its_own_runs_as_often_at_a_time(place: Place) -> None:
    server, session = place.opened()
    gate, meet = Gate(server), threading.Barrier(2, timeout=DEADLINE_SECONDS)
    server.operation("meet", threads=2)(lambda tree: meet.wait() * 0 + tree)
    blocked = Call(session.run, "gate", 0)
    until(lambda: gate.begun)
    two = [Call(session.run, "meet", number) for number in range(2)]
    assert [each.outcome() for each in two] == [0, 1]
    gate.open.set()
    blocked.outcome()


def test_a_call_that_has_not_begun_in_time_never_does_and_one_that_has_goes_on(
    place: Place,
) -> None:
    server, session = place.opened()
    gate = Gate(server)
    with pytest.raises(
        TimedOut,
        match=r"^run 'gate': asked for 0\.\d s ago, it has begun and goes on; its result is dropped"
        r"; members: .*, after 0\.\d s",
    ):
        session.run("gate", "first", timeout=0.2)
    with pytest.raises(
        TimedOut, match=r"^run 'gate': it has not begun: 0 calls are before it, 1 run; members"
    ):
        session.run("gate", "second", timeout=0.05)
    assert counters(session, "gate") == {"running": 1, "dropped": 1}
    gate.open.set()
    assert session.run("gate", "third") == "third"
    assert gate.begun == ["first", "third"]
    assert counters(session, "gate") == {"done": 1, "dropped": 2}


def test_calls_of_a_session_that_ends_are_given_up(place: Place) -> None:
    server, session = place.opened()
    gate = Gate(server)
    gone = joined(server)
    calls = [Call(gone.run, "gate", "first")]
    until(lambda: gate.begun)
    calls.append(Call(gone.run, "gate", "second"))
    until(lambda: counters(session, "gate").get("waiting"))
    gone.close()
    for each in calls:
        with pytest.raises(Closed):
            each.outcome()
    until(lambda: counters(session, "gate") == {"running": 1, "dropped": 1})
    gate.open.set()
    until(lambda: counters(session, "gate") == {"dropped": 2})
    assert gate.begun == ["first"]


CALLER = """
import sys
import paceline
target, secret = sys.argv[1], bytes.fromhex(sys.argv[2])
with paceline.Session(target, secret=secret, job="worker", index=0) as session:
    session.run("gate", "from a process", timeout=None)
"""


def test_a_killed_callers_result_is_dropped_and_the_next_is_served(place: Place) -> None:
    server, session = place.opened()
    gate = Gate(server)
    with Popen([sys.executable, "-c", CALLER, server.target, SECRET.hex()]) as child:
        until(lambda: gate.begun)
        child.kill()
    gate.open.set()
    assert session.run("gate", 2) == 2
    until(lambda: counters(session, "gate") in ({"dropped": 1, "done": 1}, {"done": 2}))


def test_when_a_server_ends_those_who_wait_hear_of_it_and_operations_end_too(place: Place) -> None:
    server, _ = place.opened()
    session, heard = joined(server), []

    @server.operation("wait")
    def wait(session: Session) -> None:
        try:
            session.queue("never", 1).dequeue(timeout=None)
        except paceline.PacelineError as e:
            heard.append(e)
            raise

    running = Call(session.run, "wait")
    until(lambda: waits(session, "items") == 1)
    server.close()
    with pytest.raises((paceline.Disconnected, Closed, OperationFailed)):
        running.outcome()
    until(lambda: heard)
    assert isinstance(heard[0], Closed)
    session.close()
    with pytest.raises(Closed, match=r"^the server has ended$"):
        server.operation("late")(print)


def test_an_operation_may_end_its_own_server(tmp_path: Path) -> None:
    spec = cluster(tmp_path, ps=1, worker=1)
    with Server(spec, job_name="ps", secret=SECRET) as server, joined(server) as session:
        ended = threading.Event()

        @server.operation("end")
        def end() -> None:
            server.close()
            ended.set()

        with pytest.raises((paceline.Disconnected, Closed)):
            session.run("end")
        assert ended.wait(DEADLINE_SECONDS)


# What goes wrong


def test_an_operation_that_does_not_exist_lists_those_that_do(place: Place) -> None:
    server, session = place.opened()
    server.operation("act")(lambda tree: tree)
    with pytest.raises(UnknownName, match=r"^no operation 'acct': (tcp|unix):\S+ has \['act'\]$"):
        session.run("acct", timeout=0.1)
    with pytest.raises(UnknownName, match=r"^ps:1 runs no server; \S+ is ps:0$"):
        session.run("act", task="ps:1")
    assert session.run("act", 1, task="/job:ps/task:0") == 1


def test_an_operation_that_its_server_registers_a_moment_later_is_waited_for(place: Place) -> None:
    server, session = place.opened()
    early = Call(session.run, "late", 4)
    until(lambda: waits(session, "operation") == 1)
    server.operation("late")(lambda tree: tree + 1)
    assert early.outcome() == 5


def test_what_an_operation_raises_comes_back_with_its_own_traceback(place: Place) -> None:
    server, session = place.opened()

    @server.operation("bad")
    def bad(tree: Any) -> None:
        raise ValueError("no good \udc80")

    @server.operation("exits")
    def exits(tree: Any) -> None:
        sys.exit(3)

    with pytest.raises(OperationFailed) as caught:
        session.run("bad")
    text = str(caught.value)
    assert text.startswith("operation 'bad' of ps:0 raised:\nTraceback (most recent call last):\n")
    assert text.endswith("ValueError: no good ?")
    assert "in bad\n" in text
    assert "operations.py" not in text.replace("test_operations.py", "")
    with pytest.raises(OperationFailed, match=r"SystemExit: 3$"):
        session.run("exits")
    assert counters(session, "bad") == {"failed": 1}


RAISED = [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, SystemExit]


@pytest.mark.parametrize("error", RAISED)
def test_whatever_an_operation_raises_is_its_callers_and_the_next_one_runs(
    place: Place, error: type[BaseException]
) -> None:
    server, session = place.opened()

    class Odd(Pair):
        def __iter__(self) -> Any:
            raise error("x")

    @server.operation("bad")
    def bad(tree: Any) -> Any:
        if tree == "odd":
            return Odd(1, 2)
        raise error("x")

    server.operation("good")(lambda tree: tree)
    for tree in ("plain", "odd"):
        with pytest.raises(
            OperationFailed,
            match=rf"(?s)^operation 'bad' of ps:0 raised:\nTraceback.*{error.__name__}: x$",
        ):
            session.run("bad", tree, timeout=DEADLINE_SECONDS)
        assert session.run("good", 1, timeout=DEADLINE_SECONDS) == 1
    assert counters(session, "bad") == {"failed": 2}


def test_what_cannot_travel_is_named_by_its_path(place: Place) -> None:
    server, session = place.opened()
    server.operation("odd")(lambda tree: {"a": [1, object()]})
    with pytest.raises(SchemaError, match=r"^operation 'odd' returned: leaf \$\.a\[1\] is an obje"):
        session.run("odd")
    with pytest.raises(SchemaError, match=r"^run 'odd': leaf \$ is a set; allowed are"):
        session.run("odd", {1})


def test_registered_twice_or_with_odd_options_is_an_error(place: Place) -> None:
    server, _ = place.opened()
    server.operation("act")(print)
    with pytest.raises(SchemaError, match=r"^operation 'act' is registered already$"):
        server.operation("act", threads=2)(print)
    with pytest.raises(SchemaError, match=r"^operation 'a': threads is a whole number, 1 or more"):
        server.operation("a", threads=0)
    with pytest.raises(SchemaError, match=r"^operation 'a': wait=1\.0 comes with batch=$"):
        server.operation("a", wait=1.0)
    with pytest.raises(SchemaError, match=r"^a name has 1 to 256 characters, not 0"):
        server.operation("")(print)
    with pytest.raises(SchemaError, match=r"^operation 'five' is a function, not 5$"):
        server.operation("five")(5)  # type: ignore[type-var]


def test_an_operation_that_needs_its_own_thread_fails_instead_of_waiting(place: Place) -> None:
    server, session = place.opened()

    @server.operation("factorial")
    def factorial(n: int, session: Session) -> int:
        return 1 if n == 0 else n * int(session.run("factorial", n - 1))

    @server.operation("deep", threads=4)
    def deep(n: int, session: Session) -> int:
        return 1 if n == 0 else n * int(session.run("deep", n - 1))

    with pytest.raises(OperationFailed, match=r"WouldBlock: run 'factorial': the operation that a"):
        session.run("factorial", 3)
    assert session.run("factorial", 0) == 1
    assert session.run("deep", 3) == 6
    with pytest.raises(OperationFailed, match=r"register it with threads=5 or more"):
        session.run("deep", 4)


# Several servers


def test_each_server_has_operations_and_a_circle_of_them_is_seen(tmp_path: Path) -> None:
    spec = cluster(tmp_path, ps=2, worker=1)
    with served(spec, secret=SECRET) as servers, Session(spec, secret=SECRET) as session:
        for number, server in enumerate(servers):
            server.operation("who")(lambda tree, number=number: number)
            server.operation(f"only_{number}")(lambda tree, number=number: number)

            @server.operation("around")
            def around(task: str, session: Session, number: int = number) -> Any:
                return session.run("around", f"ps:{number}", task=task)

        assert session.run("who") == 0
        assert [session.run("who", task=f"ps:{n}") for n in (0, 1)] == [0, 1]
        assert [session.run(f"only_{n}") for n in (1, 0)] == [1, 0]
        with pytest.raises(UnknownName, match=r"^ps:2 runs no server; there are \['ps:0', 'ps:1'"):
            session.run("who", task="ps:2")
        with pytest.raises(OperationFailed, match=r"WouldBlock: run 'around': the operation that"):
            session.run("around", "ps:1", task="ps:0")
        assert {"who on ps:0", "who on ps:1"} <= session.resources()["operations"].keys()


SERVE = """
import paceline
spec = paceline.ClusterSpec.from_file("cluster.toml")
with paceline.Server(spec, job_name="ps") as server:
    @server.operation("pid")
    def pid():
        import os
        return os.getpid()
    server.join()
"""


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_operations_are_found_again_on_a_server_that_was_started_again(
    tmp_path: Path, carrier: str
) -> None:
    servers = Servers(tmp_path, carrier, 2)

    def register(index: int) -> None:
        servers.running[index].operation(f"own {index}")(lambda x: x + index)

    try:
        session = servers.session()
        for index in (0, 1):
            register(index)
            assert session.run(f"own {index}", 1) == session.run(
                f"own {index}", 1, task=f"ps:{index}"
            )
        for index in (1, 0):
            servers.end(index)
            until(lambda: not session._lines.alive())
            # The other is asked as ever, and so is a name that nobody has had yet.
            assert session.run(f"own {1 - index}", 1) == 2 - index
            with pytest.raises(UnknownName, match=rf"; ps:{index} at \S+ cannot be reached$"):
                session.run("none", timeout=0.1)
            with pytest.raises(TimedOut, match=r"starting the server there ends the wait"):
                session.run(f"own {index}", 1, timeout=0.1)
            servers.start(index)
            register(index)
            assert session.run(f"own {index}", 1) == 1 + index
            assert session.run(f"own {index}", 2, task=f"ps:{index}") == 2 + index
    finally:
        servers.close()


def test_an_operation_of_another_process_is_run_there(tmp_path: Path) -> None:
    spec = cluster(tmp_path, ps=1, chief=1)
    toml(spec, tmp_path / "cluster.toml")
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o600)
    environment = {"PACELINE_SECRET_FILE": str(tmp_path / "secret")}
    program = start("serve.py", folder=tmp_path, **environment)
    try:
        with Session(spec, secret=SECRET, job="chief", index=0) as session:
            assert session.run("pid") == program.pid
        ended(program)
    finally:
        program.kill()
        program.communicate()


# Batches


def test_calls_that_wait_are_made_in_one_and_each_gets_its_row(place: Place) -> None:
    server, session = place.opened()
    gate = Gate(server)
    sizes: list[Any] = []

    @server.operation("act", batch=4, wait=60.0)
    def act(tree: Any) -> Any:
        sizes.append(tree["x"].shape)
        assert tree["who"] == [f"{n}" for n in tree["n"]]
        return {"y": torch.from_numpy(tree["x"].sum(axis=1)), "z": tree["n"] * 2, "v": "all"}

    blocked = Call(session.run, "gate")
    until(lambda: gate.begun)
    calls = []
    with joined(server) as one, joined(server) as two:
        for n in range(6):
            tree = {"x": np.full(3, float(n)), "n": n, "who": f"{n}"}
            calls.append(Call((one, two)[n % 2].run, "act", tree))
            until(waiting(session, "act", n + 1))
        gate.open.set()
        found = [each.outcome() for each in calls]
        assert [each["y"] for each in found] == [3.0 * n for n in range(6)]
        assert [(each["z"], each["v"]) for each in found] == [(2 * n, "all") for n in range(6)]
        blocked.outcome()
    assert sizes == [(4, 3), (2, 3)]


def test_calls_of_another_structure_go_into_another_batch(place: Place) -> None:
    server, session = place.opened()
    gate = Gate(server)
    shapes: list[Any] = []

    @server.operation("act", batch=3, wait=0.5)
    def act(x: Any) -> Any:
        shapes.append(x.shape)
        return x

    blocked = Call(session.run, "gate")
    until(lambda: gate.begun)
    with joined(server) as one, joined(server) as two:
        calls = [Call(one.run, "act", np.zeros(2)), Call(two.run, "act", np.zeros(3))]
        until(waiting(session, "act", 2))
        gate.open.set()
        assert [len(each.outcome()) for each in calls] == [2, 3]
    blocked.outcome()
    assert sorted(shapes) == [(1, 2), (1, 3)]


def test_an_error_is_every_callers_and_so_is_a_missing_row(place: Place) -> None:
    server, session = place.opened()
    gate = Gate(server)

    @server.operation("act", batch=2, wait=60.0)
    def act(x: Any) -> Any:
        if (x < 0).any():
            raise ValueError("below zero")
        return {"y": x[:1]}

    with joined(server) as one, joined(server) as two:
        for numbers, error, message in (
            ((1.0, -1.0), OperationFailed, r"ValueError: below zero$"),
            (
                (1.0, 2.0),
                SchemaError,
                r"^operation 'act' returned: leaf \$\.y is float64\[1\], w",
            ),
        ):
            gate.open.clear()
            blocked = Call(session.run, "gate", 0)
            until(lambda: counters(session, "gate").get("running"))
            calls = [Call(each.run, "act", n) for n, each in zip(numbers, (one, two), strict=True)]
            until(lambda: counters(session, "act").get("waiting") == 2)
            gate.open.set()
            for each in calls:
                with pytest.raises(error, match=message):
                    each.outcome()
            blocked.outcome()


def test_a_batch_waits_no_longer_than_told_for_those_who_could_call(place: Place) -> None:
    server, session = place.opened()
    server.operation("act", batch=8, wait=0.05)(lambda x: x)
    with joined(server) as other:
        assert other.run("act", 1) == 1
        # The other lives, and may call.
        assert session.run("act", 2, timeout=DEADLINE_SECONDS) == 2


# Within one process


def test_a_private_session_has_operations_of_its_own() -> None:
    with Session() as session:

        @session.operation("twice")
        def twice(x: Any, session: Session) -> Any:
            session.counter("calls").add()
            return x * 2

        assert session.run("twice", np.arange(3)).tolist() == [0, 2, 4]
        assert session.counter("calls").value == 1
        assert counters(session, "twice") == {"done": 1}
        with pytest.raises(UnknownName, match=r"^no operation 'thrice': this process has \['twi"):
            session.run("thrice")

        @session.operation("own", batch=2)
        def own(x: Any, session: Session) -> Any:
            return session.run("own", x)

        with pytest.raises(OperationFailed, match=r"WouldBlock: run 'own': the operation that"):
            session.run("own", 1)
        with pytest.raises(UnknownName, match=r"^ps:0 runs no server; this process is no task$"):
            session.run("twice", 1, task="ps:0")


def test_threads_of_a_private_session_are_answered_while_an_operation_runs() -> None:
    with Session() as session:
        begun, go_on = threading.Event(), threading.Event()

        @session.operation("gate")
        def gate() -> None:
            begun.set()
            assert go_on.wait(DEADLINE_SECONDS)

        running = Call(session.run, "gate")
        assert begun.wait(DEADLINE_SECONDS)
        assert session.counter("n").add() == 1
        second = Call(session.run, "gate")
        until(lambda: counters(session, "gate") == {"running": 1, "waiting": 1})
        go_on.set()
        running.outcome()
        second.outcome()


def test_what_ctrl_c_ends_is_no_call_that_goes_on() -> None:
    with Session() as session:

        @session.operation("interrupted")
        def interrupted() -> None:
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            session.run("interrupted")
        assert counters(session, "interrupted") == {"failed": 1}


def test_ctrl_c_of_one_caller_leaves_the_call_behind_it() -> None:
    with Session() as session:
        second: list[Call] = []
        session.operation("note")(lambda tree: tree)

        @session.operation("interrupted")
        def interrupted() -> None:
            second.append(Call(session.run, "note", 2))
            until(waiting(session, "note", 1))
            signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            session.run("interrupted")
        assert second[0].outcome() == 2


@pytest.mark.parametrize("error", RAISED)
def test_what_an_operation_of_a_private_session_raises_is_no_end_of_its_caller(
    error: type[BaseException],
) -> None:
    with Session() as session:

        @session.operation("bad")
        def bad() -> None:
            raise error("x")

        with pytest.raises(OperationFailed, match=rf"{error.__name__}: x$"):
            session.run("bad")
        assert counters(session, "bad") == {"failed": 1}


def test_a_session_on_a_cluster_registers_nothing(place: Place) -> None:
    _, session = place.opened()
    with pytest.raises(SchemaError, match=r"^operation 'act': a session that is not private has n"):
        session.operation("act")
