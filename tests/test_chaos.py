"""The chaos kit: what it does to processes, connections and disks, and what clusters make of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call
from campaign import (
    PARTS,
    of_chiefs,
    of_connections,
    of_disks,
    of_servers,
    of_tasks,
    of_tasks_apart,
    of_workers,
)
from clusters import LIMIT, following, quiet, until

import paceline
from paceline import OutOfMemory, TimedOut, UnknownName, Unsupported
from paceline.testing import Chaos, Fault, Relay, Report, full_disk, serving


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def here() -> dict[str, int]:
    return {"me:0": os.getpid()}


# Processes


def test_a_cluster_says_which_processes_its_tasks_have() -> None:
    with quiet(2) as cluster:
        found = cluster.processes()
        assert sorted(found) == ["ps:0", "worker:0", "worker:1"]
        assert len(set(found.values()) | {os.getpid()}) == 4
    with quiet(2, "threads") as cluster:
        assert cluster.processes() == {}


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_killed_worker_is_struck_noticed_and_replaced(kind: Any) -> None:
    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        batches = cluster.collect(following, policy, batch_size=1)
        before = int(batches.next().data["pid"][0])
        found = Chaos(cluster).strike(kind, "worker:0", lambda: batches.next(timeout=LIMIT))
        assert (found.kind, found.target, found.role) == (kind, "worker:0", "worker")
        assert found.noticed is not None
        assert 0 < found.noticed < min(1.0, found.recovered)
        after = until(lambda: {int(batches.next().data["pid"][0])} - {before})
        assert after == {cluster.processes()["worker:0"]}


def test_a_paused_process_stops_for_the_block_and_goes_on() -> None:
    with quiet(1) as cluster:
        chaos, pid = Chaos(cluster), cluster.processes()["worker:0"]
        with chaos.paused("worker:0"):
            until(lambda: state(pid) == "T")
        until(lambda: state(pid) != "T")


def test_a_slowed_process_is_stopped_again_and_again_and_goes_on() -> None:
    with quiet(1) as cluster:
        chaos, pid = Chaos(cluster), cluster.processes()["worker:0"]
        with chaos.slowed("worker:0", 0.5):
            for _ in range(3):
                until(lambda: state(pid) == "T")
                until(lambda: state(pid) != "T")
        until(lambda: state(pid) != "T")


def test_what_is_not_there_cannot_be_harmed() -> None:
    chaos = Chaos(here)
    with pytest.raises(UnknownName, match=r"^no process 'worker:9'; there are \['me:0'\]$"):
        chaos.kill("worker:9")
    with pytest.raises(UnknownName, match=r"^no relay to 'ps:0'; there are \[\]$"):
        chaos.cut("ps:0")
    with pytest.raises(UnknownName, match=r"^no fault 'burn'; there are \['kill', "):
        chaos.campaign(lambda: None, kinds=["burn"])  # type: ignore[list-item]
    with pytest.raises(UnknownName, match=r"^'cut' takes relays between"):
        chaos.campaign(lambda: None, kinds=["cut"])
    with pytest.raises(UnknownName, match=r"^none of \['ps'\] is among \['me:0'\]$"):
        chaos.campaign(lambda: None, kinds=["pause"], targets=["ps"])


def test_what_does_not_recover_in_time_says_so() -> None:
    with quiet(1, restarts=0) as cluster:
        with pytest.raises(TimedOut, match=r"^worker:0 was not started again within 0\.2 s; th"):
            Chaos(cluster).strike("kill", "worker:0", lambda: None, limit=0.2)


# Connections


@pytest.mark.parametrize("kind", ["cut", "lose", "repeat", "tear", "delay"])
def test_a_harmed_connection_neither_loses_nor_repeats_anything(kind: Any) -> None:
    with serving("tcp", where="thread") as server, Relay(server.target) as relay:
        with paceline.Session(relay.target, secret=server.secret) as session:
            steps, taken = session.counter("steps"), list[int]()
            chaos = Chaos(here, relays={"ps:0": relay})

            def work() -> None:
                taken.append(steps.add(1))

            for _ in range(3):
                work()
                chaos.strike(kind, "ps:0", work)
            assert taken == list(range(1, len(taken) + 1))
            # A connection that is harmed while nothing is on it is one more all the same.
            assert relay.carried == 1 if kind == "delay" else relay.carried > 2


def test_a_relay_carries_what_does_not_fit_into_its_hands() -> None:
    with serving("tcp", where="thread") as server, Relay(server.target) as relay:
        with paceline.Session(relay.target, secret=server.secret) as session:
            table = np.arange(1 << 20)
            variable = session.variable("table", table)
            assert np.array_equal(variable.read().tree, table)


@pytest.mark.parametrize("kind", ["lose", "repeat", "tear"])
def test_what_arrives_before_a_cut_is_the_beginning_of_what_was_sent(kind: str) -> None:
    sent = np.arange(1 << 19).tobytes()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Relay(f"tcp:127.0.0.1:{listener.getsockname()[1]}") as relay,
        socket.create_connection(("127.0.0.1", int(relay.target.rpartition(":")[2]))) as client,
        listener.accept()[0] as server,
    ):
        sending = Call(server.sendall, sent)
        # Some of it waits in the relay, and more before it.
        found = client.recv(1 << 16)
        getattr(relay, kind)()
        while data := client.recv(1 << 16):
            found += data
        assert sent.startswith(found)
        with suppress(OSError):
            sending.outcome()


def test_a_relay_does_not_carry_shared_memory() -> None:
    with pytest.raises(
        Unsupported, match=r"^a relay carries connections over TCP, not to 'unix:/a'"
    ):
        Relay("unix:/a")


# Disks


def test_a_file_cannot_grow_on_a_full_disk_and_can_again_after(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with full_disk(1000):
        path.write_bytes(bytes(1000))
        with pytest.raises(OSError, match="File too large"):
            path.write_bytes(bytes(1001))
    path.write_bytes(bytes(1001))


def test_shared_memory_that_finds_no_room_is_an_error_where_it_was_asked_for() -> None:
    with quiet(1) as cluster:
        policy = cluster.variable("policy", np.zeros(3))
        with full_disk():
            with pytest.raises(OutOfMemory, match=r"^no shared memory of .*: File too large"):
                cluster.variable("table", np.zeros(10_000_000))
            policy.assign(np.ones(3))
        assert cluster.variable("table", np.zeros(10_000_000)).read().tree.shape == (10_000_000,)


# Campaigns


SHORT = {of_workers: 3, of_connections: 8, of_tasks: 6}
LONGER = {of_servers: 4, of_tasks_apart: 6, of_chiefs: 4, of_disks: 4}


@pytest.mark.parametrize(
    ("part", "faults"),
    [*SHORT.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in LONGER.items())],
)
@pytest.mark.timeout(120)
def test_a_campaign_breaks_no_promise(part: Callable[[int, int], Report], faults: int) -> None:
    report = part(faults, 3)
    assert len(report.faults) == faults
    lines = str(report).splitlines()
    assert lines[0] == f"{faults} faults, seed 3; longest seconds to notice, recover"
    assert len(lines) == 1 + len({(fault.role, fault.kind) for fault in report.faults})


def test_every_campaign_is_in_the_tests_and_in_the_long_one() -> None:
    assert {**SHORT, **LONGER}.keys() == PARTS.keys()
    assert sum(PARTS.values()) == pytest.approx(1.0)


def test_the_same_seed_draws_the_same_faults_and_says_where_it_broke() -> None:
    drawn = []
    for _ in range(2):
        with serving("tcp", where="thread") as server, Relay(server.target) as relay:
            with paceline.Session(relay.target, secret=server.secret) as session:
                steps = session.counter("steps")
                chaos = Chaos(here, relays={"ps:0": relay}, seed=1)
                report = chaos.campaign(
                    partial(steps.add, 1), faults=6, kinds=["cut", "lose", "repeat", "tear"]
                )
        drawn.append([fault.kind for fault in report.faults])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1

    def breaks(fault: Fault) -> None:
        raise ArithmeticError("not conserved")

    with serving("tcp", where="thread") as server, Relay(server.target) as relay:
        chaos = Chaos(here, relays={"ps:0": relay}, seed=1)
        with pytest.raises(ArithmeticError) as caught:
            chaos.campaign(lambda: None, kinds=["cut"], check=breaks)
    assert caught.value.__notes__ == ["fault 0 of seed 1: 'cut' of ps:0"]
    assert str(Report(1, ())) == "0 faults, seed 1; longest seconds to notice, recover"
