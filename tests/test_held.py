"""Versions that somebody looks at, the memory they take, and the bound of it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from calls import DEADLINE_SECONDS, Call, until
from clusters import quiet, slow_beside
from wires import SECRET, Wire, serve

import paceline
from paceline.core import messages as m
from paceline.core.errors import OutOfMemory, SchemaError, TimedOut, WouldBlock
from paceline.core.versions import count_of
from paceline.server.local import LocalServer
from paceline.session import Session
from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier
from paceline.transports.tcp import TcpListener

LENGTH = 100_000
SIZE = LENGTH * 8


@pytest.fixture(params=["memory", "unix"])
def server(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """Where readers see the memory that the server counts."""
    carrier: Carrier = request.param
    with serving(carrier, where="thread") as made:
        yield made


def tree(value: float = 0.0) -> Any:
    return np.full(LENGTH, float(value))


def bounded(session: Session, slots: int) -> paceline.Variable[Any]:
    return session.variable("v", tree(), memory=slots * SIZE)


def holders(variable: paceline.Variable[Any]) -> dict[int, list[str]]:
    """Who holds which version, by its count."""
    return {count_of(one["version"]): one["held_by"] for one in variable.memory()["versions"]}


def waits(variable: paceline.Variable[Any], writes: int = 1) -> None:
    until(lambda: variable.memory()["waiting"] == writes)


# What is kept


def test_what_is_looked_at_is_kept_and_counted_with_its_holder(server: Serving) -> None:
    chief, reader = server.session(job="chief", index=0), server.session(job="worker", index=3)
    variable = chief.variable("v", tree())
    first = reader.variable("v").read()
    variable.assign(tree(1))
    variable.tag("gen-1")
    variable.assign(tree(2))
    found = variable.memory()
    assert (found["bytes"], found["bound"], found["waiting"]) == (3 * SIZE, None, 0)
    assert [one["bytes"] for one in found["versions"]] == [SIZE] * 3
    assert holders(variable) == {1: ["worker:3"], 2: ["tag gen-1"], 3: ["current"]}
    assert chief.resources()["memory"] == {"v": found}
    assert chief.resources()["variables"] == {"v": 3}
    variable.tag("gen-0", first.version)
    assert holders(variable)[1] == ["tag gen-0", "worker:3"]


def test_a_snapshot_knows_its_count(server: Serving) -> None:
    variable = server.session().variable("v", 0)
    variable.assign(1)
    snapshot = variable.read()
    assert (snapshot.count, repr(snapshot)) == (2, "<Snapshot of version 2>")


def test_reading_into_memory_of_ones_own_holds_nothing(server: Serving) -> None:
    variable, reading = server.session().variable("v", tree()), server.session().variable("v")
    target = np.zeros(LENGTH)
    for n in range(5):
        reading.read_into(target)
        variable.assign(tree(n))
        until(lambda: variable.memory()["bytes"] == SIZE)


def test_readers_on_another_host_look_at_memory_of_their_own() -> None:
    with serving("tcp", where="thread") as server:
        variable = bounded(server.session(), 2)
        held = []
        for n in range(1, 8):
            held.append(server.session().variable("v").read())
            variable.assign(tree(n), timeout=5)
        assert [snapshot.tree[0] for snapshot in held] == list(range(7))


def test_large_versions_that_nobody_looks_at_are_given_back_at_once(server: Serving) -> None:
    large = np.zeros(2 * LENGTH)
    variable = server.session().variable("v", large)
    readers = [server.session().variable("v") for _ in range(4)]
    held: dict[int, Any] = {}

    def seen(wanted: set[int]) -> bool:
        return holders(variable).keys() == wanted

    for n in range(1, 51):
        variable.assign(np.full(2 * LENGTH, float(n)))
        # Each of them looks at one version for four assigns, and says nothing when it stops.
        held[n % 4] = readers[n % 4].read()
        wanted = {snapshot.count for snapshot in held.values()} | {n + 1}
        until(partial(seen, wanted))
    held.clear()
    until(lambda: variable.memory()["bytes"] == large.nbytes)


def test_small_versions_are_given_back_with_the_next_message(server: Serving) -> None:
    variable = server.session().variable("v", tree())
    readers = [server.session().variable("v") for _ in range(4)]
    for n in range(50):
        variable.assign(tree(n))
        readers[n % 4].read()
        assert variable.memory()["bytes"] <= (2 * 4 + 1) * SIZE
    for reader in readers:
        reader.read()
        reader.tags()
    until(lambda: variable.memory()["bytes"] == SIZE)


# The bound


def test_a_write_waits_until_a_reader_lets_go_and_wakes_at_once(server: Serving) -> None:
    variable, reading = bounded(server.session(), 2), server.session().variable("v")
    writes: list[Callable[[], int]] = [
        lambda: variable.assign(tree(5)),
        lambda: variable.assign_add(tree(5)),
        lambda: server.session().variable("v", tree(5), overwrite=True).version,
    ]
    for write in writes:
        held = reading.read()
        before = variable.assign(tree())
        call = Call(write)
        waits(variable)
        assert variable.version == before
        # The reader says nothing more: that it let go is enough.
        del held
        assert call.outcome() == before + 1
        assert (variable.read().tree == 5).all()


def torch_view(array: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the tree": lambda array: array,
    "a slice": lambda array: array[10:20],
    "a torch tensor": torch_view,
    "a memoryview": lambda array: memoryview(array)[5:6],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_view_holds_as_its_snapshot_does(server: Serving, holder: str) -> None:
    variable, reading = bounded(server.session(), 2), server.session().variable("v")
    held = HOLDERS[holder](reading.read().tree)
    variable.assign(tree(1))
    with pytest.raises(TimedOut):
        variable.assign(tree(2), timeout=0.05)
    del held
    variable.assign(tree(2), timeout=5)


def test_a_write_waits_until_a_tag_is_taken_off(server: Serving) -> None:
    variable = bounded(server.session(), 2)
    variable.tag("gen-1")
    variable.assign(tree(1))
    call = Call(lambda: server.session().variable("v").assign(tree(2)))
    waits(variable)
    variable.untag("gen-1")
    assert count_of(call.outcome()) == 3


def test_writes_that_wait_are_done_in_the_order_they_came(server: Serving) -> None:
    variable, reading = bounded(server.session(), 2), server.session().variable("v")
    held = reading.read()
    variable.assign(tree())
    calls = []
    for n in range(4):
        mine = server.session().variable("v")
        calls.append(Call(lambda mine=mine, n=n: mine.assign(tree(n))))
        waits(variable, n + 1)
    del held
    assert [count_of(call.outcome()) for call in calls] == [3, 4, 5, 6]


def test_a_write_that_times_out_says_who_holds_what_and_has_changed_nothing(
    server: Serving,
) -> None:
    variable = bounded(server.session(job="chief", index=0), 3)
    held = server.session(job="worker", index=0).variable("v").read()
    variable.assign(tree(1))
    variable.tag("gen-1")
    variable.assign(tree(2))
    with pytest.raises(
        TimedOut,
        match=r"^assign 'v': no room in 'v' for another 800000 bytes: 2400000 of memory=2400000 are"
        r" held: version 1 \(800000 bytes\) by worker:0; version 2 \(800000 bytes\) by tag gen-1;"
        r" version 3 \(800000 bytes\) by current; whoever lets go or untags ends the wait; members:"
        r" chief:0, worker:0, after 0\.\d s \(server .+\)$",
    ):
        variable.assign(tree(9), timeout=0.05)
    with pytest.raises(TimedOut, match=r"^assign_add 'v': no room"):
        variable.assign_add(tree(9), timeout=0)
    assert (count_of(variable.version), variable.read().tree[0]) == (3, 2)
    assert variable.memory()["waiting"] == 0
    del held
    assert count_of(variable.assign(tree(3), timeout=5)) == 4


def test_a_writer_that_holds_all_that_stands_in_the_way_hears_so_at_once(server: Serving) -> None:
    variable = bounded(server.session(job="chief", index=0), 2)
    held = variable.read()
    variable.assign(tree(1))
    for write in (variable.assign, variable.assign_add):
        with pytest.raises(
            OutOfMemory,
            match=r"^no room in 'v' for another 800000 bytes: 1600000 of memory=1600000 are held:"
            r" version 1 \(800000 bytes\) by chief:0; version 2 \(800000 bytes\) by current; this"
            r" session itself holds \[1\]: let go of them first$",
        ):
            write(tree(2), timeout=None)
    del held
    assert count_of(variable.assign(tree(2), timeout=0)) == 3


def test_a_writer_that_holds_what_others_wait_for_hears_so_behind_them_too(
    server: Serving,
) -> None:
    one, two = server.session(), server.session()
    variable = bounded(one, 2)
    held = variable.read()
    variable.assign(tree(1))
    call = Call(lambda: two.variable("v").assign(tree(2)))
    waits(variable)
    with pytest.raises(OutOfMemory, match=r"this session itself holds \[1\]"):
        variable.assign(tree(3), timeout=None)
    del held
    call.outcome()


def test_what_is_only_remembered_holds_up_nobody(server: Serving) -> None:
    variable, reading = bounded(server.session(), 2), server.session().variable("v")
    for n in range(1, 30):
        assert reading.read().tree[0] == n - 1
        assert variable.read().tree[0] == n - 1
        variable.assign(tree(n), timeout=5)


def test_a_bounded_snapshot_that_is_alive_is_the_one_that_is_read(server: Serving) -> None:
    variable = bounded(server.session(), 3)
    first = variable.read()
    assert variable.read() is first
    server.session().variable("v").assign(tree(1))
    assert variable.read() is not first


def test_a_bound_is_part_of_the_definition(server: Serving) -> None:
    session = server.session()
    with pytest.raises(
        SchemaError,
        match=r"^variable 'v': memory=1599999 bytes, but its first version takes 800000, and the"
        r" current version and the next exist at once: give it memory=1600000 or more$",
    ):
        session.variable("v", tree(), memory=2 * SIZE - 1)
    assert session.resources()["variables"] == {}
    session.variable("v", tree(), memory=2 * SIZE)
    session.variable("v", tree(), memory=2 * SIZE)
    session.variable("v", tree(), overwrite=True)
    assert session.variable("v").memory()["bound"] == 2 * SIZE
    with pytest.raises(
        SchemaError, match=r"^variable 'v' exists with memory=1600000; asked for: 1600001$"
    ):
        session.variable("v", tree(), memory=2 * SIZE + 1)
    session.variable("w", 0)
    with pytest.raises(SchemaError, match=r"^variable 'w' exists with memory=None; asked for: 9$"):
        session.variable("w", 0, memory=9)
    without: Any = session.variable
    with pytest.raises(SchemaError, match=r"^variable 'v': memory=9 comes with a first value$"):
        without("v", memory=9)


@pytest.mark.parametrize("bound", [0, -1, 1.5, "1", True])
def test_a_bound_is_whole_and_positive(server: Serving, bound: Any) -> None:
    with pytest.raises(
        SchemaError, match=r"^variable 'v': memory is a whole number, 1 or more bytes, not "
    ):
        server.session().variable("v", tree(), memory=bound)


def test_in_one_thread_a_write_that_can_never_go_on_says_why() -> None:
    local = LocalServer(waits=False)
    chief, reader = (Session(channel=local.connect()) for _ in range(2))
    variable = bounded(chief, 2)
    held = reader.variable("v").read()
    variable.assign(tree(1))
    with pytest.raises(WouldBlock, match=r"^assign 'v': no room in 'v' .* by session:1; version 2"):
        variable.assign(tree(2))
    del held
    assert count_of(variable.assign(tree(2))) == 3
    local.close()


READER = """
import sys
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="worker")
held = session.variable("v").read()
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@contextmanager
def reading_process(server: Serving) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", READER, server.target, server.secret.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


