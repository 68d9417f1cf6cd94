"""Lockstep: the same bits on every engine, because turns and what is read in them are fixed."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import (
    LIMIT,
    accounted,
    beside,
    every_engine,
    following,
    output,
    quiet,
    runs,
    script,
    until,
)

import paceline
from paceline import Closed, SchemaError, TimedOut, WorkerFailed
from paceline.core.versions import count_of
from paceline.preflight import limits

ENGINES = ("serial", "threads", "processes")


def episodes(policy: Any, worker: Any) -> Iterator[Any]:
    """Walks of a length that depends on the parameters and on chance."""
    random = np.random.default_rng(worker.seed)
    net = {"w1": np.zeros((3, 8)), "w2": np.zeros(8)}
    while True:
        policy.read_into(net)
        obs = [random.normal(size=3)]
        action: list[int] = []
        while len(action) < 30 and np.abs(obs[-1]).max() < 3:
            odds = 1 / (1 + np.exp(-(np.tanh(obs[-1] @ net["w1"]) @ net["w2"])))
            action.append(int(random.random() < odds))
            obs.append(obs[-1] * 0.9 + random.normal(size=3) + 0.1 * action[-1])
        worker.log(steps=len(action))
        yield {"obs": np.array(obs[:-1]).reshape(-1, 3), "action": np.array(action, np.int64)}


def trained(engine: str, seed: int, workers: int = 3, batch_size: int = 5) -> str:
    """The digest of everything that a run of twelve batches makes."""
    random = np.random.default_rng(seed)
    net = {"w1": random.normal(size=(3, 8)), "w2": random.normal(size=8)}
    digest = hashlib.sha256()
    with quiet(workers, engine, seed=seed) as cluster:
        policy = cluster.variable("policy", net)
        batches = cluster.collect(episodes, policy, batch_size=batch_size, schedule="lockstep")
        for number, batch in enumerate(batches, 1):
            for item in batch.items():
                hidden = np.tanh(item["obs"] @ net["w1"])
                error = len(item["action"]) / 30 - hidden @ net["w2"]
                slope = np.outer(error, net["w2"]) * (1 - hidden**2)
                net = {
                    "w1": net["w1"] + 0.01 * item["obs"].T @ slope,
                    "w2": net["w2"] + 0.01 * hidden.T @ error,
                }
            counts = [count_of(int(version)) for version in batch.version]
            made = (batch.worker, counts, batch.lag.tolist(), batch.metrics["steps"].tolist())
            digest.update(repr(made).encode())
            policy.assign(net)
            if number == 12:
                break
    for name in sorted(net):
        digest.update(net[name].tobytes())
    return digest.hexdigest()


def test_a_seed_gives_the_same_bits_on_every_engine_and_each_time() -> None:
    found = [trained(engine, 7) for engine in (*ENGINES, *ENGINES)]
    assert len(set(found)) == 1
    assert trained("serial", 8) != found[0]


def test_batches_that_are_smaller_than_the_cluster_are_the_same_bits_too() -> None:
    assert len({trained(engine, 7, workers=3, batch_size=2) for engine in ENGINES}) == 1


TORCH = """
import hashlib
import torch
import paceline

torch.set_num_threads(1)

def rollouts(policy, worker):
    net, chance = make_net(), torch.Generator().manual_seed(worker.seed)
    while True:
        policy.read_into(net)
        x = torch.randn(1 + worker.index, 8, generator=chance)
        with torch.no_grad():
            aim = net(x) + torch.randn(len(x), 4, generator=chance)
        yield {"x": x, "aim": aim}

def make_net():
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

