"""Variables: whole trees, whole versions, and memory that is held as long as somebody looks."""

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import numpy as np
import pytest
import torch
from calls import DEADLINE_SECONDS, Call

from paceline.core.errors import SchemaError, TimedOut
from paceline.core.versions import count_of
from paceline.session import Session
from paceline.testing import Serving, serving
from paceline.variables import Snapshot, Variable

MEGABYTE = 1 << 20


class Point(NamedTuple):
    x: Any
    y: Any


# Initialising


def test_whoever_first_gives_a_value_initialises(server: Serving) -> None:
    worker, chief = server.session(), server.session()
    assert worker.variable("v", {"w": np.zeros(3)}).read().tree["w"].tolist() == [0, 0, 0]
    later = chief.variable("v", {"w": np.ones(3)})
    assert later.read().tree["w"].tolist() == [0, 0, 0]
    assert count_of(later.version) == 1


def test_overwrite_takes_the_later_value(server: Serving) -> None:
    session = server.session()
    session.variable("v", 1)
    assert session.variable("v", 2, overwrite=True).read().tree == 2
    assert count_of(session.variable("v").version) == 2


def test_a_later_value_of_another_structure_is_refused(server: Serving) -> None:
    session = server.session()
    session.variable("v", {"w": [np.zeros((2, 3), np.float32)], "n": 1})
    odd: list[tuple[object, str]] = [
        (
            {"w": [np.zeros((2, 4), np.float32)], "n": 1},
            r"leaf \$\.w\[0\] is float32\[2,4\], declared float32\[2,3\]",
        ),
        (
            {"w": [np.zeros((2, 3))], "n": 1},
            r"leaf \$\.w\[0\] is float64\[2,3\], declared float32\[2,3\]",
        ),
        ({"w": [np.zeros((2, 3), np.float32)]}, r"leaf \$\.n is missing, declared int"),
        (
            {"w": [np.zeros((2, 3), np.float32)], "n": 1, "m": 2},
            r"leaf \$\.m is int, not declared at all",
        ),
        ({"w": [np.zeros((2, 3), np.float32)], "n": 1.0}, r"leaf \$\.n is float, declared int"),
    ]
    variable = session.variable("v")
    before = variable.version
    for tree, text in odd:
        for what, call in (
            ("variable", lambda tree=tree: session.variable("v", tree)),
            ("variable", lambda tree=tree: session.variable("v", tree, overwrite=True)),
            ("assign", lambda tree=tree: variable.assign(tree)),
            ("assign_add", lambda tree=tree: variable.assign_add(tree)),
        ):
            with pytest.raises(SchemaError, match=rf"^{what} 'v': {text}$"):
                call()
    assert variable.version == before


@pytest.mark.parametrize("leaf", [object(), np.array([None]), {1, 2}, lambda: 0])
def test_what_may_not_travel_is_refused_with_its_path(server: Serving, leaf: object) -> None:
    session = server.session()
    with pytest.raises(SchemaError, match=r"^variable 'v': leaf \$\.a\[1\] is an? .*; allowed are"):
        session.variable("v", {"a": [0, leaf]})
    assert session.resources()["variables"] == {}


def test_a_variable_without_a_value_is_waited_for_and_wakes_at_once(server: Serving) -> None:
    waiting, making = server.session(), server.session()

    def wait() -> float:
        waiting.variable("v", timeout=DEADLINE_SECONDS)
        return time.monotonic()

    call = Call(wait)
    with pytest.raises(TimedOut):
        making.variable("another", timeout=0.05)
    began = time.monotonic()
    making.variable("v", 1)
    assert call.outcome() - began < 0.1


def test_a_wait_that_times_out_says_for_what_and_who_could_end_it(server: Serving) -> None:
    session = server.session()
    session.variable("w", 1)
    with pytest.raises(
        TimedOut,
        match=r"^no variable 'v' is initialised; there are \['w'\]; whoever calls"
        r" variable\('v', value\) ends the wait; members: session:0, after 0\.\d s \(server .+\)$",
    ):
        session.variable("v", timeout=0.05)
    with pytest.raises(TimedOut):
        session.variable("v", timeout=0)
    assert session.resources()["variables"] == {"w": 1}


# Versions


def test_versions_only_grow_and_belong_to_the_tree(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(3))
    seen = [variable.version]
    for n in range(1, 5):
        seen.append(variable.assign(np.full(3, float(n))))
        snapshot = variable.read()
        assert snapshot.version == seen[-1] == variable.version
        assert snapshot.tree.tolist() == [n] * 3
    assert seen == sorted(set(seen))


