"""Rows of variables whose arrays lie on several servers: one version for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, until, waits
from hands import start, toml
from spreads import Servers

from paceline import Disconnected, SchemaError, Session, TimedOut, Variable
from paceline.core import messages as m
from paceline.core.errors import ProtocolError
from paceline.core.versions import count_of

N, WIDTH = 1000, 4


@pytest.fixture(params=[("unix", 2), ("unix", 3), ("tcp", 3)], ids=str)
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, *request.param)
    try:
        yield made
    finally:
        made.close()


def shared(servers: Servers, session: Session, name: str = "v", rows: int = N) -> Variable[Any]:
    """A table of zeros whose rows are shared by all servers."""
    tasks = [f"ps:{n}" for n in sorted(servers.running)]
    return session.spread(name, np.zeros((rows, WIDTH)), placement=lambda leaves: [tasks])


def whole(rows: Any) -> float:
    """The number that all rows have."""
    found = np.unique(rows)
    assert found.size == 1, f"torn: {found}"
    return float(found[0])


def everywhere() -> Any:
    """Some rows of each server."""
    return np.arange(0, N, 50)


def ones(count: int) -> Any:
    return np.ones((count, WIDTH))


def test_rows_are_taken_and_added_to_wherever_they_lie(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = shared(servers, one)
    found: Variable[Any] = two.variable("v")
    draw = np.random.default_rng(1)
    mine = np.zeros((N, WIDTH))
    for shape in [(64,), (8, 8), (1,), ()]:
        indices = draw.integers(0, N, shape)
        rows = draw.normal(size=(*shape, WIDTH))
        before = made.version
        version = found.scatter_add(indices, rows)
        np.add.at(mine, indices, rows)
        assert version == before + 1 == made.version
        some = draw.integers(0, N, (5, 7))
        gathered = made.gather(some)
        assert gathered.version == version
        assert gathered.tree.tobytes() == mine[some].tobytes()
        assert (gathered.tree.shape, gathered.tree.flags.writeable) == ((5, 7, WIDTH), True)
    assert made.read().tree.tobytes() == mine.tobytes()
    assert (made.held, found.held) == (version, None)


def test_rows_of_an_index_that_comes_twice_add_up_in_order(servers: Servers) -> None:
    session = servers.session()
    made = shared(servers, session)
    draw = np.random.default_rng(2)
    indices = draw.choice([3, 400, 401, 999], 500)
    rows = draw.normal(size=(500, WIDTH)) * 10.0 ** draw.integers(-8, 8, (500, 1))
    made.scatter_add(indices, rows)
    mine = np.zeros((N, WIDTH))
    np.add.at(mine, indices, rows)
    assert made.read().tree.tobytes() == mine.tobytes()


def test_a_leaf_in_one_place_and_one_in_several_are_taken_together(servers: Servers) -> None:
    session = servers.session()
    tree = {
        "emb": np.zeros((10, 2), np.float32),
        "net": [np.zeros(3)],
        "bias": np.zeros(10, np.int32),
    }
    made = session.spread(
        "v",
        tree,
        placement=lambda leaves: [
            {"$.emb": ["ps:0", "ps:1"], "$.bias": "ps:1"}.get(path, "ps:0") for path, _ in leaves
        ],
    )
    made.scatter_add([9, 0, 9], np.ones((3, 2), np.float32), "$.emb")
    made.scatter_add([4], np.array([7], np.int32), "$.bias")
    made.scatter_add([2, 2], {"net": np.ones(2)}["net"], "$.net[0]")
    assert made.gather([[0], [9]], "$.emb").tree.tolist() == [[[1, 1]], [[2, 2]]]
    assert made.gather([4, 5], "$.bias").tree.tolist() == [7, 0]
    assert made.gather(2, "$.net[0]").tree == 2
    with pytest.raises(SchemaError, match=r"^gather 'v': leaf \$.* rows, leaf \$\..*; name the"):
        made.gather([0])
    pair = {key: tree[key] for key in ("emb", "bias")}
    both = session.spread("w", pair, placement=lambda leaves: [["ps:1", "ps:0"], "ps:1"])
    both.scatter_add([5, 1], {"bias": np.array([1, 2], np.int32), "emb": np.ones((2, 2), "f4")})
    found: Any = both.gather([1, 5, 6]).tree
    assert found["bias"].tolist() == [2, 1, 0]
    assert found["emb"][:, 0].tolist() == [1, 1, 0]


def test_without_indices_there_is_no_new_version(servers: Servers) -> None:
    session = servers.session()
    made = shared(servers, session)
    before = made.version
    assert made.scatter_add([], ones(0)) == before == made.version
    found = made.gather([])
    assert (found.version, found.tree.shape) == (before, (0, WIDTH))
    with pytest.raises(SchemaError, match=r"the rows of leaf \$ are float64\[0\], not float64"):
        made.scatter_add([], np.zeros(0))


def test_what_is_wrong_is_named_and_changes_nothing_on_any_server(servers: Servers) -> None:
    session = servers.session()
    made = shared(servers, session)
    before, stages = made.version, servers.parts(session)
    for bad in (-1, N):
        said = rf"'v': index {bad} at \[1, 0\] is none of leaf \$, which has {N} rows, from 0 on$"
        with pytest.raises(SchemaError, match=f"^gather {said}"):
            made.gather([[0], [bad]])
        with pytest.raises(SchemaError, match=f"^scatter_add {said}"):
            made.scatter_add([[0], [bad]], np.ones((2, 1, WIDTH)))
    for rows, message in (
        (np.ones((2, WIDTH + 1)), r"the rows of leaf \$ are float64\[2,5\], not float64\[2,4\]"),
        (np.ones((2, WIDTH), np.float32), r"the rows of leaf \$ are float32\[2,4\], not"),
        ({"a": ones(2)}, r"rows of leaf \$ are missing: float64\[2,4\]"),
    ):
        with pytest.raises(SchemaError, match=rf"^scatter_add 'v': {message}"):
            made.scatter_add([0, N - 1], rows)
    with pytest.raises(SchemaError, match=r"^gather 'v': there is no leaf \$\.x; there are \["):
        made.gather([0], "$.x")
    for odd in (5, b"$", ["$"], "\ud800"):
        leaf: Any = odd
        with pytest.raises(SchemaError, match=r"^gather 'v': the path of a leaf is a str"):
            made.gather([0], leaf)
        with pytest.raises(SchemaError, match=r"^scatter_add 'v': the path of a leaf is a str"):
            made.scatter_add([0], ones(1), leaf)
    with pytest.raises(SchemaError, match=r"^scatter_add 'v': indices are whole numbers, not fl"):
        made.scatter_add([0.5], ones(1))
    assert (made.version, servers.parts(session)) == (before, stages)
    assert whole(made.read().tree) == 0
    assert made.scatter_add([0, N - 1], ones(2), timeout=5) == before + 1


def test_parts_without_such_rows_copy_nothing(servers: Servers) -> None:
    session = servers.session()
    made = shared(servers, session)
    made.tag("before")
    snapshot = made.read(tag="before")
    # The last server's.
    last = f"ps:{len(servers.running) - 1}"
    made.scatter_add([N - 1], ones(1))
    held = session.resources()["parts"][f"v on {last}"]
    assert held["stages"] == 2
    assert made.gather([0, N - 1]).tree[:, 0].tolist() == [0, 1]
    assert whole(made.read(tag="before").tree) == 0 == whole(snapshot.tree)
    made.untag("before")
    made.assign(np.full((N, WIDTH), 3.0))
    made.scatter_add([0], ones(1))
    assert made.gather([0, 1, N - 1]).tree[:, 0].tolist() == [4, 3, 3]


def test_large_rows_are_whole_too(servers: Servers) -> None:
    session = servers.session()
    made = shared(servers, session, rows=100_000)
    indices = np.random.default_rng(3).integers(0, 100_000, 60_000)
    made.scatter_add(indices, np.ones((60_000, WIDTH)))
    wanted = np.bincount(indices, minlength=100_000)
    assert (made.gather(np.arange(100_000)).tree[:, 2] == wanted).all()


def test_gathers_never_mix_versions(servers: Servers) -> None:
    adders = [servers.session() for _ in range(2)]
    reader = servers.session()
    made = shared(servers, reader)
    indices = everywhere()

    def add(session: Session) -> None:
        table: Variable[Any] = session.variable("v")
        for _ in range(60):
            table.scatter_add(indices, ones(len(indices)))

    adding = [Call(add, session) for session in adders]
    seen = set()
    while any(call.is_alive() for call in adding):
        found = made.gather(indices[::-1])
        assert whole(found.tree) == found.count - 1
        seen.add(found.count)
    for call in adding:
        call.outcome()
    assert whole(made.gather(indices).tree) == 120 == made.gather([0]).count - 1
    assert len(seen) > 3
    until(lambda: len(made.memory()["versions"]) == 1)


# Who dies


def test_a_lost_part_makes_rows_wait_for_the_next_assign(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = shared(servers, one)
    found: Variable[Any] = two.variable("v")
    servers.end(1)
    servers.start(1)
    # Rows of the others are there.
    assert found.gather([0]).tree[0, 0] == 0
    at = -(-N // len(servers.running))
    for call, what in (
        (lambda: found.gather([0, at], timeout=0.2), "gather"),
        (lambda: found.scatter_add([0], ones(1), timeout=0.2), "scatter_add"),
    ):
        with pytest.raises(
            TimedOut, match=rf"^{what} 'v', after \d.*: ps:1 lost what it had of version 1 when it"
        ):
            call()
    taking, adding = Call(found.gather, [0, at]), Call(made.scatter_add, [0, at], ones(2))
    until(lambda: waits(one, "variable") == 2)
    made.assign(np.full((N, WIDTH), 5.0))
    assert whole(taking.outcome().tree) in (5, 6)
    adding.outcome()
    assert whole(found.gather([0, at]).tree) == 6


def test_a_part_that_is_away_is_waited_for_and_named(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = shared(servers, one)
    found: Variable[Any] = two.variable("v")
    at = -(-N // len(servers.running))
    servers.end(1)
    for call in (
        lambda: found.gather([at], timeout=0.3),
        lambda: found.scatter_add([at], ones(1), timeout=0.3),
    ):
        with pytest.raises(
            TimedOut, match=r"^(gather|scatter_add) 'v': open a session on .*; starting the server"
        ):
            call()
    adding = Call(found.scatter_add, [at], ones(1))
    servers.start(1)
    until(lambda: waits(one, "variable") == 1)
    made.assign(np.zeros((N, WIDTH)))
    adding.outcome()
    assert made.gather([at]).tree[0].tolist() == [1] * WIDTH


def test_an_addition_that_waits_for_its_turn_says_so(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = shared(servers, one)
    turn = two.connection.call(m.Begin("v", "rows", None))
    with pytest.raises(TimedOut, match=r"^scatter_add 'v': an addition to 'v' is being computed"):
        made.scatter_add([0], ones(1), timeout=0)
    two.connection.call(m.Abandon("v", turn.stage))
    assert count_of(made.scatter_add([0], ones(1), timeout=0)) == 2


def test_rows_that_do_not_fit_their_pieces_are_refused(servers: Servers) -> None:
    session = servers.session()
    made = shared(servers, session)
    piece = f"$['$[0:{-(-N // len(servers.running))}]']"
    home = session.connection
    assert home.call(m.GatherHome("v", [], False)).version == made.version
    with pytest.raises(SchemaError, match=r"there is no leaf \$\.x"):
        home.call(m.GatherHome("v", [("$.x", 0)], False))
    other = servers.session()
    with pytest.raises((ProtocolError, Disconnected), match="0 indices came for"):
        other.connection.call(m.GatherHome("v", [(piece, 2)], False))


STAGER = """
import sys
import numpy as np
import paceline
from paceline import spread

