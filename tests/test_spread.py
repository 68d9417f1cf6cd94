"""Variables spread over several servers: one version, whoever writes, reads, or starts again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, until, waits
from hands import start, toml
from spreads import SECRET, Servers

import paceline
from paceline import Disconnected, Refused, SchemaError, Session, TimedOut, Variable
from paceline.core import messages as m
from paceline.core.versions import count_of
from paceline.packing import pack


@pytest.fixture(params=["unix", "tcp"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, request.param)
    try:
        yield made
    finally:
        made.close()


def tree(number: float) -> dict[str, Any]:
    """Four arrays, which go to three servers, and what is no array."""
    arrays = {f"w{n}": np.full(n + 4, float(number)) for n in range(4)}
    return {**arrays, "count": int(number), "name": "same"}


def more(number: float) -> dict[str, Any]:
    """What adds a number to all that can be added to."""
    return {**tree(number), "name": ""}


def whole(found: Any) -> float:
    """The number that all of a tree has."""
    numbers = {
        float(value) for key, leaf in found.items() if key != "name" for value in np.ravel(leaf)
    }
    assert len(numbers) == 1, f"torn: {found}"
    assert found.keys() == tree(0).keys()
    return numbers.pop()


def lines(session: Session) -> Any:
    return session._lines


def test_it_is_a_variable_that_all_sessions_find_with_one_version(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = one.spread("v", tree(1))
    found: Variable[Any] = two.variable("v")
    assert one.resources()["spread"] == {"v": ["ps:0", "ps:1", "ps:2"]}
    assert one.resources()["variables"] == {"v": 1}
    assert whole(found.read().tree) == 1
    version = found.assign(tree(2))
    assert made.version == found.version == version
    assert whole(made.read().tree) == 2
    added = made.assign_add(more(3))
    assert added == version + 1
    snapshot = found.read(newer_than=version)
    assert (snapshot.version, whole(snapshot.tree)) == (added, 5)
    assert snapshot.tree["name"] == "same"
    assert found.first_read == 1 + (version & ~0xFFFF)
    assert found.held == added
    assert repr(made).startswith("<Variable 'v' on ")


def test_its_arrays_are_read_only_and_nobody_elses(servers: Servers) -> None:
    session = servers.session()
    mine = tree(1)
    made = session.spread("v", mine)
    snapshot = made.read()
    for leaf in mine.values():
        if isinstance(leaf, np.ndarray):
            leaf += 1
    for _ in range(5):
        made.assign(tree(7))
    assert whole(snapshot.tree) == 1
    assert not any(
        leaf.flags.writeable for leaf in snapshot.tree.values() if isinstance(leaf, np.ndarray)
    )


def test_by_default_each_array_goes_where_the_fewest_bytes_are(servers: Servers) -> None:
    session = servers.session()
    sizes = [100, 10, 10, 60, 30, 5]
    session.spread("v", [np.zeros(size) for size in sizes])
    parts = session.resources()["parts"]
    # ps:0 has 100; ps:1 has 10, 60, then 5; ps:2 has 10, 30: to the first of those with least.
    assert {key: part["bytes"] for key, part in parts.items()} == {
        "v on ps:1": 64 * 2 + 512,
        "v on ps:2": 64 * 2 + 256 + 64 if sizes[-1] > 8 else sum((128, 256, 64)),
    }


def test_a_placement_says_where_arrays_are(servers: Servers) -> None:
    session = servers.session()
    seen: list[tuple[str, int]] = []

    def placement(leaves: list[tuple[str, int]]) -> list[str]:
        seen.extend(leaves)
        return ["ps:2" if path == "$.b" else "ps:1" for path, _ in leaves]

    with session.device("ps:1"):
        made = session.spread("v", {"a": np.zeros(2), "b": np.ones(3), "c": 4}, placement=placement)
    assert seen == [("$.a", 16), ("$.b", 24)]
    assert session.resources()["spread"] == {"v": ["ps:1", "ps:2"]}
    assert made.read().tree["b"].tolist() == [1, 1, 1]
    two = {"a": np.zeros(1), "b": np.zeros(1)}
    for odd, said in (
        (lambda _: ["ps:1"], "it has 2 arrays, and 1 were placed$"),
        (5, r"placement= is a function of the paths and bytes of all arrays, not 5$"),
    ):
        wrong: Any = odd
        with pytest.raises(SchemaError, match=rf"^spread 'x': {said}"):
            session.spread("x", two, placement=wrong)
    assert session.uninitialized(["x"]) == ["x"]


def test_rows_of_one_array_are_shared_by_servers(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    table = np.arange(20.0).reshape(10, 2)
    made = one.spread(
        "v",
        {"table": table, "bias": np.zeros(())},
        placement=lambda leaves: [["ps:2", "ps:0", "ps:1"]] * 2,
    )
    assert np.array_equal(made.read().tree["table"], table)
    found: Variable[Any] = two.variable("v")
    found.assign_add({"bias": np.ones(()), "table": table})
    snapshot = made.read()
    assert np.array_equal(snapshot.tree["table"], 2 * table)
    assert snapshot.tree["bias"] == 1
    assert not snapshot.tree["table"].flags.writeable
    target = {"table": np.zeros((10, 2)), "bias": np.zeros(())}
    assert found.read_into(target) == snapshot.version
    assert np.array_equal(target["table"], 2 * table)


def test_a_second_maker_finds_it_and_its_structure_is_checked(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    one.spread("v", tree(1))
    again = two.spread("v", tree(2), placement=lambda leaves: ["ps:0"] * len(leaves))
    assert whole(again.read().tree) == 1
    assert one.resources()["spread"] == {"v": ["ps:0", "ps:1", "ps:2"]}
    assert whole(two.variable("v", tree(2)).read().tree) == 1
    other = {**tree(1), "w2": np.zeros(3)}
    for make in (two.spread, two.variable):
        with pytest.raises(
            SchemaError, match=r"^variable 'v': leaf \$\.w2 is float64\[3\], declared float64\[6\]"
        ):
            make("v", other)
    assert whole(two.spread("v", tree(3), overwrite=True).read().tree) == 3
    assert whole(two.variable("v", tree(4), overwrite=True).read().tree) == 4
    with pytest.raises(SchemaError, match=r"^assign 'v': leaf \$\.w2 is float64\[3\], declared"):
        again.assign(other)
    with pytest.raises(SchemaError, match=r"^assign_add 'v': leaf \$\.name is missing"):
        again.assign_add({key: leaf for key, leaf in tree(1).items() if key != "name"})
    assert whole(again.read().tree) == 4


def test_where_a_variable_is_in_one_place_it_is_that_one(servers: Servers) -> None:
    session = servers.session()
    session.variable("v", np.zeros(2))
    assert session.spread("v", np.ones(2)).read().tree.tolist() == [0, 0]
    assert session.resources()["spread"] == {}
    with pytest.raises(SchemaError, match=r"^variable 'v': leaf \$ is float64\[3\]"):
        session.spread("v", np.ones(3))


def test_a_session_on_one_server_makes_an_ordinary_one() -> None:
    with Session() as session:
        made = session.spread("v", {"a": np.zeros(2)}, placement=lambda leaves: ["ps:1"])
        assert made.assign({"a": np.ones(2)}) == made.version
        assert session.spread("v").read().tree["a"].tolist() == [1, 1]
        with pytest.raises(TimedOut, match=r"^no variable 'other' is initialised"):
            session.spread("other", timeout=0)


def test_what_cannot_be_added_is_named_and_nothing_is(servers: Servers) -> None:
    session = servers.session()
    made = session.spread("v", {"a": np.zeros(2), "b": np.array([True]), "n": 1 << 62})
    with pytest.raises(
        SchemaError, match=r"^assign_add 'v': leaf \$\.b is bool\[1\], which cannot be added"
    ):
        made.assign_add(made.read().tree)
    named = session.spread("named", {"a": np.zeros(2), "s": "text"})
    with pytest.raises(SchemaError, match=r"^assign_add: leaf .*\$\.s.* is str, which cannot be"):
        named.assign_add({"a": np.ones(2), "s": "text"})
    assert named.read().tree["a"].tolist() == [0, 0]
    named.assign_add({"a": np.ones(2), "s": ""})
    assert named.read().tree["a"].tolist() == [1, 1]
    other = session.spread("w", {"a": np.zeros(2), "c": np.zeros(2), "n": 1 << 62})
    with pytest.raises(
        SchemaError, match=r"^assign_add: leaf .*\$\.n.* would be an int of more than 64 bits"
    ):
        other.assign_add({"a": np.ones(2), "c": np.ones(2), "n": 1 << 62})
    assert other.read().tree["a"].tolist() == [0, 0]
    other.assign_add({"a": np.ones(2), "c": np.ones(2), "n": 1})
    assert other.read().tree["c"].tolist() == [1, 1]


def test_tags_keep_all_parts_and_what_nobody_keeps_goes(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = one.spread("v", tree(0))
    for number in range(1, 5):
        made.assign(tree(number))
        if number % 2:
            made.tag(f"gen-{number}")
    found: Variable[Any] = two.variable("v")
    assert [whole(found.read(tag=tag).tree) for tag in found.tags()] == [1, 3]
    # Two tags, one of which was current when the last write began, and what it made.
    assert servers.parts(one) == {"ps:1": 3, "ps:2": 3}
    made.untag("gen-1")
    made.assign(tree(9))
    # The tag, and the current one when this write began.
    assert servers.parts(one) == {"ps:1": 3, "ps:2": 3}
    made.assign(tree(9))
    assert servers.parts(one) == {"ps:1": 3, "ps:2": 3}
    assert whole(found.read(tag="gen-3").tree) == 3
    with pytest.raises(paceline.UnknownName, match=r"^no tag 'gen-1'"):
        found.read(tag="gen-1")
    held = {one["version"]: one["held_by"] for one in made.memory()["versions"]}
    assert sorted(held.values()) == [["current"], ["tag gen-3"]]


def test_a_large_version_is_kept_while_it_is_read_and_no_longer(servers: Servers) -> None:
    session = servers.session()
    big = {"a": np.zeros(300_000), "b": np.zeros(300_000)}
    made = session.spread("v", big)
    snapshot = made.read()
    for number in range(1, 4):
        made.assign({key: leaf + number for key, leaf in big.items()})
    assert not snapshot.tree["b"].any()
    added = made.assign_add(big)
    assert (made.read().version, made.read().tree["b"][0]) == (added, 3)
    del snapshot
    until(lambda: len(made.memory()["versions"]) == 1)
    made.assign(big)
    assert servers.parts(session) == {"ps:1": 2}


def test_additions_of_several_all_count(servers: Servers) -> None:
    adders = [servers.session() for _ in range(3)]
    adders[0].spread("v", tree(0))

    def add(session: Session) -> None:
        variable: Variable[Any] = session.variable("v")
        for _ in range(20):
            variable.assign_add(more(1))
            whole(variable.read().tree)

    for call in [Call(add, session) for session in adders]:
        call.outcome()
    assert whole(adders[0].variable("v").read().tree) == 60


def test_an_addition_has_its_turn_to_itself_and_a_dead_one_gives_it_back(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = one.spread("v", tree(1))
    dead = Session(servers.spec, job="worker", index=3, secret=SECRET)
    turn = dead.connection.call(m.Begin("v", "add", None))
    with pytest.raises(
        TimedOut, match=r"^assign_add 'v': an addition to 'v' is being computed; members: "
    ):
        made.assign_add(more(1), timeout=0)
    assert count_of(made.version) == 1
    adding = Call(made.assign_add, more(1))
    until(lambda: waits(one, "write") == 1)
    assigning = Call(two.variable("v").assign, tree(5))
    until(lambda: waits(one, "write") == 2)
    for line in lines(dead).all[1:]:
        head, block = pack(line.arena, {}, "")
        line.call(m.Stage("v", head, turn.stage, None, turn.keep, turn.below), [block])
    dead.close()
    assert count_of(adding.outcome()) == 2
    assert count_of(assigning.outcome()) == 3
    assert whole(made.read().tree) == 5
    made.assign(tree(6))
    assert set(servers.parts(one).values()) == {2}


def test_only_what_was_granted_is_committed(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = one.spread("v", tree(1))
    turn = one.connection.call(m.Begin("v", "assign", None))
    home = made.read().tree
    head, block = pack(
        one.connection.arena,
        {"$.w0": home["w0"], "$.w3": home["w3"], "$.count": 1, "$.name": ""},
        "",
    )

    def commit(session: Session, **changed: Any) -> None:
        fields = {"name": "v", "head": head, "stage": turn.stage, "adding": False, "timeout": None}
        session.connection.call(m.Commit(**{**fields, **changed}), [block])

    for session, changed in ((two, {}), (one, {"stage": turn.stage + 1}), (one, {"adding": True})):
        with pytest.raises(
            Refused, match=r"^commit 'v': stage \d+ was not granted to this session"
        ):
            commit(session, **changed)
    one.connection.call(m.Abandon("v", turn.stage))
    with pytest.raises(Refused, match="or was abandoned"):
        commit(one)
    assert count_of(made.version) == 1


def test_one_that_knows_it_in_one_place_is_told(servers: Servers) -> None:
    session = servers.session()
    session.spread("v", tree(1))
    line = session.connection
    head, block = pack(line.arena, {"a": np.zeros(1)}, "")
    with pytest.raises(
        SchemaError, match=r"^variable 'v' is spread over ps:0, ps:1, ps:2: find it again"
    ):
        line.call(m.Read("v", -1, 0.0))
    for write in (m.Assign, m.Add):
        with pytest.raises(SchemaError, match="is spread over"):
            line.call(write("v", head), [block])
    session.variable("w", 1)
    with pytest.raises(SchemaError, match=r"^variable 'w' is on one server: find it again"):
        line.call(m.Begin("w", "add", None))


def test_a_reader_that_ended_holds_nothing(servers: Servers) -> None:
    one = servers.session()
    made = one.spread("v", tree(1))
    reader = Session(servers.spec, job="worker", index=3, secret=SECRET)
    value = reader.connection.call(m.Read("v", -1, 0.0, hold=True))
    made.assign(tree(2))
    made.assign(tree(3))
    assert [each["held_by"] for each in made.memory()["versions"]] == [["worker:3"], ["current"]]
    part = lines(reader).all[1].call(m.ReadPart("v", value.stage))
    assert part.stage == value.stage
    reader.close()
    until(lambda: len(made.memory()["versions"]) == 1)


def test_a_lost_part_makes_reads_and_additions_wait_for_the_next_assign(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = one.spread("v", tree(1))
    found: Variable[Any] = two.variable("v")
    servers.end(1)
    servers.start(1)
    with pytest.raises(
        TimedOut,
        match=r"newer than version 1: .*; ps:1 lost what it had of version 1 when it was started"
        " again; the next assign ends the wait",
    ):
        found.read(timeout=0.2)
    with pytest.raises(
        TimedOut, match=r"^assign_add 'v', after .*: ps:1 lost what it had of version 1"
    ):
        found.assign_add(more(1), timeout=0.2)
    reading, adding = Call(found.read), Call(made.assign_add, more(1))
    until(lambda: waits(one, "variable") == 2)
    made.assign(tree(5))
    assert whole(reading.outcome().tree) in (5, 6)
    adding.outcome()
    assert whole(found.read().tree) == 6


def test_a_tag_that_lost_a_part_says_so(servers: Servers) -> None:
    session = servers.session()
    made = session.spread("v", tree(1))
    made.tag("old")
    servers.end(2)
    servers.start(2)
    made.assign(tree(2))
    with pytest.raises(
        Disconnected, match=r"^read 'v', tag 'old'; ps:2 lost what it had of version 1"
    ):
        made.read(tag="old")
    assert whole(made.read().tree) == 2


def test_a_part_that_is_away_is_waited_for_and_named(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    made = one.spread("v", tree(1))
    found: Variable[Any] = two.variable("v")
    servers.end(1)
    assert found.version == made.version
    for call in (lambda: found.assign(tree(2), timeout=0.3), lambda: found.read(timeout=0.3)):
        with pytest.raises(
            TimedOut,
            match=r"^(read|assign) 'v': open a session on .*; starting the server there ends",
        ):
            call()
    assigning = Call(found.assign, tree(2))
    servers.start(1)
    assigning.outcome()
    assert whole(made.read().tree) == 2


def test_a_home_that_was_started_again_is_given_its_value_anew(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    with one.device("ps:1"):
        made = one.spread("v", tree(1))
    before = made.version
    found: Variable[Any] = two.variable("v")
    servers.end(1)
    servers.start(1)
    with pytest.raises(TimedOut, match=r"^read 'v': no variable 'v' is initialised"):
        found.read(timeout=0.2)
    reading = Call(found.read)
    again = one.spread("v", tree(3))
    assert whole(reading.outcome().tree) == 3
    assert again.version == found.version == made.version
    # Also if both servers were started within one second.
    assert again.version > before
    made.assign(tree(4))
    assert whole(found.read().tree) == 4


def test_homes_are_told_again_to_a_first_server_that_was_started_again(servers: Servers) -> None:
    one, two = servers.session(), servers.session()
    with one.device("ps:1"):
        made = one.spread("v", tree(1))
        one.variable("w", 7)
    servers.end(0)
    servers.start(0)
    made.assign(tree(2))
    assert one.resources()["homes"] == {"variable v": "ps:1", "variable w": "ps:1"}
    assert two.variable("w").read().tree == 7
    assert whole(two.variable("v").read().tree) == 2


def test_a_session_that_is_closed_waits_no_longer(servers: Servers) -> None:
    one = servers.session()
    made = one.spread("v", tree(1))
    servers.end(1)
    writing = Call(made.assign, tree(2))
    until(lambda: not lines(one).now(["ps:1"])["ps:1"].alive())
    one.close()
    with pytest.raises(paceline.PacelineError):
        writing.outcome()


def test_an_unchanged_one_costs_no_parts(servers: Servers) -> None:
    session = servers.session()
    made = session.spread("v", tree(1))
    snapshot = made.read()
    servers.end(2)
    assert made.read() is snapshot
    servers.start(2)


ADDER = """
import sys
import numpy as np
import paceline

