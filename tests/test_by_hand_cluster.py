"""`Cluster` over tasks that were started by hand: one program in all of them, some killed."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import until
from hands import Hand, cluster, ended, lines_until, when_ended
from programs import EXAMPLES

import paceline
from paceline.post_mortems import read
from paceline.replay import replay

TRAIN = """
import os
import sys
import numpy as np
import paceline


def play(policy, worker):
    print("plays with", worker.seed, flush=True)
    while True:
        yield {"version": policy.read().version, "by": worker.index, "pid": os.getpid()}


def last(policy, worker):
    print("is last", flush=True)
    return {"sum": policy.read().tree + worker.index, "by": str(worker.session.task)}


SCHEDULE, WANTED = sys.argv[1], int(sys.argv[2])

with paceline.Cluster.from_environment(seed=3, progress="quiet") as cluster:
    policy = cluster.variable("policy", np.zeros(2))
    pids = set()
    for batch in cluster.collect(play, policy, batch_size=4, schedule=SCHEDULE):
        assert cluster.is_chief
        if SCHEDULE == "lockstep":
            assert batch.data["by"].tolist() == [0, 1, 0, 1], batch.data
        policy.assign_add(np.ones(2))
        fresh = set(batch.data["pid"].tolist()) - pids
        pids |= fresh
        for pid in fresh:
            print("heard of", pid, flush=True)
        if len(pids) >= WANTED and policy.version > 20:
            break
    assert cluster.is_chief or not pids
    found = cluster.run(last, policy)
    if cluster.is_chief:
        assert [each["by"] for each in found] == ["worker:0", "worker:1"], found
        print("difference", found[1]["sum"] - found[0]["sum"], flush=True)
    else:
        assert found == []
    print("the end", flush=True)
"""


FAILS = """
import sys
import numpy as np
import paceline


def play(policy, worker):
    for n in range(3):
        snapshot = policy.read()
        yield worker.seed
    print("seed", worker.seed, flush=True)
    policy.assign(np.full(2, 9.0))
    raise ValueError(f"item {n + 1} with {snapshot.tree}")


def last(policy):
    snapshot = policy.read()
    raise ValueError(f"it is {snapshot.tree}")


with paceline.Cluster.from_environment(progress="quiet", post_mortem="dead") as cluster:
    policy = cluster.variable("policy", np.full(2, 4.0))
    if sys.argv[1] == "run":
        cluster.run(last, policy)
    for batch in cluster.collect(play, policy, batch_size=1, max_lag=None):
        pass
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["collect", "run"])
def test_a_worker_whose_function_raises_names_a_file_that_runs_it_again(
    tmp_path: Path, how: str
) -> None:
    hand = Hand(tmp_path, cluster(tmp_path, ps=1, chief=1, worker=1), fails=FAILS)
    try:
        lines_until(hand.serve(0), "missing: ")
        chief = hand.run("fails.py", "chief", 0, "--", how)
        out, err = ended(hand.run("fails.py", "worker", 0, "--", how), 1)
        if how == "run":
            # The file is on the worker's host, not on the chief's.
            assert "paceline replay" not in ended(chief, 1)[1]
    finally:
        hand.close()
    paths = re.findall(r"paceline replay (/\S*/dead/worker-0-\S+)$", err, re.MULTILINE)
    assert len(paths) == 1, err
    [path] = paths
    found = read(path)
    assert found.facts.worker == "worker:0"
    assert found.variables["policy"].tolist() == [4.0, 4.0]
    outcome = replay(found)
    if how == "run":
        assert (found.facts.function, found.facts.item) == ("last", None)
        assert str(outcome.error) == "it is [4. 4.]"
    else:
        assert (found.facts.function, found.facts.item) == ("play", 3)
        assert f"seed {found.facts.seed}\n" in out
        assert str(outcome.error) == "item 3 with [4. 4.]"
        assert outcome.items == 3


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(tmp_path, cluster(tmp_path, ps=2, chief=1, worker=2), train=TRAIN)
    try:
        yield made
    finally:
        made.close()