LETS_GO = {
    "it lets go": ["del held"],
    "it lets go after its session": ["session.close()", "del held"],
    "it is killed": [],
}


@pytest.mark.parametrize("way", LETS_GO)
def test_what_another_process_held_is_free_when(way: str) -> None:
    with serving("unix", where="thread") as server:
        variable = bounded(server.session(), 2)
        with reading_process(server) as process:
            variable.assign(tree(1))
            call = Call(lambda: variable.assign(tree(2)))
            other = server.session().variable("v")
            waits(other)
            for line in LETS_GO[way]:
                assert holders(other) == {1: ["worker:0"], 2: ["current"]}
                told(process, line)
            if not LETS_GO[way]:
                os.kill(process.pid, signal.SIGKILL)
            assert count_of(call.outcome()) == 3


def test_a_session_over_tcp_that_is_lost_holds_nothing_that_never_reached_it() -> None:
    listener = TcpListener("127.0.0.1:0")
    with serve(listener, linger=0.3), Wire(listener.place) as wire, wire.session() as reader:
        with Session(f"tcp:{listener.place}", secret=SECRET) as writer:
            variable = bounded(writer, 2)
            # The reply is never taken.
            reader.connection.post(m.Read("v", m.NO_VERSION, 0.0))
            until(lambda: "session:0" in holders(variable)[1])
            variable.assign(tree(1))
            call = Call(lambda: variable.assign(tree(2)))
            wire.refuses = True
            wire.cut()
            assert count_of(call.outcome()) == 3