spec = paceline.ClusterSpec.from_file("cluster.toml")
with paceline.Session(spec, job="worker", index=int(sys.argv[1]), secret=b"spread") as session:
    shared = session.variable("v")
    one = {key: np.ones_like(leaf) if isinstance(leaf, np.ndarray) else leaf
           for key, leaf in shared.read().tree.items()}
    one["count"], one["name"] = 1, ""
    for _ in range(25):
        shared.assign_add(one)
"""

STAGER = """
import sys
import paceline
from paceline.core import messages as m
from paceline.packing import pack

spec = paceline.ClusterSpec.from_file("cluster.toml")
session = paceline.Session(spec, job="worker", index=2, secret=b"spread")
turn = session.connection.call(m.Begin("v", "add", None))
for line in session._lines.all[1:]:
    head, block = pack(line.arena, {"unlike": 1}, "")
    line.call(m.Stage("v", head, turn.stage, None, turn.keep, turn.below), [block])
print("staged", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(120)
def test_a_writer_that_is_killed_between_staging_and_commit_changes_nothing(
    servers: Servers, tmp_path: Path
) -> None:
    one = servers.session()
    made = one.spread("v", tree(1))
    with servers.stager(STAGER, tmp_path) as killed:
        adding = Call(made.assign_add, more(1))
        until(lambda: waits(one, "write") == 1)
        assert whole(made.read().tree) == 1
        killed.kill()
    assert count_of(adding.outcome()) == 2
    assert whole(made.read().tree) == 2
    # What it staged went with that addition; what this one began with goes with the next.
    assert set(servers.parts(one).values()) == {2}


@pytest.mark.timeout(180)
def test_no_addition_of_several_processes_is_lost(servers: Servers, tmp_path: Path) -> None:
    one = servers.session()
    made = one.spread("v", tree(0))
    toml(servers.spec, tmp_path / "cluster.toml")
    (tmp_path / "adder.py").write_text(ADDER)
    adders = [start("adder.py", str(n), folder=tmp_path) for n in (1, 2, 3)]
    try:
        for adder in adders:
            assert adder.wait(120) == 0
    finally:
        for adder in adders:
            adder.kill()
            adder.communicate()
    assert whole(made.read().tree) == 75
