"""Failures of workers, the server and the chief: each is noticed, told, and leaves nothing."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import (
    LIMIT,
    accounted,
    descendants,
    every_engine,
    following,
    named,
    quiet,
    runs,
    script,
    until,
)

import paceline
from paceline import Closed, Disconnected, WorkerFailed

# What a worker's function does to its process


def killed(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of kills; on a busy machine there is more in the log, of what is slow."""
    return [told for told in caplog.messages if "killed" in told]


def test_a_killed_worker_is_noticed_told_in_one_line_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        caplog.clear()
        batches = cluster.collect(following, policy, batch_size=2)
        victim = int(batches.next().data["pid"][0])
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: killed(caplog))
        assert time.monotonic() - began < 1
        until(lambda: set(batches.next().data["pid"]) - {victim})
        assert accounted(batches.stats())
    [told] = killed(caplog)
    assert re.fullmatch(
        r"worker:0 was killed by SIGKILL \(seed \d+, item \d+, parameters' version 1\);"
        r" it is restarted",
        told,
    )


@every_engine
def test_a_function_that_exits_its_process_is_started_again(
    engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    def exits(worker: Any) -> Iterator[Any]:
        yield worker.seed
        sys.exit(3)

    with quiet(1, engine) as cluster:
        caplog.clear()
        seeds = cluster.collect(exits, batch_size=2).next().data
    assert len(set(seeds)) == 2
    assert any("worker:0 ended with exit status " in told for told in caplog.messages)


def test_a_worker_that_ends_without_a_word_is_replaced() -> None:
    def vanishes(worker: Any) -> Iterator[Any]:
        yield worker.seed
        yield worker.seed
        os._exit(7)

    with quiet(1, restarts=2) as cluster:
        batches = cluster.collect(vanishes, batch_size=100)
        said = (
            r"^worker:0 failed 3 times within 60 s, its budget is restarts=2; the last time:\n"
            r"worker:0 ended with exit status 7 \(seed \d+, item 2, parameters' version none\)$"
        )
        with pytest.raises(WorkerFailed, match=said):
            batches.next(timeout=LIMIT)


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    def starts(worker: Any) -> Iterator[Any]:
        child = subprocess.Popen(["sleep", "600"])
        while True:
            yield {"pid": os.getpid(), "child": child.pid}

    with quiet(1) as cluster:
        batches = cluster.collect(starts, batch_size=1)
        first = batches.next().data
        os.kill(int(first["pid"][0]), signal.SIGKILL)
        until(lambda: not runs(int(first["child"][0])))
        second = until(lambda: _other(batches.next().data, first))
    until(lambda: not runs(int(second["child"][0])))


def _other(data: Any, first: Any) -> Any:
    return data if data["pid"][0] != first["pid"][0] else None


# Work after failures


@every_engine
def test_the_next_collection_starts_a_worker_whose_budget_was_spent(engine: str) -> None:
    def exits() -> Iterator[Any]:
        yield 1
        sys.exit(1)

    with quiet(1, engine, restarts=1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with pytest.raises(WorkerFailed, match=r"^worker:0 failed 2 times within 60 s"):
            cluster.collect(exits, batch_size=50).next(timeout=LIMIT)
        assert len(cluster.collect(following, policy, batch_size=2).next(timeout=LIMIT)) == 2


def test_a_worker_that_dies_after_its_function_returned_works_again() -> None:
    def once() -> Iterator[Any]:
        yield os.getpid()

    with quiet(1) as cluster:
        [pid] = [int(batch.data[0]) for batch in cluster.collect(once, batch_size=1)]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not runs(pid))
        [other] = [int(batch.data[0]) for batch in cluster.collect(once, batch_size=1)]
        assert other != pid


@every_engine
def test_an_error_says_where_with_what_seed_and_parameters(engine: str) -> None:
    def breaks(policy: Any) -> Iterator[Any]:
        yield policy.read().version
        raise ArithmeticError("in my own words")

    with quiet(1, engine, restarts=0, seed=5) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        said = (
            r"(?s)^worker:0 failed once within 60 s, its budget is restarts=0; the last time:\n"
            r'Traceback .*test_worker_failures\.py", line \d+, in breaks.*'
            r"ArithmeticError: in my own words\n"
            r"\(seed \d+, item 1, parameters' version 1\)$"
        )
        with pytest.raises(WorkerFailed, match=said):
            cluster.collect(breaks, policy, batch_size=2).next(timeout=LIMIT)


@every_engine
def test_the_loop_over_a_failed_collection_raises_it(engine: str) -> None:
    def breaks() -> Iterator[Any]:
        yield 1 / 0

    with quiet(2, engine) as cluster:
        batches = cluster.collect(breaks, batch_size=2)
        with pytest.raises(WorkerFailed, match=r"(?s)^worker:\d cannot run:.*division by zero"):
            list(batches)


@every_engine
def test_a_second_collection_of_a_job_ends_the_first_with_an_error(engine: str) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        first = cluster.collect(following, policy, batch_size=2)
        first.next()
        second = cluster.collect(following, policy, batch_size=2)
        assert len(second.next(timeout=LIMIT)) == 2
        with pytest.raises(Closed, match=r"^collection 'following-1' ended when 'following-2' be"):
            first.next()
        with pytest.raises(Closed, match=r"^collection 'following-1' ended when 'following-2' be"):
            list(first)
        assert len(second.next(timeout=LIMIT)) == 2


@every_engine
def test_batches_of_functions_that_returned_outlast_the_next_collection(engine: str) -> None:
    def two() -> Iterator[Any]:
        yield from range(2)

    with quiet(1, engine) as cluster:
        first = cluster.collect(two, batch_size=1)
        assert first.next().data[0] == 0
        assert first.next().data[0] == 1
        with pytest.raises(Closed, match=r"^collection 'two-1': every worker's function has ret"):
            first.next()
        assert cluster.collect(two, batch_size=2).next().data.tolist() == [0, 1]


# The server


@pytest.mark.parametrize("call", ["next", "assign", "read", "stats"])
def test_every_call_after_the_servers_death_names_it_and_the_signal(call: str) -> None:
    with quiet(2) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(following, policy, batch_size=2)
        batches.next()
        os.kill(named("ps:0", os.getpid()), signal.SIGKILL)
        began = time.monotonic()
        calls: dict[str, Callable[[], object]] = {
            "next": batches.next,
            "assign": lambda: policy.assign(np.zeros(3)),
            "read": lambda: policy.read(newer_than=policy.read().version, timeout=None),
            "stats": batches.stats,
        }
        with pytest.raises(Disconnected, match=r"; the server, ps:0, was killed by SIGKILL$"):
            until(lambda: calls[call]() is None)
        assert time.monotonic() - began < 2
        began = time.monotonic()
        batches.close()
    assert time.monotonic() - began < 6


def test_a_dead_server_is_not_followed_by_complaints_of_the_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with quiet(2) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        caplog.clear()
        batches = cluster.collect(following, policy, batch_size=2)
        batches.next()
        os.kill(named("ps:0", os.getpid()), signal.SIGKILL)
        with pytest.raises(Disconnected, match=r"ps:0"):
            until(lambda: batches.next() is None)
    assert caplog.messages == []


# The chief

STUCK = """
import ctypes, os, subprocess, sys
import paceline

def stuck():
    child = subprocess.Popen(["sleep", "600"])
    yield [os.getpid(), child.pid]
    ctypes.PyDLL(None).sleep(60)

with paceline.Cluster(2, progress="quiet") as cluster:
    batches = cluster.collect(stuck, batch_size=2)
    print(batches.next().data, flush=True)
    batches.next()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_chief_not_even_a_stuck_worker(tmp_path: Path, number: int) -> None:
    chief = script(tmp_path, STUCK)
    assert chief.stdout is not None
    chief.stdout.readline()
    pids = descendants(chief.pid)
    assert len(pids) >= 6  # a guard, a server, two workers and what they started
    chief.send_signal(number)
    chief.wait(timeout=10)
    until(lambda: not any(map(runs, pids)), within=2)
    _, err = chief.communicate(timeout=LIMIT)
    if number == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")


SEVERAL = """
import itertools, sys
import numpy as np
import paceline

def items(policy, table):
    while True:
        policy.read()
        yield table.read().tree["b"]

with paceline.Cluster(2, ps=2, transport=sys.argv[1], progress="quiet") as cluster:
    print(*(line.address for line in cluster.session.lines.all), flush=True)
    policy = cluster.variable("policy", np.zeros(1 << 18))
    table = cluster.session.spread("table", {"a": np.zeros(1 << 18), "b": np.ones(1 << 18)})
    batches = cluster.collect(items, policy, table, batch_size=2)
    for batch in batches:
        policy.assign(np.ones(1 << 18))
        table.assign({"a": np.ones(1 << 18), "b": np.ones(1 << 18)})
        print("goes on", flush=True)
"""


def memory_of(pids: Iterable[int]) -> set[str]:
    """The segments that processes have, mapped or open, by their inodes."""
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "memfd:paceline" in line:
                    found.add(line.split()[4])
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if "memfd:paceline" in os.readlink(entry):
                        found.add(str(entry.stat().st_ino))
    return found


def listens(address: str) -> bool:
    """Whether anybody listens there."""
    carrier, _, place = address.partition(":")
    if carrier == "unix":
        return place in Path("/proc/net/unix").read_text()
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="what processes hold is seen in /proc")
@pytest.mark.parametrize("carrier", ["unix", pytest.param("tcp", marks=pytest.mark.slow)])
def test_nothing_of_several_servers_outlives_a_chief_that_is_killed(
    tmp_path: Path, carrier: str
) -> None:
    chief = script(tmp_path, SEVERAL.replace("sys.argv[1]", repr(carrier)))
    assert chief.stdout is not None
    addresses = chief.stdout.readline().split()
    for _ in range(3):
        assert chief.stdout.readline() == "goes on\n"
    pids = descendants(chief.pid)
    segments = memory_of([chief.pid, *pids])
    # A guard, two servers and two workers; both servers have memory.
    assert (len(pids), len(addresses)) == (5, 2)
    assert len(segments) >= 2
    assert all(map(listens, addresses))
    chief.kill()
    chief.wait(LIMIT)
    until(lambda: not any(map(runs, pids)), within=2)
    assert not any(map(listens, addresses))
    everybody = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    assert not memory_of(everybody) & segments
    chief.communicate()


# Ctrl-C and close


@every_engine
def test_ctrl_c_while_waiting_loses_nothing(engine: str) -> None:
    def gated(gate: str) -> Iterator[Any]:
        yield 0
        while not os.path.exists(gate):
            if engine == "serial":
                raise KeyboardInterrupt  # as the only thread would get it
            os.sched_yield()
        yield from range(1, 1000)

    folder = os.path.join("/tmp", f"paceline-test-{os.getpid()}-{threading.get_ident()}")
    with quiet(1, engine) as cluster:
        batches = cluster.collect(gated, folder, batch_size=2)
        if engine != "serial":
            threading.Thread(target=_interrupt_when_waiting, args=[batches]).start()
        with pytest.raises(KeyboardInterrupt):
            batches.next(timeout=LIMIT)
        if engine == "serial":
            return
        open(folder, "w").close()
        try:
            assert batches.next(timeout=LIMIT).data.tolist() == [0, 1]
        finally:
            os.unlink(folder)
        assert accounted(batches.stats())


def _interrupt_when_waiting(batches: Any) -> None:
    until(lambda: batches.tally.waiting_since is not None)
    until(lambda: batches.stats()["trainer_waits"])
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_close_does_not_wait_for_a_worker_in_native_code() -> None:
    def stuck() -> Iterator[Any]:
        yield 1
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock: no Python code runs

    cluster = quiet(1)
    try:
        cluster.collect(stuck, batch_size=1).next()
    finally:
        began = time.monotonic()
        cluster.close()
        assert time.monotonic() - began < 6
    cluster.close()


@every_engine
def test_what_is_used_after_close_says_so(engine: str) -> None:
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(following, policy, batch_size=1)
        batches.next()
    cluster.close()
    batches.close()
    with pytest.raises(Closed, match=r"^collection 'following-1' is closed$"):
        batches.next()
    with pytest.raises(Closed, match=r"this session was closed$"):
        policy.assign(np.zeros(3))
    assert list(batches) == []


@pytest.mark.timeout(120)
@every_engine
@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_starts_and_stops_leave_nothing(engine: str, times: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(times):
        with quiet(1, engine) as cluster:
            policy = cluster.variable("policy", np.zeros(1000))
            cluster.collect(following, policy, batch_size=1).next()
        del policy, cluster
        assert len(os.listdir("/proc/self/fd")) == before
        assert not [pid for pid in descendants(os.getpid()) if runs(pid)]


def test_a_cluster_whose_workers_are_not_there_yet_closes_at_once() -> None:
    began = time.monotonic()
    cluster = quiet(2)
    opened = time.monotonic()
    cluster.close()
    assert time.monotonic() - opened < max(1.0, opened - began)


def test_a_worker_can_be_the_chief_of_a_cluster_of_its_own() -> None:
    def nested(worker: Any) -> Iterator[Any]:
        with paceline.Cluster(1, progress="quiet") as inner:
            weights = inner.variable("weights", np.zeros(2))
            for n, batch in enumerate(inner.collect(following, weights, batch_size=1)):
                yield {"version": batch.data["version"], "pid": batch.data["pid"]}
                weights.assign(np.full(2, float(n)))

    with quiet(1) as cluster:
        batches = cluster.collect(nested, batch_size=2)
        versions = [batches.next(timeout=LIMIT).data for _ in range(4)]
        inner = int(versions[0]["pid"][0][0])
        assert versions[-1]["version"].min() > versions[0]["version"].min()
    until(lambda: not runs(inner))