def train(engine):
    torch.manual_seed(1)
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    with paceline.Cluster(3, engine=engine, seed=3, progress="quiet") as cluster:
        policy = cluster.variable("policy", net)
        batches = cluster.collect(rollouts, policy, batch_size=5, schedule="lockstep")
        for number, batch in enumerate(batches, 1):
            x, aim = (
                torch.cat([torch.from_numpy(item[name]) for item in batch.items()])
                for name in ("x", "aim")
            )
            loss = ((net(x) - aim) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            policy.assign(net)
            if number == 10:
                break
    digest = hashlib.sha256()
    for parameter in net.state_dict().values():
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()

print(*(train(engine) for engine in ("serial", "threads", "processes", "serial")))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torch_with_one_thread_gives_the_same_bits_on_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    # Four processes import torch, which takes its time on a busy machine.
    out, err = script(tmp_path, TORCH).communicate(timeout=100)
    found = out.split()
    assert len(found) == 4, err
    assert len(set(found)) == 1
    assert "several threads" not in err


# Turns


@every_engine
def test_a_batch_has_the_items_of_its_round_in_the_order_of_turns(engine: str) -> None:
    def numbered(worker: Any) -> Iterator[Any]:
        number = 0
        while True:
            yield {"worker": worker.index, "number": number}
            number += 1

    with quiet(3, engine) as cluster:
        for rounds in (["01201", "20120", "12012"], ["01", "20", "12", "01"], ["0", "1", "2", "0"]):
            with cluster.collect(
                numbered, batch_size=len(rounds[0]), schedule="lockstep"
            ) as batches:
                seen = [0, 0, 0]
                for expected in rounds:
                    batch = batches.next(timeout=LIMIT)
                    assert "".join(map(str, batch.data["worker"])) == expected
                    assert [name[-1] for name in batch.worker] == list(expected)
                    for index, number in zip(*batch.data.values(), strict=True):
                        assert number == seen[index]
                        seen[index] += 1
                stats = batches.stats()
                assert cluster.stats().collections[batches.name].schedule == "lockstep"
            assert accounted(stats)
            assert (stats["dropped"], stats["running"]) == ({}, 0)


@every_engine
def test_many_quick_items_at_a_time_keep_their_turns(engine: str) -> None:
    def quick(worker: Any) -> Iterator[Any]:
        yield from range(worker.index, 10_000, 2)

    with quiet(2, engine) as cluster:
        batches = cluster.collect(quick, batch_size=65, schedule="lockstep")
        for first in range(0, 65 * 20, 65):
            expected = list(range(first, first + 65))
            assert batches.next(timeout=LIMIT).data.tolist() == expected


@beside
def test_nothing_is_made_before_it_is_asked_for(engine: str, tmp_path: Path) -> None:
    def touches(folder: str, worker: Any) -> Iterator[Any]:
        for number in range(100):
            Path(folder, f"{worker.index}-{number}").touch()
            yield number

    with quiet(2, engine) as cluster:
        batches = cluster.collect(touches, str(tmp_path), batch_size=2, schedule="lockstep")
        until(lambda: batches.stats()["workers_waiting"] == 2)
        assert list(tmp_path.iterdir()) == []
        batches.next(timeout=LIMIT)
        until(lambda: batches.stats()["workers_waiting"] == 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "1-0"]


@beside
def test_a_wait_that_timed_out_goes_on_with_the_same_round_and_says_whose_turn_it_is(
    engine: str, tmp_path: Path
) -> None:
    def gated(policy: Any, gate: str, worker: Any) -> Iterator[Any]:
        while True:
            if worker.index == 1:
                until(lambda: os.path.exists(gate))
            yield policy.read().version

    gate = tmp_path / "gate"
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", 0)
        asked_at = policy.version
        batches = cluster.collect(gated, policy, str(gate), batch_size=2, schedule="lockstep")
        said = (
            r"^next batch of 'gated-1': \d of 2 items are there, \d more are admitted; it is the"
            r" turn of (worker:0, )?worker:1; members: "
        )
        for timeout in (0.1, 0, 0.1):
            with pytest.raises(TimedOut, match=said):
                batches.next(timeout=timeout)
            policy.assign(1)
        gate.touch()
        batch = batches.next(timeout=LIMIT)
        assert batch.data.tolist() == [asked_at] * 2
        assert batch.lag.tolist() == [3, 3]
        assert batches.next(timeout=LIMIT).data.tolist() == [policy.version] * 2


# What is read in a round


@every_engine
def test_a_worker_that_assigns_still_reads_the_version_of_its_round(engine: str) -> None:
    def assigns(policy: Any, worker: Any) -> Iterator[Any]:
        mine = np.zeros(2)
        while True:
            told = [policy.read().version, policy.read_into(mine), policy.version]
            seen = [float(mine[0])]
            newest = policy.assign(mine + 1)
            policy.tag(f"{worker.index}-{newest}")
            told += [policy.read().version, policy.read_into(mine), policy.version]
            seen += [float(policy.read().tree[0]), float(mine[0])]
            policy.read_into(mine, tag=f"{worker.index}-{newest}")
            seen.append(float(mine[0]) - 1)
            told.append(policy.read_into(mine))
            yield {"told": np.array(told), "seen": np.array([*seen, float(mine[0])])}

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(2))
        batches = cluster.collect(assigns, policy, batch_size=2, schedule="lockstep")
        for number in range(3):
            asked_at = policy.version
            batch = batches.next(timeout=LIMIT)
            assert (batch.data["told"] == asked_at).all()
            # Both assign what the round had, plus 1.
            assert (batch.data["seen"] == number).all()
            assert batch.version.tolist() == [asked_at] * 2
            assert batch.lag.tolist() == [2, 2]
            assert policy.version == asked_at + 2