def servers(hand: Hand) -> list[subprocess.Popen[str]]:
    return [hand.serve(1), hand.serve(0)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("schedule", ["lag", pytest.param("lockstep", marks=pytest.mark.slow)])
def test_one_program_serves_all_tasks_and_all_end_by_themselves(hand: Hand, schedule: str) -> None:
    workers = [hand.run("train.py", "worker", n, "--", schedule, "2") for n in (1, 0)]
    for program in workers:
        lines_until(program, "missing: ")
    serving = servers(hand)
    chief = hand.run("train.py", "chief", 0, "--", schedule, "2")
    ends = when_ended([chief, *workers, *serving])
    out, _ = ended(chief)
    assert "difference [1. 1.]\n" in out
    assert "plays" not in out
    seeds = set()
    for program in workers:
        out, _ = ended(program)
        seeds |= set(re.findall(r"plays with (\d+)", out))
        assert "heard" not in out
        assert out.endswith("is last\nthe end\n")
    assert len(seeds) == 2
    for program in serving:
        ended(program)
    # The interpreters need time to end, too.
    assert max(ends) - ends[0] < 2.0 + 2.0


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("schedule", ["lag", "lockstep"])
def test_a_worker_that_was_killed_joins_the_running_collection_again(
    hand: Hand, schedule: str
) -> None:
    serving = servers(hand)
    chief = hand.run("train.py", "chief", 0, "--", schedule, "3")
    first, other = (hand.run("train.py", "worker", n, "--", schedule, "3") for n in (0, 1))
    before = lines_until(first, "plays with ")[-1]
    lines_until(chief, f"heard of {first.pid}")
    first.kill()
    first.wait()
    lines_until(chief, "chief:0: missing: worker:0", errors=True)
    again = hand.run("train.py", "worker", 0, "--", schedule, "3")
    assert lines_until(again, "plays with ")[-1] != before
    _, err = ended(chief)
    assert "chief:0: everybody is here" in err
    for program in (again, other):
        assert ended(program)[0].endswith("the end\n")
    for program in serving:
        ended(program)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("schedule", ["lag", "lockstep"])
def test_a_chief_that_was_killed_goes_on_with_the_running_collection(
    hand: Hand, schedule: str
) -> None:
    serving = servers(hand)
    workers = [hand.run("train.py", "worker", n, "--", schedule, "2") for n in (0, 1)]
    chief = hand.run("train.py", "chief", 0, "--", schedule, "99")
    for _ in workers:
        lines_until(chief, "heard of ")
    chief.kill()
    chief.wait()
    again = hand.run("train.py", "chief", 0, "--", schedule, "2")
    out, _ = ended(again)
    assert "difference [1. 1.]\n" in out
    for program in workers:
        out, _ = ended(program)
        assert re.search(r"\nplays with \d+\nis last\nthe end\n$", out)
        assert out.count("plays") == 1
    for program in serving:
        ended(program)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_of_a_killed_chief_hear_that_another_one_began_anew(hand: Hand) -> None:
    serving = servers(hand)
    workers = [hand.run("train.py", "worker", n, "--", "lag", "2") for n in (0, 1)]
    chief = hand.run("train.py", "chief", 0, "--", "lag", "99")
    lines_until(chief, "heard of ")
    chief.kill()
    chief.wait()
    again = hand.run("train.py", "chief", 0, "--", "lockstep", "2")
    for n, program in enumerate(workers):
        _, err = ended(program, 1)
        assert "Closed: the chief that worker:" in err
        assert f"call: start worker:{n} again, too\n" in err
    anew = [hand.run("train.py", "worker", n, "--", "lockstep", "2") for n in (0, 1)]
    for program in (again, *anew):
        assert ended(program)[0].endswith("the end\n")
    for program in serving:
        ended(program)


ONCE = """
import numpy as np
import paceline


def part(go, worker):
    print("begins", flush=True)
    return np.full(3, worker.index) if worker.index == 0 else go.dequeue()


with paceline.Cluster.from_environment(progress="quiet") as cluster:
    found = cluster.run(part, cluster.queue("go", 1))
    print("found", found, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_chief_that_was_killed_goes_on_with_a_run(tmp_path: Path) -> None:
    hand = Hand(tmp_path, cluster(tmp_path, ps=2, chief=1, worker=2), once=ONCE)
    try:
        serving = servers(hand)
        workers = [hand.run("once.py", "worker", n) for n in (0, 1)]
        chief = hand.run("once.py", "chief", 0)
        lines_until(workers[0], "begins")
        secret = tmp_path / ".paceline" / "secret"
        with paceline.Session(hand.spec, secret_file=secret, job="looks") as session:
            work = "run(part, job='worker')"
            until(lambda: session.resources()["program"]["going"] == {work: ["worker:0"]})
            chief.kill()
            chief.wait()
            session.queue("go").enqueue(7)
        again = hand.run("once.py", "chief", 0)
        assert ended(again)[0].endswith("found [array([0, 0, 0]), 7]\n")
        for program in workers:
            assert ended(program)[0].endswith("found []\n")
        for program in serving:
            ended(program)
    finally:
        hand.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_example_is_one_program_for_all_tasks(tmp_path: Path) -> None:
    text = (EXAMPLES / "by_hand" / "train.py").read_text()
    spec = paceline.ClusterSpec.from_file(EXAMPLES / "by_hand" / "cluster.toml")
    counts = {job: spec.num_tasks(job) for job in spec.jobs}
    hand = Hand(tmp_path, cluster(tmp_path, "tcp", **counts), train=text)
    try:
        workers = [hand.run("train.py", "worker", n) for n in range(counts["worker"])]
        serving, chief = servers(hand), hand.run("train.py", "chief", 0)
        out, _ = ended(chief)
        assert "weights [ 2. -3.], loss of each [0. 0. 0.]\nchief:0 is done\n" in out
        for index, program in enumerate(workers):
            assert ended(program)[0].endswith(f"\nworker:{index} is done\n")
        for program in serving:
            ended(program)
    finally:
        hand.close()
