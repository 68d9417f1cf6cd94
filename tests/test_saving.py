"""What a session saves and restores by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hands
import numpy as np
import pytest
from clusters import every_engine, quiet

import paceline
from paceline import CheckpointError, SchemaError, UnknownName
from paceline.testing import Serving


def test_variables_come_back_in_another_cluster(tmp_path: Path, server: Serving) -> None:
    tree: dict[str, Any] = {"w": np.arange(6.0).reshape(2, 3), "n": 3}
    with paceline.Session() as session:
        session.variable("net", tree, memory=1 << 20)
        path = session.save(tmp_path, step=7)
        assert path.name == "checkpoint-000001-step-7"
    with server.session() as session:
        found = session.restore(tmp_path)
        assert found is not None
        assert (found.path, found.manifest.step) == (path, 7)
        net = session.variable("net")
        read = net.read().tree
        assert (read["w"].tobytes(), read["n"]) == (tree["w"].tobytes(), 3)
        assert net.memory()["bound"] == 1 << 20


def test_what_has_a_value_keeps_it(tmp_path: Path) -> None:
    with paceline.Session() as session:
        net = session.variable("net", np.zeros(2))
        session.save(tmp_path)
        net.assign(np.ones(2))
        version = net.version
        assert session.restore(tmp_path) is not None
        assert (net.version, net.read().tree.tolist()) == (version, [1, 1])


def test_all_containers_are_saved_wherever_the_session_is(tmp_path: Path) -> None:
    with paceline.Session() as session:
        session.variable("outside", 1)
        with session.container("x"):
            session.variable("inside", 2)
            session.save(tmp_path)
        session.reset()
        with session.container("y"):
            found = session.restore(tmp_path)
            assert found is not None
            assert session.uninitialized(["inside", "outside"]) == ["inside", "outside"]
        assert found.read("inside", container="x") == 2
        with pytest.raises(UnknownName, match=r"^no variable 'outside' in container 'x' in .* it"):
            found.read("outside", container="x")
        assert session.variable("outside", timeout=1).read().tree == 1
        with session.container("x"):
            assert session.variable("inside", timeout=1).read().tree == 2


def test_the_newest_ones_stay(tmp_path: Path) -> None:
    with paceline.Session() as session:
        number = session.variable("n", 0)
        for step in range(4):
            number.assign(step)
            session.save(tmp_path, step=step, keep=2)
        assert sorted(each.name for each in tmp_path.glob("checkpoint-*")) == [
            "checkpoint-000003-step-2",
            "checkpoint-000004-step-3",
        ]


def test_a_damaged_one_is_left_out_and_if_none_is_good_that_is_an_error(tmp_path: Path) -> None:
    with paceline.Session() as session:
        number = session.variable("n", np.zeros(1))
        first = session.save(tmp_path)
        number.assign(np.ones(1))
        second = session.save(tmp_path)
        session.reset()
        (second / "variable-0000.safetensors").unlink()
        found = session.restore(tmp_path)
        assert found is not None
        assert found.path == first
        assert session.variable("n").read().tree.tolist() == [0]
        (first / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"^no checkpoint in .* is good: "):
            session.restore(tmp_path)


def test_where_there_is_none_nothing_is_found(tmp_path: Path) -> None:
    with paceline.Session() as session:
        assert session.restore(tmp_path / "not there") is None


@every_engine
def test_a_launched_cluster_saves_and_restores(engine: str, tmp_path: Path) -> None:
    for step in range(2):
        with quiet(1, engine) as cluster:
            found = cluster.session.restore(tmp_path)
            assert (found is not None) == bool(step)
            policy = cluster.variable("policy", np.zeros(3))
            assert policy.read().tree.tolist() == [step] * 3
            policy.assign(np.ones(3))
            cluster.session.save(tmp_path, step=step)


def test_a_spread_variable_goes_to_another_number_of_servers(tmp_path: Path) -> None:
    tree = {"a": np.arange(3.0), "b": np.arange(4.0), "c": np.arange(5.0)}
    for count in (2, 3, 1):
        spec = hands.cluster(tmp_path, ps=count, worker=1)
        with hands.served(spec, secret=b"s" * 32):
            with paceline.Session(spec, job="worker", index=0, secret=b"s" * 32) as session:
                if session.restore(tmp_path / "saved") is None:
                    session.spread("net", tree)
                read = session.variable("net").read().tree
                assert {name: part.tobytes() for name, part in read.items()} == {
                    name: part.tobytes() for name, part in tree.items()
                }
                session.save(tmp_path / "saved")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"folder": 5}, r"^save: folder: the path of a folder, not 5"),
        ({"step": 1.5}, r"^save: step"),
        ({"keep": 0}, r"^save: keep"),
    ],
)
def test_what_is_no_argument_is_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with paceline.Session() as session:
        with pytest.raises(SchemaError, match=said):
            session.save(**{"folder": tmp_path, **options})
        with pytest.raises(SchemaError, match=r"^restore: folder: the path of a folder, not None"):
            session.restore(None)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []


def test_versions_go_on_when_what_was_reset_again_and_again_is_restored(tmp_path: Path) -> None:
    with paceline.Session(container="c") as session:
        session.variable("x", np.zeros(2))
        session.save(tmp_path)
        before = 0
        for _ in range(5):
            session.reset("c")
            before = session.variable("x", np.ones(2)).version
        session.reset("c")
        session.restore(tmp_path)
        assert session.variable("x").version > before