spec = paceline.ClusterSpec.from_file("cluster.toml")
session = paceline.Session(spec, job="worker", index=2, secret=b"spread")
table = session.variable("v")

def stay(*_, **__):
    print("staged", flush=True)
    sys.stdin.read()

spread._committed = stay
table.scatter_add(np.arange(0, 1000, 50), np.ones((20, 4)))
"""

ADDER = """
import sys
import numpy as np
import paceline

spec = paceline.ClusterSpec.from_file("cluster.toml")
number = int(sys.argv[1])
draw = np.random.default_rng(number)
with paceline.Session(spec, job="worker", index=number, secret=b"spread") as session:
    table = session.variable("v")
    for _ in range(34):
        indices = draw.integers(0, 1000, 10_000)
        table.scatter_add(indices, draw.integers(-9, 9, (10_000, 4)).astype(float))
        table.gather(indices)
"""


@pytest.mark.timeout(120)
def test_an_adder_that_is_killed_before_its_commit_changes_nothing(
    servers: Servers, tmp_path: Path
) -> None:
    one = servers.session()
    made = shared(servers, one)
    with servers.stager(STAGER, tmp_path) as killed:
        adding = Call(made.scatter_add, everywhere(), ones(20))
        until(lambda: waits(one, "write") == 1)
        assert whole(made.gather(everywhere()).tree) == 0
        killed.kill()
    assert count_of(adding.outcome()) == 2
    assert whole(made.gather(everywhere()).tree) == 1
    assert set(servers.parts(one).values()) == {2}


@pytest.mark.timeout(240)
def test_a_million_rows_of_several_processes_are_as_numpy_adds_them(
    servers: Servers, tmp_path: Path
) -> None:
    one = servers.session()
    made = shared(servers, one)
    toml(servers.spec, tmp_path / "cluster.toml")
    (tmp_path / "adder.py").write_text(ADDER)
    adders = [start("adder.py", str(n), folder=tmp_path) for n in (1, 2, 3)]
    try:
        for adder in adders:
            assert adder.wait(200) == 0
    finally:
        for adder in adders:
            adder.kill()
            adder.communicate()
    wanted = np.zeros((N, WIDTH))
    for number in (1, 2, 3):
        draw = np.random.default_rng(number)
        for _ in range(34):
            indices = draw.integers(0, N, 10_000)
            np.add.at(wanted, indices, draw.integers(-9, 9, (10_000, WIDTH)).astype(float))
    assert made.read().tree.tobytes() == wanted.tobytes()
    everything = np.random.default_rng(9).permutation(np.resize(np.arange(N), 1_000_000))
    for some in np.split(everything, 10):
        assert made.gather(some).tree.tobytes() == wanted[some].tobytes()
    assert made.gather([0]).count == 1 + 3 * 34
