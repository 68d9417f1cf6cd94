"""Accumulators: means of many workers' gradients, and what happens when one of them is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from calls import DEADLINE_SECONDS, Call, until, waits
from clusters import every_engine, quiet, slow_beside
from hands import cluster, served
from wires import wired

from paceline import (
    Accumulator,
    SchemaError,
    Session,
    TimedOut,
    UnknownName,
    WorkerLeft,
    WouldBlock,
)
from paceline.server.local import LocalServer
from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier

SECRET = b"a secret of sixteen bytes"

pytestmark = pytest.mark.timeout(120)


def accounted(accumulator: Accumulator) -> dict[str, Any]:
    """Its counters, whose sum is right."""
    stats = accumulator.stats()
    assert stats["applied"] == stats["taken"] + sum(stats["dropped"].values()) + stats["held"]
    return stats


def test_a_mean_is_of_the_first_n_in_their_own_dtypes(server: Serving) -> None:
    chief = server.session(job="chief")
    policy = chief.variable("v", {"w": np.zeros((2, 50_000), np.float32), "b": np.zeros(1)})
    gradients = chief.accumulator("g", variable=policy)
    for value in (1.0, 4.0, 1000.0):
        mine = server.session(job="worker").accumulator("g", timeout=0)
        gradient = {"w": np.full((2, 50_000), value, np.float32), "b": np.array([value / 4])}
        assert mine.apply(gradient, policy.version)
    found = gradients.take(2)
    assert (found.n, found.workers, found.lags) == (2, ("worker:0", "worker:1"), (0, 0))
    assert found.version == policy.version
    assert (found.tree["w"].dtype, found.tree["b"].dtype) == (np.float32, np.float64)
    assert (found.tree["w"] == 2.5).all()
    found.tree["b"] += 1
    assert found.tree["b"].tolist() == [1.625]
    assert accounted(gradients)["dropped"] == {"late": 1}


def test_what_was_made_with_an_older_version_is_dropped_and_counted(server: Serving) -> None:
    session = server.session()
    policy = session.variable("v", np.zeros(3))
    gradients = session.accumulator("g", variable="v")
    old = policy.version
    assert gradients.apply(np.ones(3), old)
    policy.assign(np.zeros(3))
    assert accounted(gradients)["dropped"] == {"stale": 1}
    assert gradients.apply(np.ones(3), old) is False
    assert gradients.apply(np.ones(3), policy.version) is True
    assert gradients.take(1, timeout=0).n == 1
    assert gradients.apply(np.ones(3), policy.version) is False
    policy.assign_add(np.ones(3))
    assert gradients.apply(np.ones(3), policy.version) is True
    assert accounted(gradients)["dropped"] == {"stale": 2, "late": 1}


def test_with_a_lag_allowed_older_ones_count_and_say_how_old_they_are(server: Serving) -> None:
    session = server.session()
    policy = session.variable("v", 0.0)
    gradients = session.accumulator("g", variable=policy, max_lag=2)
    versions = [policy.version, *(policy.assign(0.0) for _ in range(3))]
    assert [gradients.apply(1.0, each) for each in versions] == [False, True, True, True]
    assert gradients.take(3).lags == (2, 1, 0)


def test_without_a_variable_nothing_is_too_old(server: Serving) -> None:
    session = server.session()
    losses = session.accumulator("loss", like={"loss": 0.0, "n": np.float32(0)})
    for value in range(4):
        assert losses.apply({"loss": float(value), "n": np.float32(1)})
    found = [losses.take(2) for _ in range(2)]
    assert [each.tree["loss"] for each in found] == [0.5, 2.5]
    assert [each.version for each in found] == [None, None]
    with pytest.raises(SchemaError, match=r"^apply 'loss': version=3, but it is linked to no var"):
        losses.apply({"loss": 0.0, "n": np.float32(1)}, 3)


def test_a_take_waits_for_the_last_and_a_timeout_takes_nothing(server: Serving) -> None:
    chief, worker = server.session(job="chief"), server.session(job="worker")
    policy = chief.variable("v", 0.0)
    gradients = chief.accumulator("g", variable=policy)
    mine = worker.accumulator("g")
    mine.apply(1.0, policy.version)
    with pytest.raises(
        TimedOut,
        match=r"^take\(2\) of 'g': 1 accepted \(worker:0\), 1 missing; contributors: worker:0;"
        r" whoever applies one of version 1 ends the wait; members: chief:0, worker:0, after 0\.\d",
    ):
        gradients.take(2, timeout=0.05)
    waiting = Call(lambda: gradients.take(2, timeout=DEADLINE_SECONDS).tree)
    until(lambda: waits(worker, "mean") == 1)
    mine.apply(4.0, policy.version)
    assert waiting.outcome() == 2.5
    with pytest.raises(TimedOut, match=r"the step of version 1 of 'v' was taken, the next assign"):
        gradients.take(1, timeout=0)


def test_takers_are_served_in_the_order_they_asked(server: Serving) -> None:
    first, second, worker = (server.session() for _ in range(3))
    sums = worker.accumulator("g", like=0.0)
    takers = [session.accumulator("g") for session in (first, second)]
    one = Call(lambda: takers[0].take(3, timeout=DEADLINE_SECONDS).tree)
    until(lambda: waits(worker, "mean") == 1)
    sums.apply(1.0)
    two = Call(lambda: takers[1].take(1, timeout=DEADLINE_SECONDS).tree)
    until(lambda: waits(worker, "mean") == 2)
    for value in (2.0, 3.0, 4.0):
        sums.apply(value)
    assert (one.outcome(), two.outcome()) == (2.0, 4.0)


def test_who_gave_up_taking_holds_nobody_up(server: Serving) -> None:
    first, second, worker = (server.session() for _ in range(3))
    sums = worker.accumulator("g", like=0.0)
    many = first.accumulator("g")
    one = Call(lambda: many.take(3, timeout=DEADLINE_SECONDS))
    until(lambda: waits(worker, "mean") == 1)
    few = second.accumulator("g")
    two = Call(lambda: few.take(1, timeout=DEADLINE_SECONDS).tree)
    until(lambda: waits(worker, "mean") == 2)
    sums.apply(1.0)
    first.close()
    assert two.outcome() == 1.0
    with pytest.raises(Exception, match="closed"):
        one.outcome()


def test_whose_time_to_take_is_up_holds_nobody_up(server: Serving) -> None:
    first, second, worker = (server.session() for _ in range(3))
    sums = worker.accumulator("g", like=0.0)
    many, few = first.accumulator("g"), second.accumulator("g")
    one = Call(lambda: many.take(3, timeout=1.0))
    until(lambda: waits(worker, "mean") == 1)
    sums.apply(1.0)
    assert few.take(1, timeout=DEADLINE_SECONDS).tree == 1.0
    with pytest.raises(TimedOut):
        one.outcome()


def test_a_full_accumulator_makes_those_who_apply_wait(server: Serving) -> None:
    session, worker = server.session(), server.session()
    policy = session.variable("v", 0.0)
    gradients = session.accumulator("g", variable=policy, capacity=2)
    mine, version = worker.accumulator("g"), policy.version
    for _ in range(2):
        mine.apply(0.0, version)
    with pytest.raises(TimedOut, match=r"^apply 'g': it holds capacity=2 gradients; whoever takes"):
        mine.apply(0.0, version, timeout=0.05)
    with pytest.raises(SchemaError, match=r"^take\(3\) of 'g': it holds 2 at most; take fewer, or"):
        gradients.take(3)
    waiting = Call(lambda: mine.apply(0.0, version, timeout=DEADLINE_SECONDS))
    until(lambda: waits(session, "accumulator room") == 1)
    policy.assign(0.0)
    assert waiting.outcome() is False
    assert accounted(gradients)["dropped"] == {"stale": 3}


def test_a_take_makes_room(server: Serving) -> None:
    session, worker = server.session(), server.session()
    sums, mine = (
        session.accumulator("g", like=0.0, capacity=1),
        worker.accumulator("g", like=0.0, capacity=1),
    )
    mine.apply(1.0)
    waiting = Call(lambda: mine.apply(2.0, timeout=DEADLINE_SECONDS))
    until(lambda: waits(session, "accumulator room") == 1)
    assert sums.take(1).tree == 1.0
    assert waiting.outcome() is True
    assert sums.take(1).tree == 2.0


# Who leaves


def test_who_leaves_ends_the_wait_with_its_name_or_lowers_it(server: Serving) -> None:
    chief = server.session(job="chief")
    policy = chief.variable("v", 0.0)
    gradients = chief.accumulator("g", variable=policy)
    workers = [server.session(job="worker") for _ in range(3)]
    mine = [worker.accumulator("g") for worker in workers]
    for each in mine:
        each.join()
    for each in mine[:2]:
        each.apply(1.0, policy.version)
    waiting = Call(lambda: gradients.take(3, timeout=DEADLINE_SECONDS))
    until(lambda: waits(chief, "mean") == 1)
    workers[2].close()
    message = r"^take\(3\) of 'g': worker:2 left; 2 accepted, and contributors are worker:0, worker"
    with pytest.raises(WorkerLeft, match=message):
        waiting.outcome()
    assert gradients.take(3, on_leave="lower", timeout=0).n == 2
    policy.assign(0.0)
    waiting = Call(lambda: gradients.take(3, on_leave="lower", timeout=DEADLINE_SECONDS).workers)
    until(lambda: waits(chief, "mean") == 1)
    mine[0].apply(1.0, policy.version)
    assert waits(chief, "mean") == 1
    mine[1].leave()
    assert waiting.outcome() == ("worker:0",)
    policy.assign(0.0)
    workers[0].close()
    with pytest.raises(WorkerLeft, match=r"contributors are nobody: not enough for 1$"):
        gradients.take(1, on_leave="lower", timeout=DEADLINE_SECONDS)


def test_with_nobody_left_a_take_waits_for_others_if_told(server: Serving) -> None:
    chief, one = server.session(job="chief"), server.session(job="worker")
    sums = chief.accumulator("g", like=0.0)
    one.accumulator("g").join()
    one.close()
    with pytest.raises(TimedOut, match=r"0 accepted, 1 missing; left: worker:0; contributors: nob"):
        sums.take(1, on_leave="wait", timeout=0)
    waiting = Call(lambda: sums.take(1, on_leave="wait", timeout=DEADLINE_SECONDS).tree)
    until(lambda: waits(chief, "mean") == 1)
    server.session(job="worker").accumulator("g").apply(2.0)
    assert waiting.outcome() == 2.0


def test_who_comes_back_is_counted_on_again(server: Serving) -> None:
    chief, one, two = (server.session(job=job) for job in ("chief", "worker", "worker"))
    sums = chief.accumulator("g", like=0.0)
    with one.accumulator("g"), two.accumulator("g"):
        assert sums.stats()["contributors"] == ["worker:0", "worker:1"]
    assert sums.stats()["left"] == ["worker:1", "worker:0"]
    one.close()
    again = server.session(job="worker", index=0).accumulator("g")
    two.accumulator("g").join()
    again.apply(0.0)
    assert sums.stats()["left"] == []
    sums.take(1)
    waiting = Call(lambda: sums.take(2, timeout=DEADLINE_SECONDS).tree)
    until(lambda: waits(chief, "mean") == 1)
    again.apply(1.0)
    two.accumulator("g").apply(2.0)
    assert waiting.outcome() == 1.5


APPLY = """
import sys
from paceline.session import Session
import numpy as np
session = Session(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), job="worker")
policy, gradients = session.variable("v"), session.accumulator("g")
gradients.apply(np.full(100_000, 3.0), policy.version)
session.queue("never").dequeue(timeout=None)
"""


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_what_a_killed_worker_gave_counts_and_then_it_is_missed_by_name(carrier: Carrier) -> None:
    with serving(carrier) as server:
        chief = server.session(job="chief")
        policy = chief.variable("v", np.zeros(100_000))
        gradients = chief.accumulator("g", variable=policy)
        chief.queue("never", 1)
        command = [sys.executable, "-c", APPLY, server.target, server.secret.hex()]
        with subprocess.Popen(command) as child:
            until(lambda: gradients.stats()["held"] == 1)
            child.kill()
        until(lambda: gradients.stats()["left"] == ["worker:0"])
        gradients.apply(np.full(100_000, 4.0), policy.version)
        found = gradients.take(2, timeout=0)
        assert found.workers == ("worker:0", "chief:0")
        assert (found.tree == 3.5).all()
        policy.assign(np.zeros(100_000))
        with pytest.raises(WorkerLeft, match=r"^take\(2\) of 'g': worker:0 left; 0 accepted"):
            gradients.take(2, timeout=DEADLINE_SECONDS)


def test_an_apply_whose_reply_was_lost_counts_once() -> None:
    # The chief's connection stays; the others are cut in the middle of whatever is under way.
    cuts = [None, *range(900, 2400, 100), None]
    with wired(iter(cuts)) as (_, wire), wire.session() as chief, wire.session() as session:
        sums = chief.accumulator("g", like=0.0)
        mine = session.accumulator("g")
        for number in range(60):
            assert mine.apply(float(number))
        assert wire.carried > 2
        assert sums.stats()["applied"] == 60
        assert sums.take(60).tree == sum(range(60)) / 60


# Definition


def test_an_accumulator_has_one_definition(server: Serving) -> None:
    one, other = server.session(), server.session()
    waiting = Call(lambda: other.accumulator("g", timeout=DEADLINE_SECONDS))
    until(lambda: waits(one, "accumulator") == 1)
    one.variable("v", np.zeros(2))
    made = one.accumulator("g", variable="v", max_lag=None, capacity=9)
    found = waiting.outcome()
    assert (found.variable, found.max_lag, found.capacity) == ("v", None, 9)
    assert repr(made).startswith("<Accumulator 'g' for 'v' on ")
    with pytest.raises(
        SchemaError,
        match=r"^accumulator 'g' exists with variable='v', max_lag=None, capacity=9; asked for:"
        r" variable='v', max_lag=0, capacity=64$",
    ):
        other.accumulator("g", variable="v")
    with pytest.raises(
        SchemaError, match=r"^accumulator 'g': leaf \$ is float64\[3\], declared float64\[2\]$"
    ):
        other.accumulator("g", variable="v", max_lag=None, capacity=9, like=np.zeros(3))
    with pytest.raises(TimedOut, match=r"^no accumulator 'h'; there are \['g'\]; whoever calls"):
        other.accumulator("h", timeout=0)
    with pytest.raises(UnknownName, match=r"^no variable 'w'; there are \['v'\]$"):
        other.accumulator("h", variable="w")
    assert list(one.resources()["accumulators"]) == ["g"]


def test_a_gradient_of_another_structure_or_version_is_refused(server: Serving) -> None:
    session = server.session()
    policy = session.variable("v", {"w": np.zeros(2), "b": np.zeros(1)})
    gradients = session.accumulator("g", variable=policy)
    good = {"b": np.zeros(1), "w": np.zeros(2)}
    with pytest.raises(SchemaError, match=r"^apply 'g': leaf \$\.b is missing, declared float64"):
        gradients.apply({"w": np.zeros(2)}, policy.version)
    with pytest.raises(SchemaError, match=r"^apply 'g': it needs the version of 'v' that the gra"):
        gradients.apply(good)
    with pytest.raises(
        SchemaError, match=r"^apply 'g': version 2 is newer than 'v', which is at 1"
    ):
        gradients.apply(good, policy.version + 1)
    assert gradients.apply(good, policy.read().count) is False
    assert accounted(gradients)["dropped"] == {"epoch": 1}
    with pytest.raises(
        SchemaError, match=r"^take 'g': on_leave is 'raise', 'lower' or 'wait', not 'no'$"
    ):
        gradients.take(1, on_leave="no")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"^take 'g': n is a whole number, 1 or more, not 0$"):
        gradients.take(0)


def test_a_variable_with_whole_numbers_needs_the_gradients_structure(server: Serving) -> None:
    session = server.session()
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    policy = session.variable("v", net)
    with pytest.raises(
        SchemaError,
        match=r"^accumulator 'g': leaf \$\['1\.num_batches_tracked'\] is int64\[\], of which no",
    ):
        session.accumulator("g", variable=policy)
    like = dict(net.named_parameters())
    gradients = session.accumulator("g", variable=policy, like=like)
    net(torch.ones(4, 2)).sum().backward()
    gradients.apply({name: each.grad for name, each in net.named_parameters()}, policy.version)
    found = gradients.take(1).tree
    assert set(found) == set(like)
    assert found["1.bias"].tolist() == [4.0, 4.0]


class Layer(NamedTuple):
    w: Any
    b: float


def test_a_mean_comes_back_like_what_is_asked_for() -> None:
    with Session() as session:
        layer = Layer(np.zeros(2), 0.0)
        sums = session.accumulator("g", like=layer)
        sums.apply(Layer(np.ones(2), 1.0))
        found = sums.take(1, like=layer).tree
        assert isinstance(found, Layer)
        assert (found.w.tolist(), found.b) == ([1.0, 1.0], 1.0)


def test_what_nothing_can_end_is_refused_in_one_thread_and_changes_nothing() -> None:
    server = LocalServer(waits=False)
    one, other = (Session(channel=server.connect()) for _ in range(2))
    sums = one.accumulator("g", like=0.0, capacity=1)
    with pytest.raises(WouldBlock, match=r"^take\(1\) of 'g': 0 accepted, 1 missing; contributors"):
        other.accumulator("g").take(1)
    sums.apply(1.0)
    with pytest.raises(WouldBlock, match=r"^apply 'g': it holds capacity=1 gradients; whoever tak"):
        sums.apply(2.0)
    assert other.accumulator("g").take(1).tree == 1.0
    assert accounted(sums)["applied"] == 1
    server.close()


def test_a_large_sum_is_made_beside_the_requests_of_others() -> None:
    server = LocalServer()
    work: list[Any] = []
    server.service.run_long = lambda do, finish: work.append((do, finish))
    chief, worker = (Session(channel=server.connect()) for _ in range(2))
    sums = chief.accumulator("g", like=np.zeros(200_000))
    mine = worker.accumulator("g")
    for value in (1.0, 2.0):
        mine.apply(np.full(200_000, value))
    waiting = Call(lambda: sums.take(2, timeout=DEADLINE_SECONDS).tree)
    until(lambda: work)
    assert mine.apply(np.zeros(200_000))
    assert accounted(mine)["held"] == 1
    do, finish = work.pop()
    do()
    finish(None)
    assert (waiting.outcome() == 1.5).all()
    server.close()


# Training


def trains(policy: Any, gradients: Accumulator, steps: int, victim: str) -> int:
    """Gradients of (w - 3)^2 / 2; one worker kills itself in mid-run, once."""
    applied, version = 0, None
    with gradients:
        while True:
            snapshot = policy.read(newer_than=version, timeout=60)
            version = snapshot.version
            if snapshot.count > steps:
                return applied
            if snapshot.count == steps // 2 and victim and first_to_make(victim):
                os.kill(os.getpid(), signal.SIGKILL)
            applied += gradients.apply(snapshot.tree - 3.0, version)


def first_to_make(file: str) -> bool:
    try:
        Path(file).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def learns(policy: Any, gradients: Accumulator, n: int, steps: int, on_leave: Any) -> list[int]:
    """The chief's side: how many gradients each step was of."""
    sizes = []
    while policy.read().count <= steps:
        mean = gradients.take(n, on_leave=on_leave, timeout=60)
        sizes.append(mean.n)
        policy.assign(policy.read().tree - 0.2 * mean.tree)
    return sizes