def test_a_waiting_read_wakes_on_assign(server: Serving) -> None:
    reading = server.session().variable("v", np.zeros(3))
    writing = server.session().variable("v")
    version = reading.version
    call = Call(lambda: reading.read(newer_than=version, timeout=DEADLINE_SECONDS))
    new = writing.assign(np.ones(3))
    snapshot = call.outcome()
    assert snapshot.version == new
    assert snapshot.tree.tolist() == [1, 1, 1]


def test_a_read_of_a_newer_version_times_out_and_changes_nothing(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(3))
    with pytest.raises(
        TimedOut, match=r"^read 'v' newer than version 1: it is 1; the next assign ends the wait; "
    ):
        variable.read(newer_than=variable.version, timeout=0.05)
    with pytest.raises(TimedOut):
        variable.read(newer_than=np.int64(variable.version), timeout=0)  # type: ignore[arg-type]
    assert count_of(variable.read(newer_than=variable.version - 1, timeout=0).version) == 1


def test_a_read_of_what_is_unchanged_is_the_same_snapshot(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(3))
    first = variable.read()
    assert variable.read() is first
    server.session().variable("v").assign(np.ones(3))
    assert variable.read() is not first
    assert first.tree.tolist() == [0, 0, 0]


def test_nan_is_a_value_like_any_other(server: Serving) -> None:
    first: Any = {"x": np.full(2, np.nan), "y": float("nan")}
    variable = server.session().variable("v", first)
    variable.assign({"x": np.full(2, np.nan), "y": float("inf")})
    assert np.isnan(variable.read().tree["x"]).all()


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        [],
        {"a": {"b": [(1, 2.5), "text", b"bytes", None, True]}},
        np.zeros((0, 3)),
        np.array(5.0),
        np.zeros((2, 0, 2), np.int8),
        {"e": np.zeros(0), "f": np.arange(3, dtype=np.uint16), "s": np.array(["ab", "c"])},
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12)[::3],
        {1: np.ones(2), "two": np.complex64(1j)},
    ],
)
def test_every_tree_comes_back_equal(server: Serving, tree: object) -> None:
    found = server.session().variable("v", tree).read().tree
    np.testing.assert_equal(found, tree)


def test_containers_come_back_as_declared(server: Serving) -> None:
    point = Point(np.zeros(2), 1.0)
    variable = server.session().variable("v", {"p": point})
    assert type(variable.read().tree["p"]) is tuple
    declared = variable.read(like={"p": point}).tree["p"]
    assert isinstance(declared, Point)
    assert declared.y == 1.0
    with pytest.raises(SchemaError, match=r"^read 'v': \$ is a dict of \['p'\], wanted a dict of"):
        variable.read(like={"q": point})


def test_a_variable_knows_the_type_of_its_tree() -> None:
    with Session() as session:
        variable = session.variable("v", 1.5)
        assert_type(variable, Variable[float])
        assert_type(variable.read(), Snapshot[float])
        assert_type(variable.read().tree, float)
        assert variable.read().tree == 1.5


# Memory


def test_a_snapshot_is_read_only_and_never_aliases_the_publisher(server: Serving) -> None:
    for size in (10, 10_000, MEGABYTE):
        source = np.zeros(size)
        variable = server.session().variable(f"v{size}", {"a": source, "b": source})
        tree = variable.read().tree
        source[:] = 1
        for leaf in tree.values():
            assert not leaf.flags.writeable
            assert not np.shares_memory(leaf, source)
            assert leaf[0] == 0
            with pytest.raises(ValueError, match="read-only"):
                leaf[0] = 5
        variable.assign({"a": source, "b": source})
        source[:] = 2
        assert variable.read().tree["a"][-1] == 1


def test_leaves_of_shared_memory_are_aligned(server: Serving) -> None:
    tree = server.session().variable("v", {n: np.zeros(10_001 + n, "i1") for n in range(5)}).read()
    assert [leaf.ctypes.data % 64 for leaf in tree.tree.values()] == [0] * 5


