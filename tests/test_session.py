"""Sessions: what they share, who joins, and what they say when they cannot."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import Refused, SchemaError, TimedOut, UnknownName
from paceline.server.loop import Server
from paceline.session import Session
from paceline.testing import Serving, serving
from paceline.transports.unix import UnixListener

DEADLINE_SECONDS = 30.0


def test_sessions_share_by_name(server: Serving) -> None:
    one, two = server.session(), server.session()
    one.variable("v", np.arange(3)).assign(np.arange(3) + 1)
    one.queue("q", 4).enqueue("x")
    assert two.variable("v").read().tree.tolist() == [1, 2, 3]
    assert two.queue("q").dequeue() == "x"


def test_what_was_shared_outlives_the_session_that_made_it(server: Serving) -> None:
    with server.session() as first:
        first.variable("v", np.arange(100_000))
        first.queue("q", 4).enqueue(np.arange(100_000))
    later = server.session()
    assert later.variable("v").read().tree[-1] == 99_999
    assert later.queue("q").dequeue()[-1] == 99_999


def test_private_sessions_share_nothing() -> None:
    with Session() as one, Session() as two:
        one.variable("v", 1)
        one.queue("q", 1)
        assert two.resources()["variables"] == {}
        assert two.resources()["queues"] == {}


def test_resources_and_members_are_listed(server: Serving) -> None:
    session = server.session(job="chief", index=0)
    server.session(job="worker")
    server.session(job="worker")
    session.variable("v", 1.0).assign(2.0)
    session.queue("q", 4).enqueue("x")
    found = session.resources()
    assert found["variables"] == {"v": 2}
    assert found["queues"]["q"]["stored"] == 1
    assert found["members"] == ["chief:0", "worker:0", "worker:1"]


def test_a_second_chief_is_refused_while_the_first_lives(server: Serving) -> None:
    first = server.session(job="chief", index=0)
    with pytest.raises(
        Refused, match=rf"^task chief:0 is held by process {os.getpid()} and alive; process"
    ):
        server.session(job="chief", index=0)
    first.variable("v", 1)
    first.close()
    with server.session(job="chief", index=0) as second:
        assert second.variable("v").read().tree == 1


def test_a_task_is_free_again_after_its_process_was_killed() -> None:
    program = """
import sys
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="chief", index=0)
print(session.task, flush=True)
sys.stdin.read()
"""
    with serving("unix", where="thread") as server:
        with subprocess.Popen(
            [sys.executable, "-c", program, server.target, server.secret.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "chief:0\n"
            with pytest.raises(Refused, match=rf"^task chief:0 is held by process {child.pid} "):
                server.session(job="chief", index=0)
            child.kill()
        deadline = time.monotonic() + DEADLINE_SECONDS
        watcher = server.session()
        while "chief:0" in watcher.resources()["members"]:
            assert time.monotonic() < deadline
        assert server.session(job="chief", index=0).task == "chief:0"
        assert child.returncode == -signal.SIGKILL


def test_the_order_of_starting_does_not_matter() -> None:
    program = """
import sys
from paceline.session import Session
with Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2])) as session:
    print(session.variable("v", 5).read().tree)