@every_engine
def test_a_module_filled_with_a_newer_tag_is_filled_again_with_the_rounds_version(
    engine: str,
) -> None:
    torch = pytest.importorskip("torch")  # here, lest every worker imports it

    def fills(policy: Any) -> Iterator[Any]:
        net = torch.nn.Linear(1, 1)
        while True:
            asked_at = policy.read_into(net)
            policy.assign({name: value + 1 for name, value in policy.read().tree.items()})
            policy.tag(f"newer-{asked_at}")
            newer = policy.read_into(net, tag=f"newer-{asked_at}")
            assert newer == asked_at + 1
            yield {"version": policy.read_into(net), "bias": net.bias.detach().numpy().copy()}

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", torch.nn.Linear(1, 1))
        batches = cluster.collect(fills, policy, batch_size=1, schedule="lockstep")
        for _ in range(2):
            before = policy.read()
            batch = batches.next(timeout=LIMIT)
            assert batch.data["version"].tolist() == [before.version]
            np.testing.assert_array_equal(batch.data["bias"][0], before.tree["bias"])


@beside
def test_what_others_assign_in_a_round_is_read_in_the_next(engine: str) -> None:
    def reads_twice(policy: Any, critic: Any, here: Any, go: Any) -> Iterator[Any]:
        while True:
            first = [policy.read().version, critic.read().version]
            here.enqueue(0, timeout=LIMIT)
            go.dequeue(timeout=LIMIT)
            yield [*first, policy.read().version, critic.version]

    with quiet(1, engine) as cluster:
        policy, critic = cluster.variable("policy", 0), cluster.variable("critic", 0)
        here, go = cluster.queue("here", 1), cluster.queue("go", 1)
        batches = cluster.collect(
            reads_twice, policy, critic, here, go, batch_size=1, schedule="lockstep"
        )
        for _ in range(3):
            asked_at = [policy.version, critic.version]
            with pytest.raises(TimedOut):
                batches.next(timeout=0)
            here.dequeue(timeout=LIMIT)
            policy.assign(1)
            critic.assign_add(1)
            go.enqueue(0)
            batch = batches.next(timeout=LIMIT)
            assert [int(column[0]) for column in batch.data] == asked_at * 2
            assert batch.lag.tolist() == [1]


@every_engine
def test_a_variable_made_in_a_round_is_read_as_it_was_made_until_the_next(engine: str) -> None:
    def makes(worker: Any) -> Iterator[Any]:
        count = worker.session.variable("count", 0)
        while True:
            count.assign(count.read().tree + 1)
            count.assign(count.read().tree + 1)
            yield count.read().tree

    with quiet(1, engine) as cluster:
        batches = cluster.collect(makes, batch_size=2, schedule="lockstep")
        assert [batches.next(timeout=LIMIT).data.tolist() for _ in range(3)] == [
            [0, 0], [1, 1], [2, 2],
        ]  # fmt: skip