@pytest.mark.parametrize("engine", ["threads", slow_beside])
def test_workers_train_in_step(engine: str) -> None:
    with quiet(3, engine) as cluster:
        policy = cluster.variable("w", np.zeros(2))
        gradients = cluster.accumulator("g", variable=policy)
        run = Call(lambda: cluster.run(trains, policy, gradients, 40, ""))
        assert learns(policy, gradients, 3, 40, "raise") == [3] * 40
        assert run.outcome() == [40, 40, 40]
        assert policy.read().tree == pytest.approx([3.0, 3.0], abs=1e-3)
        assert accounted(gradients)["dropped"] == {}


def test_training_goes_on_with_fewer_while_a_killed_worker_is_restarted(tmp_path: Path) -> None:
    with quiet(3) as cluster:
        policy = cluster.variable("w", np.zeros(2))
        gradients = cluster.accumulator("g", variable=policy)
        run = Call(lambda: cluster.run(trains, policy, gradients, 40, str(tmp_path / "dead")))
        sizes = learns(policy, gradients, 3, 40, "lower")
        run.outcome()
        assert (len(sizes), set(sizes) <= {2, 3}) == (40, True)
        assert sizes[:18] == [3] * 18
        assert policy.read().tree == pytest.approx([3.0, 3.0], abs=1e-3)


@every_engine
def test_an_accumulator_travels_to_workers_in_functions(engine: str) -> None:
    def give(value: float, sums: Accumulator) -> bool:
        return sums.apply(value)

    with quiet(2, engine) as cluster:
        sums = cluster.accumulator("g", like=0.0)
        assert cluster.map(give, [1.0, 2.0, 6.0], sums) == [True] * 3
        assert sums.take(3).tree == 3.0


def test_an_accumulator_is_where_its_variable_is(tmp_path: Path) -> None:
    spec = cluster(tmp_path, ps=2, chief=1, worker=1)
    with served(spec, secret=SECRET), Session(spec, secret=SECRET, job="chief", index=0) as chief:
        with chief.device("ps:1"):
            policy = chief.variable("v", np.zeros(2))
        gradients = chief.accumulator("g", variable=policy)
        with Session(spec, secret=SECRET, job="worker", index=0) as worker:
            mine = worker.accumulator("g")
            assert mine.apply(np.ones(2), worker.variable("v").version)
            assert gradients.take(1).tree.tolist() == [1.0, 1.0]
            assert worker.accumulator("g", variable="v").stats()["taken"] == 1