def torch_view(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[10:20],
    "a reshaped slice": lambda array: array[10:20].reshape(2, 5).T,
    "a memoryview": lambda array: memoryview(array),
    "np.frombuffer": lambda array: np.frombuffer(memoryview(array), np.float64),
    "another dtype": lambda array: array.view(np.uint8)[80:160].view(np.float64),
    "a torch tensor": torch_view,
    "a slice of a torch tensor": lambda array: torch_view(array)[10:20].view(2, 5),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_stays_as_it_is_while_anything_looks_at_it(server: Serving, holder: str) -> None:
    for size in (10_000, MEGABYTE // 4):
        writer = server.session().variable(f"v{size}", np.zeros(size))
        reader = server.session().variable(f"v{size}")
        for variable in (writer, reader):
            value = float(count_of(writer.version))
            writer.assign(np.full(size, value))
            held = HOLDERS[holder](variable.read().tree)
            for _ in range(12):
                writer.assign(np.full(size, -1.0))
                reader.read()
            assert (np.asarray(held) == value).all()


def test_holding_many_versions_keeps_them_apart(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", np.zeros(100_000))
    held = []
    for n in range(30):
        variable.assign(np.full(100_000, float(n)))
        held.append(variable.read())
    for n, snapshot in enumerate(held):
        assert (snapshot.tree == n).all()


def test_many_assigns_use_few_descriptors_and_little_memory() -> None:
    with serving("unix", where="thread") as server:
        writer, reader = server.session(), server.session()
        for name, size in (("small", 10_000), ("large", MEGABYTE // 2)):
            writing = writer.variable(name, np.zeros(size))
            reading = reader.variable(name)
            target = np.zeros(size)
            for n in range(5):
                writing.assign(np.full(size, float(n)))
                reading.read_into(target)
            before = len(os.listdir("/proc/self/fd"))
            for n in range(60):
                writing.assign(np.full(size, float(n)))
                assert reading.read_into(target) == writing.version
                assert (target == n).all()
            assert len(os.listdir("/proc/self/fd")) <= before + 6


def test_what_a_killed_process_assigned_can_be_read() -> None:
    program = """
import os, signal, sys
import numpy as np
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
session.variable("v", np.zeros(500_000)).assign(np.arange(500_000.0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    with serving("unix", where="thread") as server:
        subprocess.run([sys.executable, "-c", program, server.target, server.secret.hex()])
        variable = server.session().variable("v", timeout=5)
        assert np.array_equal(variable.read().tree, np.arange(500_000.0))
        variable.assign_add(np.ones(500_000))
        assert variable.read().tree[0] == 1


# Several at once

ASSIGN = """
import sys, threading
import numpy as np
from paceline.session import Session
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
variable = session.variable("v")
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
n = 1
block = np.empty(131072)
print("ready", flush=True)
while not stop.is_set():
    n += 1
    block[:] = n
    variable.assign({"a": block, "n": n, "b": block[:1000]})
session.close()
"""


@pytest.mark.timeout(120)
def test_no_read_is_torn_under_constant_assigns_of_another_process() -> None:
    with serving("unix") as server:
        first: Any = {"a": np.full(131072, 1.0), "n": 1, "b": np.full(1000, 1.0)}
        variable = server.session().variable("v", first)
        with subprocess.Popen(
            [sys.executable, "-c", ASSIGN, server.target, server.secret.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            versions = set()
            deadline = time.monotonic() + 3.0
            target = {"a": np.zeros(131072), "b": np.zeros(1000)}
            while time.monotonic() < deadline:
                snapshot = variable.read()
                n = count_of(snapshot.version)
                tree = snapshot.tree
                assert tree["n"] == n
                assert tree["b"].min() == tree["b"].max() == n
                assert tree["a"].min() == tree["a"].max() == n
                versions.add(n)
            assert len(versions) > 20
            del tree, snapshot, target


def test_every_read_is_whole_while_threads_assign(server: Serving) -> None:
    first: Any = {"a": np.zeros(20_000), "b": [np.zeros(3), 0]}
    variable = server.session().variable("v", first)
    stop = threading.Event()

    def write() -> None:
        mine = server.session().variable("v")
        n = 0
        while not stop.is_set():
            n += 1
            mine.assign({"a": np.full(20_000, float(n)), "b": [np.full(3, float(n)), n]})

    writers = [Call(write) for _ in range(2)]
    try:
        for _ in range(300):
            tree = variable.read().tree
            n = tree["b"][1]
            assert (tree["a"] == n).all()
            assert (tree["b"][0] == n).all()
    finally:
        stop.set()
    for writer in writers:
        writer.outcome()


@pytest.mark.parametrize("size", [3, 10_000, MEGABYTE // 4])
def test_no_addition_is_lost(server: Serving, size: int) -> None:
    rounds = 20
    first: Any = {"a": np.zeros(size), "n": 0}
    variable = server.session().variable("v", first)
    before = variable.version

    def add(session: Session) -> None:
        mine = session.variable("v")
        for _ in range(rounds):
            mine.assign_add({"a": np.ones(size), "n": 1})

    shared = server.session()
    sessions = [server.session(), server.session(), shared, shared]
    for call in [Call(add, s) for s in sessions]:
        call.outcome()
    snapshot = variable.read()
    assert (snapshot.tree["a"] == 4 * rounds).all()
    assert snapshot.tree["n"] == 4 * rounds
    assert snapshot.version - before == 4 * rounds


def test_no_addition_of_processes_is_lost() -> None:
    program = """
import sys
import numpy as np
from paceline.session import Session
with Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2])) as session:
    variable = session.variable("v")
    for _ in range(50):
        variable.assign_add(np.ones(50_000))
"""
    with serving("unix") as server:
        variable = server.session().variable("v", np.zeros(50_000))
        children = [
            subprocess.Popen([sys.executable, "-c", program, server.target, server.secret.hex()])
            for _ in range(2)
        ]
        for child in children:
            assert child.wait(DEADLINE_SECONDS) == 0
        assert (variable.read().tree == 100).all()


def test_an_addition_in_hand_does_not_hold_up_readers() -> None:
    with serving("unix", where="thread") as server:
        adding, reading = server.session().variable("v", np.zeros(MEGABYTE)), server.session()
        other = reading.variable("other", 0)
        calls = [Call(lambda: adding.assign_add(np.ones(MEGABYTE))) for _ in range(3)]
        for n in range(100):
            other.assign(n)
            assert reading.variable("v").read().tree[0] in (0, 1, 2, 3)
        for call in calls:
            call.outcome()
        assert (reading.variable("v").read().tree == 3).all()


def test_an_array_that_cannot_be_added_is_refused(server: Serving) -> None:
    variable = server.session().variable("v", {"a": np.zeros(2), "s": np.array(["text"])})
    before = variable.version
    with pytest.raises(SchemaError, match=r"^assign_add.*\$\.s is <U4, which cannot be added$"):
        variable.assign_add({"a": np.ones(2), "s": np.array(["more"])})
    assert variable.version == before
    assert variable.read().tree["a"].tolist() == [0, 0]
    variable.assign({"a": np.ones(2), "s": np.array(["next"])})
    assert variable.read().tree["s"] == "next"


@pytest.mark.parametrize(
    ("leaf", "kind", "empty"),
    [("text", "str", "''"), (True, "bool", "False"), (b"bytes", "bytes", "b''")],
)
def test_a_plain_value_that_is_no_number_cannot_be_added(
    server: Serving, leaf: Any, kind: str, empty: str
) -> None:
    variable = server.session().variable("v", {"n": 1, "x": 0.5, "a": np.ones(2), "s": leaf})
    before = variable.version
    said = rf"^assign_add: leaf \$\.s is {kind}, which cannot be added: {empty} leaves it as it is$"
    with pytest.raises(SchemaError, match=said):
        variable.assign_add({"n": 2, "x": 1.0, "a": np.ones(2), "s": leaf})
    assert variable.version == before
    assert variable.read().tree["a"].tolist() == [1, 1]
    variable.assign_add({"n": 2, "x": 1.0, "a": np.ones(2), "s": type(leaf)()})
    assert variable.read().tree["s"] == leaf


def test_plain_numbers_are_added(server: Serving) -> None:
    variable = server.session().variable("v", {"n": 1, "x": 0.5, "none": None})
    variable.assign_add({"n": 2, "x": 1.0, "none": None})
    assert variable.read().tree == {"n": 3, "x": 1.5, "none": None}


# Into models


def test_read_into_fills_arrays_in_place(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(5000)})
    target = {"a": np.zeros((2, 3)), "b": np.zeros(5000, int)}
    a = target["a"]
    assert variable.read_into(target) == variable.version
    assert target["a"] is a
    np.testing.assert_equal(target, variable.read().tree)
    a[:] = 7
    variable.read_into(target)
    assert a[0, 1] == 1


def test_read_into_checks_everything_before_it_writes(server: Serving) -> None:
    variable = server.session().variable("v", {"a": np.ones(3), "b": np.ones(2)})
    target = {"a": np.zeros(3), "b": np.zeros(3)}
    with pytest.raises(SchemaError, match=r"^read_into 'v': .*\$\.b"):
        variable.read_into(target)
    assert target["a"].tolist() == [0, 0, 0]


def test_a_torch_model_travels(server: Serving) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    variable = server.session().variable("v", net)
    copy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    version = server.session().variable("v").read_into(copy)
    assert version == variable.version
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, copy.state_dict()[name])
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.add_(1)
    assert not torch.equal(net.state_dict()["0.weight"], copy.state_dict()["0.weight"])


def test_reading_into_an_unchanged_model_writes_nothing_and_a_changed_one_is_restored(
    server: Serving,
) -> None:
    net = torch.nn.Linear(2, 2)
    variable = server.session().variable("v", net)
    copy = torch.nn.Linear(2, 2)
    variable.read_into(copy)
    mark = copy.weight._version
    variable.read_into(copy)
    assert copy.weight._version == mark
    with torch.no_grad():
        copy.weight.zero_()
    variable.read_into(copy)
    assert torch.equal(copy.weight, net.weight)


def test_what_was_read_is_what_is_reported(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(2))
    first = variable.read().version
    variable.assign(np.ones(2))
    assert variable.held == first
    assert variable.read_into(np.zeros(2)) == variable.held == first + 1
    assert variable.first_read == first