@every_engine
def test_a_wait_for_a_newer_version_than_the_rounds_is_refused_at_once(engine: str) -> None:
    def waits(policy: Any) -> Iterator[Any]:
        version = policy.read().version
        try:
            policy.read(newer_than=version, timeout=0)
        except TimedOut:
            yield policy.read(newer_than=version - 1).version
        policy.read(newer_than=policy.read().version, timeout=None)

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", 0)
        batches = cluster.collect(waits, policy, batch_size=1, schedule="lockstep")
        assert batches.next(timeout=LIMIT).data.tolist() == [policy.version]
        policy.assign(1)
        said = (
            r"(?s)^worker:0 cannot run:.*WouldBlock: read 'policy' newer than version 2: in a"
            r" lockstep round of 'waits-1' it is 2, and the next round begins only after this"
            r" worker's items: yield them first$"
        )
        with pytest.raises(WorkerFailed, match=said):
            batches.next(timeout=LIMIT)


@every_engine
def test_what_a_callable_reads_before_its_first_item_is_the_rounds_too(engine: str) -> None:
    def eager(policy: Any) -> Iterator[Any]:
        return iter([policy.read().version, 0])

    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", 0)
        batches = cluster.collect(eager, policy, batch_size=1, schedule="lockstep")
        if engine != "serial":
            until(lambda: batches.stats()["workers_waiting"] == 1)
        policy.assign(1)
        assert batches.next(timeout=LIMIT).data.tolist() == [policy.version]


@every_engine
def test_a_bound_on_memory_leaves_the_trainer_its_assigns(engine: str) -> None:
    value = np.zeros(1000)

    def reads(policy: Any) -> Iterator[Any]:
        while True:
            yield float(policy.read().tree[0])

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", value, memory=3 * value.nbytes)
        batches = cluster.collect(reads, policy, batch_size=3, schedule="lockstep")
        for number in range(5):
            assert batches.next(timeout=LIMIT).data.tolist() == [number] * 3
            policy.assign(value + number + 1, timeout=LIMIT)
        held = [version["held_by"] for version in policy.memory()["versions"]]
        assert not any("lockstep" in name for names in held for name in names)


# How it ends


@every_engine
def test_afterwards_workers_read_what_is_current_again(engine: str) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", 0)
        for batch in cluster.collect(following, policy, batch_size=2, schedule="lockstep"):
            assert batch.data["version"].tolist() == [policy.version] * 2
            break
        policy.assign(1)
        with cluster.collect(following, policy, batch_size=2, max_lag=0) as batches:
            assert batches.next(timeout=LIMIT).data["version"].tolist() == [policy.version] * 2
        assert cluster.map(lambda _, policy: policy.read().tree, range(2), policy) == [1, 1]
        assert policy.memory()["versions"][0]["version"] == policy.version


def test_a_killed_worker_ends_the_run_and_nobody_is_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with quiet(3) as cluster:
        policy = cluster.variable("policy", 0)
        batches = cluster.collect(following, policy, batch_size=3, schedule="lockstep")
        pids = batches.next(timeout=LIMIT).data["pid"].tolist()
        assert batches.next(timeout=LIMIT).data["pid"].tolist() == pids
        caplog.clear()
        # It dies in the middle of a round, before its turn.
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(TimedOut, match=r"it is the turn of .*worker:1; members: "):
            batches.next(timeout=0.2)
        os.kill(pids[1], signal.SIGKILL)
        said = (
            r"^worker:1 was killed by SIGKILL \([^)]*\); a run in lockstep goes on with all its"
            r" workers as they began, or ends$"
        )
        with pytest.raises(WorkerFailed, match=said):
            batches.next(timeout=LIMIT)
        with pytest.raises(WorkerFailed, match=said):
            batches.next(timeout=LIMIT)
        assert [runs(pid) for pid in pids] == [True, False, True]
        assert not caplog.records
        batches.close()
        # The next work has it started again, and says that this is no fresh start.
        again = cluster.collect(following, policy, batch_size=3, schedule="lockstep")
        after = again.next(timeout=LIMIT).data["pid"].tolist()
        assert (after[0], after[2]) == (pids[0], pids[2])
        assert after[1] != pids[1]
    assert any(
        message.startswith("collection 'following-2': worker:1 had to be started again before")
        for message in caplog.messages
    )