def test_a_writer_that_dies_while_it_waits_writes_nothing() -> None:
    with serving("unix", where="thread") as server:
        variable = bounded(server.session(), 2)
        with reading_process(server) as process:
            held = variable.read()
            variable.assign(tree(1))
            assert process.stdin is not None
            process.stdin.write("import numpy as np; v = session.variable('v'); del held;")
            process.stdin.write("v.assign(np.full(100_000, 7.0))\n")
            process.stdin.flush()
            waits(variable)
            call = Call(lambda: server.session().variable("v").assign(tree(2)))
            waits(variable, 2)
            process.kill()
            waits(variable)
        del held
        assert count_of(call.outcome()) == 3
        assert variable.read().tree[0] == 2


FORK = """
import os, sys
import numpy as np
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
variable = session.variable("v", np.zeros(200_000), memory=6_400_000)
held = variable.read()
variable.assign(np.ones(200_000))
pid = os.fork()
if pid == 0:
    del held
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
kept = variable.memory()["versions"]
assert [one["held_by"] for one in kept] == [["session:0"], ["current"]], kept
del held
for n in range(20):
    variable.assign(np.full(200_000, float(n)), timeout=10)
    assert variable.read().tree[0] == n
print("went on")
session.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_copy_that_lets_go_leaves_its_parents_session_alone() -> None:
    with serving("unix", where="thread") as server:
        command = [sys.executable, "-c", FORK, server.target, server.secret.hex()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        assert done.stdout == "went on\n", done.stderr


def test_threads_that_read_and_let_go_at_any_moment_never_lock_up_a_session() -> None:
    with serving("unix", where="thread") as server:
        session = server.session()
        variable = bounded(session, 3)
        writer = server.session().variable("v")
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                snapshot = variable.read()
                # In a circle: whoever collects it lets go, perhaps in the midst of sending.
                circle: list[Any] = [snapshot]
                circle.append(circle)
                assert snapshot.tree[0] == snapshot.tree[-1] == snapshot.count - 1
                del snapshot, circle
                gc.collect(0)
                session.variable("v")

        readers = [Call(read) for _ in range(3)]
        threshold = gc.get_threshold()
        gc.set_threshold(5)
        try:
            for n in range(1, 150):
                writer.assign(tree(n), timeout=DEADLINE_SECONDS)
        finally:
            gc.set_threshold(*threshold)
            stop.set()
        for reader in readers:
            reader.outcome()


# Whole runs


def looking_long(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    """Each item is made with one snapshot, read at its beginning, whatever is assigned."""
    while True:
        snapshot = policy.read()
        seen = snapshot.tree.sum()
        for _ in range(20):
            same = snapshot.tree.sum() == seen
        worker.log(same=float(same))
        yield {"value": float(snapshot.tree[0]), "same": bool(same), "count": snapshot.count}


@pytest.mark.parametrize("engine", ["serial", "threads", slow_beside])
def test_a_rollout_keeps_its_parameters_whatever_is_assigned(engine: str) -> None:
    bound = 4 * SIZE
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", tree(1), memory=bound)
        batches = cluster.collect(looking_long, policy, batch_size=2, max_lag=None)
        for n in range(2, 20):
            batch = batches.next(timeout=30)
            assert batch.data["same"].all()
            assert batch.data["value"].tolist() == batch.data["count"].tolist()
            policy.assign(tree(n), timeout=30)
            assert policy.memory()["bytes"] <= bound


def test_memory_is_flat_over_thousands_of_assigns_and_reads() -> None:
    with serving("unix", where="thread") as server:
        variable, reading = server.session().variable("v", tree()), server.session().variable("v")
        target = np.zeros(LENGTH)
        resident = 0
        for n in range(3000):
            variable.assign(tree(n))
            snapshot = reading.read()
            assert reading.read_into(target) == snapshot.version
            assert variable.memory()["bytes"] <= 3 * SIZE
            if n % 5 == 0:
                variable.tag(f"t{n}")
                variable.untag(f"t{n}")
            if n == 500:
                resident = resident_bytes()
        assert resident_bytes() < resident + 4 * SIZE


def resident_bytes() -> int:
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
