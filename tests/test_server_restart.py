"""Servers of a launched cluster that are killed, and come back with what was saved."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, waits
from clusters import LIMIT, accounted, following, named, quiet, runs, until

import paceline
from paceline import checkpoints, keeping

pytestmark = pytest.mark.timeout(240)


def killed(task: str = "ps:0") -> int:
    """Kill a server of this process's cluster; which process that was."""
    pid = named(task, os.getpid())
    os.kill(pid, signal.SIGKILL)
    return pid


def back(cluster: paceline.Cluster, task: str = "ps:0", count: int = 1) -> None:
    """Wait until a server has been started again and answers."""

    def there() -> bool:
        try:
            return cluster.stats().restarted.get(task) == count
        except (paceline.Disconnected, paceline.TimedOut):
            return False

    until(there)


@pytest.mark.parametrize("carrier", ["unix", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_collection_goes_on_with_the_same_workers(carrier: Any, tmp_path: Path) -> None:
    with quiet(2, checkpoint=tmp_path, transport=carrier, save_every=None) as cluster:
        policy, steps = cluster.variable("policy", np.zeros(2)), cluster.counter("steps", 4)
        net, version, pids = np.zeros(2), policy.version, []
        batches = cluster.collect(following, policy, batch_size=2)
        for turn in range(6):
            batch = batches.next(timeout=LIMIT)
            assert batch.lag.tolist() == [0, 0] or turn % 3
            pids.append(set(batch.data["pid"].tolist()))
            net += 1
            before, version = version, policy.assign(net)
            assert version > before
            assert steps.add() > 4
            if turn % 3 == 2:
                cluster.save()
                killed()
        assert accounted(batches.stats())
        assert policy.read().tree.tolist() == [6.0, 6.0]
        assert steps.value == 4 + 6
        assert len(set.union(*pids)) <= 2
        assert cluster.stats().restarted == {"ps:0": 2}
        assert "ps:0      was started again 2 times" in str(cluster.stats())
    assert len(checkpoints.found(tmp_path)) >= 2


def test_the_trainer_that_waits_for_a_batch_gets_it(tmp_path: Path) -> None:
    def once_told(gate: str, policy: Any) -> Iterator[Any]:
        while True:
            until(lambda: os.path.exists(gate))
            yield policy.read().tree

    with quiet(1, checkpoint=tmp_path / "run") as cluster:
        policy = cluster.variable("policy", np.arange(3.0))
        cluster.save()
        gate = tmp_path / "gate"
        batches = cluster.collect(once_told, str(gate), policy, batch_size=1)
        call = Call(lambda: batches.next(timeout=LIMIT))
        until(lambda: waits(cluster.session, "batch"))
        killed()
        back(cluster)
        gate.touch()
        assert call.outcome().data.tolist() == [[0, 1, 2]]


def test_workers_that_wait_go_on_waiting(tmp_path: Path) -> None:
    def reads(_: int, w: Any, version: int) -> float:
        return float(w.read(newer_than=version, timeout=LIMIT).tree)

    def enqueues(_: int, full: Any) -> int:
        full.enqueue(2, timeout=LIMIT)
        return 1

    def counts(_: int, steps: Any) -> int:
        return int(steps.wait_for(3, LIMIT))

    def meets(_: int, meeting: Any) -> int:
        return int(meeting.wait(timeout=LIMIT))

    with quiet(4, checkpoint=tmp_path) as cluster:
        w, steps = cluster.variable("w", 0.5), cluster.counter("steps")
        full, meeting = cluster.queue("full", 1), cluster.barrier("meeting", 2)
        full.enqueue(1)
        cluster.save()
        asked = [
            cluster.submit(reads, 0, w, w.version),
            cluster.submit(enqueues, 0, full),
            cluster.submit(counts, 0, steps),
            cluster.submit(meets, 0, meeting),
        ]
        for kind in ("variable", "room", "count", "arrivals"):
            until(functools.partial(waits, cluster.session, kind))
        killed()
        # What was in the queue is lost with the server.
        assert full.dequeue(timeout=LIMIT) == 2
        assert w.assign(1.5) > 0
        assert steps.add(3) == 3
        assert meeting.wait(LIMIT) in (0, 1)
        assert asked[0].result(LIMIT) in (0.5, 1.5)
        assert [each.result(LIMIT) for each in asked[1:3]] == [1, 3]
        assert asked[3].result(LIMIT) in (0, 1)


def test_who_asks_while_it_is_away_waits_for_it_and_no_longer_than_told(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path) as cluster:
        w = cluster.variable("w", np.zeros(1))
        cluster.save()
        before = w.version
        killed()
        with pytest.raises(paceline.TimedOut, match=r"ps:0|cannot be reached|after"):
            w.read(newer_than=before, timeout=0.0)
        # Found anew, and made anew.
        assert cluster.variable("w", np.ones(1)).read().tree.tolist() == [0.0]
        assert cluster.queue("later", 3).size == 0
        assert w.version > before


@pytest.mark.slow
def test_several_servers_come_back_each_with_what_it_had(tmp_path: Path) -> None:
    with quiet(1, ps=3, checkpoint=tmp_path) as cluster:
        session = cluster.session
        for index in range(3):
            with session.device(f"ps:{index}"):
                cluster.variable(f"w{index}", np.full(2, float(index)))
        table = session.spread("table", {str(n): np.full(4, float(n)) for n in range(6)})
        cluster.save()
        homes = session.resources()["homes"]
        batches = cluster.collect(following, cluster.variable("w1"), batch_size=1)
        for turn, task in enumerate(("ps:0", "ps:1", "ps:2")):
            killed(task)
            back(cluster, task)
            batches.next(timeout=LIMIT)
            for index in range(3):
                assert cluster.variable(f"w{index}").read().tree.tolist() == [index, index]
            assert table.read(timeout=LIMIT).tree["5"].tolist() == [5.0] * 4
            there = session.resources()["homes"]
            assert {name: there[name] for name in homes if "w" in name} == {
                name: home for name, home in homes.items() if "w" in name
            }
            assert turn < 3


def test_beyond_its_budget_all_ends_and_says_why(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path, restarts=0) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        batches = cluster.collect(following, policy, batch_size=100_000)
        call = Call(_killed_while_the_trainer_waits, cluster)
        with pytest.raises(paceline.Disconnected, match=r"ps:0, was killed by SIGKILL.*restarts=0"):
            batches.next(timeout=None)
        call.outcome()
        with pytest.raises(paceline.Disconnected, match=r"ps:0, was killed by SIGKILL"):
            policy.assign(np.ones(1))
        workers = [named("worker:0", os.getpid())]
    assert not any(map(runs, workers))


def test_a_collection_whose_variable_was_never_saved_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "TICK", 1000.0)
    with quiet(1, checkpoint=tmp_path) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        batches = cluster.collect(following, policy, batch_size=1)
        batches.next(timeout=LIMIT)
        killed()
        back(cluster)
        with pytest.raises(paceline.Disconnected, match=r"lost with its server: no variable"):
            batches.next(timeout=LIMIT)
        # It is given a value anew, as any variable.
        policy = cluster.variable("policy", np.ones(1))
        assert cluster.collect(following, policy, batch_size=1).next(timeout=LIMIT).lag == [0]


@pytest.mark.slow
def test_lockstep_ends_with_its_server(tmp_path: Path) -> None:
    with quiet(2, checkpoint=tmp_path) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        cluster.save()
        batches = cluster.collect(following, policy, batch_size=2, schedule="lockstep")
        batches.next(timeout=LIMIT)
        killed()
        with pytest.raises(paceline.Disconnected, match=r"lost with its server; a run in lockstep"):
            batches.next(timeout=LIMIT)
        assert cluster.collect(following, policy, batch_size=2).next(timeout=LIMIT)


def test_what_is_closed_while_it_is_away_stays_closed(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        cluster.save()
        batches = cluster.collect(following, policy, batch_size=1)
        batches.next(timeout=LIMIT)
        killed()
        batches.close()
        again = cluster.collect(following, policy, batch_size=1)
        assert again.next(timeout=LIMIT).data["version"] == [policy.version]
        with pytest.raises(paceline.Closed, match=r"is closed$"):
            batches.next()


@pytest.mark.slow
def test_a_reset_container_comes_back_as_it_was_saved_since(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path) as cluster:
        cluster.variable("old", np.zeros(1))
        cluster.reset("")
        w = cluster.variable("w", np.ones(1))
        cluster.save()
        killed()
        assert w.read().tree.tolist() == [1.0]
        assert cluster.session.uninitialized(["w", "old"]) == ["old"]


def test_what_is_in_other_containers_comes_back_into_them(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path, save_every=None) as cluster:
        held = []
        for container, value in (("", 1.0), ("x", 2.0)):
            with cluster.container(container):
                held.append((cluster.variable("w", np.full(2, value)), cluster.counter("n")))
                held[-1][1].add(int(value))
        cluster.save()
        for w, _ in held:
            w.assign(np.zeros(2))
        killed()
        found = [(w.read().tree.tolist(), n.value) for w, n in held]
        assert found == [([1, 1], 1), ([2, 2], 2)]


@pytest.mark.parametrize("servers", [1, 2])
def test_readers_and_accumulators_go_on_with_what_was_saved(servers: int, tmp_path: Path) -> None:
    with quiet(1, ps=servers, checkpoint=tmp_path, save_every=None) as cluster:
        task = f"ps:{servers - 1}"
        with cluster.session.device(task):
            w = cluster.variable("w", np.zeros(2))
            reader = cluster.reader("files", list("abcd"))
        mean = cluster.accumulator("mean", variable=w, max_lag=1)
        free = cluster.accumulator("free", like=0.0)
        old = w.version
        with mean:
            assert reader.next().done()
            held = reader.next()
            mean.apply(np.ones(2), old)
            free.apply(3.0)
            cluster.save()
            assert held.done()
            later = reader.next()
            killed(task)
            # What is in hands that live is handed out again, as is what was done since.
            assert later.done() is False
            assert [piece.value for piece in reader] == ["b", "c", "d"]
            told = reader.stats()["epochs"][0]
            assert (told["done"], told["held"], told["waiting"]) == (4, 0, 0)
            assert told["redelivered"] == 1
            assert w.version > old
            assert mean.stats()["contributors"] == ["chief:0"]
            assert mean.apply(np.ones(2), old) is False
            assert mean.apply(np.full(2, 5.0), w.version)
            taken = mean.take(1)
            assert (taken.tree.tolist(), taken.lags) == ([5, 5], (0,))
            found = mean.stats()
            assert (found["applied"], found["taken"], found["dropped"]) == (3, 1, {"epoch": 2})
            kept = free.stats()
            # On the server that lived nothing was lost.
            lost = servers == 1
            assert (kept["applied"], kept["held"]) == (1, int(not lost))
            assert kept["dropped"] == ({"epoch": 1} if lost else {})


def test_pieces_of_a_worker_that_dies_with_its_server_are_done_by_another(tmp_path: Path) -> None:
    def works(files: Any, gate: str, done: Any, worker: paceline.Worker) -> list[Any]:
        mine = []
        for piece in files:
            if piece.value == 2 and not os.path.exists(gate):
                Path(gate).touch()
                # With its server, which is there by then: what it has in its hands is saved.
                os.kill(os.getpid(), signal.SIGSTOP)
            mine.append(piece.value)
            done.add()
        return mine

    gate = tmp_path / "gate"
    with quiet(2, checkpoint=tmp_path / "run", save_every=None) as cluster:
        files, done = cluster.reader("files", list(range(6))), cluster.counter("done")
        call = Call(lambda: cluster.run(works, files, str(gate), done))
        until(gate.exists)
        until(lambda: done.value == 5)
        cluster.save()
        killed()
        for name, pid in cluster.processes().items():
            if name.startswith("worker") and _stopped(pid):
                os.kill(pid, signal.SIGKILL)
        found = call.outcome()
        assert sorted(value for mine in found for value in mine)[-1:] == [5]
        told = files.stats()["epochs"][0]
        assert (told["done"], told["held"], told["waiting"]) == (6, 0, 0)
        assert told["redelivered"] >= 1


def test_what_was_not_asked_while_another_had_the_server_again_goes_on(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path, save_every=None) as cluster:
        reader = cluster.reader("files", [1])
        piece = reader.next()
        cluster.save()
        line = cluster.session.connection
        killed()
        # Nobody has asked anything of the dead one.
        until(lambda: not line.alive())
        assert cluster.session.lines.line("", LIMIT) is not line
        assert piece.done() is False
        assert reader.next().value == 1


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_reader_that_was_not_saved_is_waited_for(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path, save_every=None) as cluster:
        cluster.save()
        # It is made while nobody saves.
        assert cluster._keeper is not None
        with cluster._keeper._saving:
            reader = cluster.reader("files", [1, 2])
            mean = cluster.accumulator("mean", like=0.0)
            killed()
            with pytest.raises(paceline.TimedOut, match=r"^no reader 'files'; there are \[\]"):
                reader.next(timeout=5)
            call = Call(lambda: reader.next(timeout=LIMIT))
            until(lambda: waits(cluster.session, "reader"))
            cluster.reader("files", [1, 2])
            assert call.outcome().value == 1
            # Its maker knows how it was made.
            assert mean.apply(1.0)


@pytest.mark.slow
def test_a_cluster_that_is_closed_while_a_server_is_away_leaves_nothing(tmp_path: Path) -> None:
    cluster = quiet(1, checkpoint=tmp_path)
    policy = cluster.variable("policy", np.zeros(1))
    cluster.collect(following, policy, batch_size=1).next(timeout=LIMIT)
    killed()
    began = time.monotonic()
    cluster.close()
    assert time.monotonic() - began < LIMIT


@pytest.mark.slow
def test_one_that_is_killed_again_and_again_comes_back_each_time(tmp_path: Path) -> None:
    with quiet(1, checkpoint=tmp_path, restarts=20) as cluster:
        w = cluster.variable("w", np.ones(1))
        cluster.save()
        for _ in range(2):
            first = killed()
            # Maybe before it listens, maybe while what it held is brought back.
            until(functools.partial(_other, first))
            killed()
            assert w.read(timeout=LIMIT).tree.tolist() == [1.0]


def _killed_while_the_trainer_waits(cluster: paceline.Cluster) -> None:
    until(lambda: waits(cluster.session, "batch"))
    killed()


def _other(pid: int) -> bool:
    try:
        return named("ps:0", os.getpid()) != pid
    except (AssertionError, OSError):
        return False