@every_engine
def test_an_error_of_one_function_ends_the_run_with_its_traceback(
    engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(policy: Any, worker: Any) -> Iterator[Any]:
        yield policy.read().version
        if worker.index == 1:
            raise ArithmeticError("in my own words")
        while True:
            yield policy.read().version

    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", 0)
        batches = cluster.collect(breaks, policy, batch_size=2, schedule="lockstep")
        batches.next(timeout=LIMIT)
        caplog.clear()
        said = (
            r"(?s)^worker:1 failed; a run in lockstep goes on with all its workers as they began,"
            r" or ends:\nTraceback .*test_lockstep\.py.*ArithmeticError: in my own words\n\(seed "
        )
        with pytest.raises(WorkerFailed, match=said):
            batches.next(timeout=LIMIT)
        assert not [message for message in caplog.messages if "again" in message]


@every_engine
def test_a_function_that_returns_ends_the_run_when_its_turn_comes(engine: str) -> None:
    def few(worker: Any) -> Iterator[Any]:
        yield from range(3 if worker.index == 1 else 100)

    with quiet(2, engine) as cluster:
        batches = cluster.collect(few, batch_size=3, schedule="lockstep")
        assert [batch.data.tolist() for batch in batches] == [[0, 0, 1], [1, 2, 2]]
        batches = cluster.collect(few, batch_size=3, schedule="lockstep")
        for _ in range(2):
            batches.next(timeout=LIMIT)
        said = (
            r"^collection 'few-2': the function of worker:1 has returned, and in lockstep item 1 of"
            r" batch 2 is its turn"
        )
        for _ in range(2):
            with pytest.raises(Closed, match=said):
                batches.next(timeout=LIMIT)


# What it asks for


@pytest.mark.parametrize("schedule", ["lock", "", None])
def test_a_schedule_that_there_is_not_is_refused_with_those_there_are(schedule: Any) -> None:
    with quiet(1, "serial") as cluster:
        said = rf"^no schedule {re.escape(repr(schedule))}; there are \['lag', 'lockstep'\]$"
        with pytest.raises(SchemaError, match=said):
            cluster.collect(following, batch_size=1, schedule=schedule)


THREADS = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
import paceline

def items():
    while True:
        yield 1

with paceline.Cluster(2, worker_threads=int(sys.argv[1]), progress="quiet") as cluster:
    for schedule in ("lag", "lockstep"):
        cluster.collect(items, batch_size=2, schedule=schedule).next()
"""


@pytest.mark.skipif(limits()[0] < 2, reason="a library has one thread on one core")
@pytest.mark.parametrize("threads", [1, 2])
def test_several_blas_threads_are_told_by_the_chief_and_once_by_the_workers(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(threads))
    said = output(script(tmp_path, THREADS.replace("sys.argv[1]", repr(threads))))
    found = re.findall(r"^(.*)lockstep with several threads in (\S+|the chief) \(", said, re.M)
    if threads == 1:
        assert found == []
        return
    assert found[0] == ("", "the chief")
    assert [prefix for prefix, _ in found[1:]] == ["collection 'items-2': "]
    assert found[1][1] in ("worker:0", "worker:1")


@pytest.mark.skipif(limits()[0] < 2, reason="a library has one thread on one core")
def test_what_workers_said_before_their_end_is_shown_before_close_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with quiet(1, worker_threads=2) as cluster:
        policy = cluster.variable("policy", 0)
        crew: Any = getattr(cluster._staff, "_crew")  # noqa: B009
        with crew.lock:
            # Who looks after the workers has the time only when nobody needs them any more.
            collection = cluster.collect(following, policy, batch_size=1, schedule="lockstep")
            collection.next(timeout=LIMIT)
            collection.close()
            crew._stand_down(Closed("the cluster is closed"))
    told = [said for said in caplog.messages if "lockstep with several threads in worker:0" in said]
    assert len(told) == 1


def test_a_run_by_lag_says_nothing_of_threads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    with quiet(1, "serial") as cluster:
        policy = cluster.variable("policy", 0)
        cluster.collect(following, policy, batch_size=1, schedule="lag").next()
    assert not [message for message in caplog.messages if "lockstep" in message]


def test_the_schedule_by_lag_is_the_default() -> None:
    with quiet(1, "serial") as cluster:
        batches: paceline.Collection[Any] = cluster.collect(
            following, cluster.variable("policy", 0), batch_size=2, max_lag=1
        )
        batches.next()
        assert batches.stats()["depth"] == 1
