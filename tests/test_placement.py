"""Where a session proposes to put what it makes: the strategies, and real servers."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call
from hands import cluster, served
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline import SchemaError, Session, UnknownName, replica_device_setter
from paceline.placement import Greedy, Setter

THREE = {"ps": ["a:1", "b:1", "c:1"], "worker": ["d:1"]}

things = st.lists(
    st.tuples(
        st.sampled_from(["variable", "queue"]),
        st.text("abc", min_size=1, max_size=3),
        st.integers(0, 1 << 40),
    ),
    max_size=30,
)


def setter(*given: Any, **options: Any) -> Setter:
    made = replica_device_setter(*given, **options)
    assert made is not None
    return made


def tasks_of(made: list[tuple[str, str, int]], *given: Any, **options: Any) -> list[str | None]:
    choose = setter(*given, **options)
    return [choose(*each) for each in made]


@given(things, st.integers(1, 5))
def test_round_robin_takes_turns_in_the_order_of_making(
    made: list[tuple[str, str, int]], count: int
) -> None:
    first = dict.fromkeys((kind, name) for kind, name, _ in made)
    wanted = {each: f"ps:{place % count}" for place, each in enumerate(first)}
    found = tasks_of(made, ps_tasks=count)
    assert found == [wanted[kind, name] for kind, name, _ in made]


@given(things, st.integers(1, 5))
def test_greedy_takes_the_server_with_the_fewest_bytes(
    made: list[tuple[str, str, int]], count: int
) -> None:
    choose = setter(ps_tasks=count, ps_strategy="greedy")
    placed: dict[tuple[str, str], str | None] = {}
    loads = {f"ps:{place}": 0 for place in range(count)}
    for kind, name, nbytes in made:
        known = placed.get((kind, name))
        task = choose(kind, name, nbytes)
        if known is not None:
            assert task == known
            continue
        assert task is not None
        # The first of those that have least.
        assert task == min(loads, key=lambda each: (loads[each], each))
        loads[task] += nbytes
        placed[kind, name] = task
    biggest = max((nbytes for _, _, nbytes in made), default=0)
    assert max(loads.values()) - min(loads.values()) <= biggest


@given(things, st.sampled_from(["round_robin", "greedy"]))
def test_processes_that_make_the_same_in_the_same_order_propose_the_same(
    made: list[tuple[str, str, int]], strategy: str
) -> None:
    assert tasks_of(made, THREE, ps_strategy=strategy) == tasks_of(
        made, paceline.ClusterSpec(THREE), ps_strategy=strategy
    )


def test_a_load_of_ones_own_counts_in_place_of_bytes() -> None:
    made = [("variable", name, n) for name, n in zip("abcd", (9, 1, 1, 1), strict=True)]

    def inverse(kind: str, name: str, nbytes: int) -> float:
        return float(np.float32(1 / nbytes))

    found = tasks_of(made, ps_tasks=2, ps_strategy="greedy", load=inverse)
    assert found == ["ps:0", "ps:1", "ps:0", "ps:1"]
    assert tasks_of(made, ps_tasks=2, ps_strategy="greedy") == ["ps:0", "ps:1", "ps:1", "ps:1"]


def test_a_strategy_may_be_any_function() -> None:
    def by_name(kind: str, name: str, nbytes: int) -> int:
        return 2 if name == "big" else 0

    made = [("variable", "big", 8), ("queue", "q", 0)]
    assert tasks_of(made, THREE, ps_strategy=by_name) == ["ps:2", "ps:0"]


def test_the_tasks_are_those_of_the_job_that_run_servers() -> None:
    made = [("variable", name, 0) for name in "abc"]
    sparse = {"ps": {3: "a:1", 5: "b:1"}, "eval": ["c:1"], "worker": ["d:1"]}
    assert tasks_of(made, sparse) == ["ps:3", "ps:5", "ps:3"]
    free = {"calculation": ["a:1"], "store": ["b:1"], "worker": ["c:1"]}
    assert tasks_of(made, free) == ["calculation:0", "store:0", "calculation:0"]
    assert tasks_of(made, free, ps_job="store") == ["store:0"] * 3
    assert tasks_of(made, THREE, ps_tasks=2) == ["ps:0", "ps:1", "ps:0"]
    assert tasks_of(made, ps_tasks=2, ps_job="store") == ["store:0", "store:1", "store:0"]
    assert replica_device_setter(THREE, ps_tasks=0) is None
    assert replica_device_setter(ps_tasks=0) is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, SchemaError, r"^replica_device_setter: give a cluster, a session or ps_tasks=$"),
        (
            {"cluster": THREE, "ps_job": "store"},
            UnknownName,
            r"^no server of the job 'store'; there are \['ps:0', 'ps:1', 'ps:2'\]$",
        ),
        (
            {"cluster": THREE, "ps_job": "worker"},
            UnknownName,
            r"^no server of the job 'worker'; there are \['ps:0', 'ps:1', 'ps:2'\]$",
        ),
        (
            {"cluster": THREE, "ps_tasks": 4},
            UnknownName,
            r"^ps_tasks=4; there are \['ps:0', 'ps:1', 'ps:2'\]$",
        ),
        (
            {"ps_tasks": -1},
            SchemaError,
            r"^ps_tasks is a whole number, 0 or more, not -1$",
        ),
        (
            {"cluster": THREE, "ps_strategy": "random"},
            SchemaError,
            r"^ps_strategy is 'round_robin', 'greedy' or a function, not 'random'$",
        ),
        (
            {"cluster": THREE, "load": len},
            SchemaError,
            r"^load= is for ps_strategy='greedy', not 'round_robin'$",
        ),
        (
            {"cluster": THREE, "ps_strategy": "greedy", "load": 5},
            SchemaError,
            r"^load= is a function of the kind, the name and the bytes, not 5$",
        ),
        *(
            (
                {"cluster": cluster},
                SchemaError,
                rf"^replica_device_setter: a cluster is a spec, .* or a session, not {cluster!r}$",
            )
            for cluster in (5, "cluster.toml", Session)
        ),
        (
            {"ps_tasks": 2, "ps_job": 5},
            SchemaError,
            r"^ps_job is the name of a job, such as 'ps', not 5$",
        ),
        ({"cluster": {}}, SchemaError, r"^a cluster is a dict of jobs with their tasks, not {}$"),
    ],
)
def test_a_setter_that_cannot_be_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        replica_device_setter(**options)


def returning(found: Any) -> Callable[..., Any]:
    return lambda kind, name, nbytes: found


def test_a_strategy_or_a_load_that_returns_nonsense_is_an_error() -> None:
    with pytest.raises(
        UnknownName,
        match=r"^ps_strategy put the variable 'v' on server 3; there are \['ps:0', 'ps:1',",
    ):
        setter(THREE, ps_strategy=returning(3))("variable", "v", 0)
    with pytest.raises(
        SchemaError,
        match=r"^ps_strategy: the place of a server is a whole number, 0 or more, not 'ps:1'$",
    ):
        setter(THREE, ps_strategy=returning("ps:1"))("variable", "v", 0)
    for load in ("much", -1, float("nan"), float("inf")):
        with pytest.raises(
            SchemaError, match=rf"^load: a load is a number, 0 or more, not {load!r} for 'v'$"
        ):
            Greedy(2, returning(load))("variable", "v", 0)


def test_a_strategy_may_ask_its_own_setter_but_not_for_the_same() -> None:
    seen = []

    def strategy(kind: str, name: str, nbytes: int) -> int:
        if name != "inner":
            seen.append((name, choose("counter", "inner", 0)))
        return len(name) % 3

    choose = setter(THREE, ps_strategy=strategy)
    assert Call(lambda: choose("variable", "v", 8)).outcome() == "ps:1"
    assert seen == [("v", "ps:2")]

    def endless(kind: str, name: str, nbytes: int) -> int:
        again("variable", "b" if name == "a" else "a", 0)
        return 0

    again = setter(THREE, ps_strategy=endless)
    for _ in range(2):
        with pytest.raises(
            SchemaError, match=r"^ps_strategy makes the variable 'a' when asked where that goes$"
        ):
            again("variable", "a", 0)


def test_threads_may_share_a_setter_and_it_counts_each_name_once() -> None:
    choose = setter(ps_tasks=4)
    start = threading.Barrier(4)

    def ask() -> list[str | None]:
        start.wait(20)
        return [choose("variable", f"v{n}", 8) for n in range(200)]

    answers = [call.outcome() for call in [Call(ask) for _ in range(4)]]
    assert all(answer == answers[0] for answer in answers)
    assert [answers[0].count(f"ps:{n}") for n in range(4)] == [50] * 4


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[paceline.ClusterSpec]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = cluster(tmp_path, ps=3, worker=2)
    with served(made):
        yield made


def homes(session: Session) -> dict[str, str]:
    found: dict[str, str] = session.resources()["homes"]
    return found


def test_a_setter_spreads_what_a_session_makes(spec: paceline.ClusterSpec) -> None:
    with Session(spec, job="worker", index=0) as one, Session(spec, job="worker", index=1) as two:
        assert one.servers() == ["ps:0", "ps:1", "ps:2"]
        for session in (one, two):
            with session.device(replica_device_setter(session)):
                weights = session.variable("w", np.zeros(3))
                session.queue("q", 4)
                session.counter("c")
                session.variable("w", np.zeros(3))
                # With its variable, which does not count as a turn.
                session.accumulator("a", variable=weights)
                session.barrier("b", 2)
            session.variable("outside", 1)
        assert homes(two) == {
            "variable w": "ps:0",
            "queue q": "ps:1",
            "counter c": "ps:2",
            "accumulator a": "ps:0",
            "barrier b": "ps:0",
            "variable outside": "ps:0",
        }


def test_greedy_counts_the_bytes_of_variables_and_gradients(spec: paceline.ClusterSpec) -> None:
    seen = []

    def load(kind: str, name: str, nbytes: int) -> int:
        seen.append((kind, name, nbytes))
        return nbytes

    with Session(spec, job="worker", index=0) as session:
        with session.device(replica_device_setter(spec, ps_strategy="greedy", load=load)):
            session.variable("v", {"w": np.zeros((3, 4)), "b": np.zeros(4, np.float32), "n": 1})
            session.accumulator("a", like=np.zeros(10, np.float32))
            session.queue("q", 4)
            session.variable("u", np.zeros(1))
            session.variable("x", np.zeros(1))
        assert seen == [
            ("variable", "v", 112),
            ("accumulator", "a", 40),
            ("queue", "q", 0),
            ("variable", "u", 8),
            ("variable", "x", 8),
        ]
        assert [*homes(session).values()] == ["ps:0", "ps:1", "ps:2", "ps:2", "ps:2"]


def test_blocks_of_devices_nest_and_the_first_proposal_decides(spec: paceline.ClusterSpec) -> None:
    nowhere: dict[str, str] = {}
    with Session(spec, job="worker", index=0) as session:
        with session.device(replica_device_setter(session, ps_job="ps", ps_tasks=2)):
            session.variable("a", 0)
            with session.device("ps:2"):
                session.variable("b", 0)
                with session.device(None):
                    session.variable("c", 0)
                session.variable("d", 0)
            session.variable("e", 0)
            with pytest.raises(KeyError):
                with session.device(lambda kind, name, nbytes: nowhere[name]):
                    session.variable("f", 0)
            session.variable("b", 7)
            session.variable("g", 0)
        with session.device(lambda kind, name, nbytes: None):
            session.variable("h", 0)
        found = {name.split()[1]: task for name, task in homes(session).items()}
        assert found == {
            "a": "ps:0",
            "b": "ps:2",
            "c": "ps:0",
            "d": "ps:2",
            "e": "ps:1",
            "g": "ps:1",
            "h": "ps:0",
        }


def test_what_a_strategy_makes_is_proposed_like_all_else_in_the_block(
    spec: paceline.ClusterSpec,
) -> None:
    with Session(spec, job="worker", index=0) as session:

        def strategy(kind: str, name: str, nbytes: int) -> int:
            if kind == "counter":
                return 2
            session.counter("made").add()
            return 1

        def make() -> int:
            with session.device(replica_device_setter(session, ps_strategy=strategy)):
                session.variable("v", 0)
            return session.counter("made", None).value

        assert Call(make).outcome() == 1
        assert homes(session) == {"counter made": "ps:2", "variable v": "ps:1"}


def test_a_device_holds_for_its_thread_alone(spec: paceline.ClusterSpec) -> None:
    with Session(spec, job="worker", index=0) as session:
        with session.device("ps:2"):
            Call(lambda: session.variable("theirs", 0)).outcome()
            session.variable("mine", 0)
        assert homes(session) == {"variable theirs": "ps:0", "variable mine": "ps:2"}


def test_a_setter_that_returns_no_server_is_an_error_and_nothing_is_made(
    spec: paceline.ClusterSpec,
) -> None:
    with Session(spec, job="worker", index=0) as session:
        for found, error, message in (
            ("ps:7", UnknownName, "ps:7 runs no server; there are"),
            (1, SchemaError, "a task is a text such as 'ps:1', not 1$"),
        ):
            with pytest.raises(error, match=rf"^device: the variable 'v': {message}"):
                with session.device(returning(found)):
                    session.variable("v", 1)
        with pytest.raises(SchemaError, match=r"^a task is a text such as 'ps:1', not 1$"):
            with session.device(1):  # type: ignore[arg-type]
                pass
        assert homes(session) == {}


def test_with_one_server_or_none_a_setter_has_nothing_to_choose() -> None:
    with Session() as session:
        assert session.servers() == []
        assert replica_device_setter(session, ps_tasks=2) is None
        with session.device(replica_device_setter(session)):
            assert session.variable("v", 1).read().tree == 1