"""
    place = f"unix:@paceline-late-{os.getpid()}"
    secret = "00ff"
    with subprocess.Popen(
        [sys.executable, "-c", program, place, secret], stdout=subprocess.PIPE, text=True
    ) as early:
        server = Server([UnixListener(place.partition(":")[2])], bytes.fromhex(secret))
        thread = threading.Thread(target=server.serve)
        thread.start()
        assert early.communicate(timeout=DEADLINE_SECONDS)[0] == "5\n"
        server.stop()
        thread.join()
        server.close()


def test_opening_a_session_where_nobody_listens_times_out() -> None:
    began = time.monotonic()
    with pytest.raises(
        TimedOut,
        match=r"^open a session on unix:@nobody, after 0\.\d s: no server at unix:@nobody"
        r" \(Connection refused\); starting the server there ends the wait$",
    ):
        Session("unix:@nobody", timeout=0.2)
    assert 0.15 < time.monotonic() - began < 2.0
    with pytest.raises(TimedOut):
        Session("unix:@nobody", timeout=0)


def test_a_target_of_no_transport_is_refused() -> None:
    with pytest.raises(UnknownName, match=r"^no transport for the address 'pigeon:coop'"):
        Session("pigeon:coop")


def test_a_target_too_long_is_refused_at_once() -> None:
    with pytest.raises(Refused, match=r"^the socket path is 200 bytes long, the kernel takes 107"):
        Session("unix:" + "x" * 200)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", True])
def test_odd_timeouts_are_refused_before_anything_is_done(timeout: float) -> None:
    with Session() as session:
        variable = session.variable("v", np.zeros(2))
        queue = session.queue("q", 1)
        for call in (
            lambda: session.variable("w", timeout=timeout),
            lambda: session.queue("r", timeout=timeout),
            lambda: variable.read(timeout=timeout),
            lambda: variable.read_into(np.zeros(2), timeout=timeout),
            lambda: queue.enqueue(1, timeout=timeout),
            lambda: queue.enqueue_many([], timeout=timeout),
            lambda: queue.dequeue(timeout=timeout),
            lambda: queue.dequeue_many(1, timeout=timeout),
            lambda: queue.dequeue_up_to(1, timeout=timeout),
            lambda: Session("unix:@nobody", timeout=timeout),
        ):
            with pytest.raises(ValueError, match=r"^timeout must be (>= 0 )?seconds or None, not "):
                call()
        assert queue.size == 0


@pytest.mark.parametrize("name", [5, None, b"x"])
def test_a_name_that_is_no_text_is_refused(server: Serving, name: str) -> None:
    session = server.session()
    for kind, call in (
        ("variable", lambda: session.variable(name, 1)),
        ("variable", lambda: session.variable(name)),
        ("queue", lambda: session.queue(name, 1)),
    ):
        with pytest.raises(SchemaError, match=f"^the name of a {kind} is a str, not "):
            call()
    assert session.resources()["variables"] == {}


@pytest.mark.parametrize("name", [5, b"x", ["a"], 1.5, "\ud800"])
def test_what_cannot_travel_is_refused_before_it_is_sent(server: Serving, name: Any) -> None:
    session = server.session()
    variable = session.variable("v", {"a": np.zeros((3, 2))})
    for call in (
        lambda: variable.gather([0], name),
        lambda: variable.scatter_add([0], np.ones((1, 2)), name),
    ):
        with pytest.raises(
            SchemaError, match=r"^(gather|scatter_add) 'v': the path of a leaf is a str"
        ):
            call()
    if name != "\ud800":
        with pytest.raises(SchemaError, match=r"^the reason of a stop is a str, not "):
            session.request_stop(name)
    with pytest.raises(SchemaError, match=r"^the job of a session is a str"):
        server.session(job=name)
    with pytest.raises(SchemaError, match=r"^the index of a session's task is a whole number"):
        server.session(job="worker", index="0")
    queue = session.queue("q", 2)
    queue.close(cancel_pending_enqueues=name)
    # The line is whole.
    assert variable.gather([0], np.str_("$.a")).tree.tolist() == [[0, 0]]


def test_a_reason_may_have_the_name_of_any_file(server: Serving) -> None:
    session = server.session()
    failed = server.session()
    with pytest.raises(FileNotFoundError), failed:
        raise FileNotFoundError("no file x\udcff")
    session.request_stop("no file x\udcff", failed=True)
    assert session.stopped() == ("no file x?", True)


def test_a_name_has_1_to_256_characters(server: Serving) -> None:
    session = server.session()
    for name in ("", "x" * 257):
        for call in (lambda n=name: session.variable(n, 1), lambda n=name: session.queue(n, 1)):
            with pytest.raises(SchemaError, match=r"^a name has 1 to 256 characters, not \d+: "):
                call()
    session.variable("x" * 256, 1)
    session.queue("x" * 256, 1)


def test_closing_twice_is_fine(server: Serving) -> None:
    session = server.session()
    session.close()
    session.close()
    assert "session:0" not in server.session(index=7).resources()["members"]


def test_a_session_says_who_and_where_it_is(server: Serving) -> None:
    session = server.session(job="worker", index=3)
    assert repr(session).startswith("<Session of worker:3 on ")


def test_starts_and_stops_leave_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        with serving("unix", where="thread") as server:
            server.session().variable("v", np.zeros(10_000)).read()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
