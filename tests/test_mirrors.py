"""Mirrors: each version comes to a host once, and reads are what they are without one."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from calls import Call
from clusters import until
from hands import Hand, ended, lines_until
from hands import cluster as spec_of
from spreads import SECRET, Servers

import paceline
from paceline import mirroring
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.engines.base import Exit, Stream, Task, TaskSpec, engine
from paceline.mirroring import Mirror, of_cluster
from paceline.mirrors import place
from paceline.transports.base import transport

LARGE = 1 << 17
"""Numbers of 8 bytes: more than is sent at once."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, "tcp", 2)
    try:
        yield made
    finally:
        made.stack.close()
        for index in list(made.running):
            made.end(index)


def mirrored(servers: Servers, **options: Any) -> Mirror:
    return servers.stack.enter_context(of_cluster(servers.spec, secret=SECRET, **options))


def full(value: float, size: int = LARGE) -> np.ndarray[Any, Any]:
    return np.full(size, float(value))


# Once


def test_each_version_is_fetched_once_for_all_readers_and_only_if_one_wants_it(
    servers: Servers,
) -> None:
    mirror, chief = mirrored(servers), servers.session()
    variable = chief.variable("v", full(0))
    readers = [servers.session().variable("v") for _ in range(3)]
    for value in range(1, 6):
        variable.assign(full(-1))
        variable.assign(full(value))
        calls = [Call(reader.read) for reader in readers]
        for call in calls:
            assert (call.outcome().tree == value).all()
    told = mirror.stats()
    assert (told["fetched"], told["asked"]) == (5, 15)
    assert told["fetched_bytes"] == 5 * 8 * LARGE
    # Those last asked for stay, and what handles still look at.
    assert told["copies"] <= 3


def test_readers_share_one_copy(servers: Servers) -> None:
    mirrored(servers)
    servers.session().variable("v", full(7))
    one, two = (servers.session().variable("v").read() for _ in range(2))
    assert not one.tree.flags.writeable
    assert (one.tree == two.tree).all()
    assert one.version == two.version


def test_what_has_not_changed_and_what_is_small_asks_no_mirror(servers: Servers) -> None:
    mirror, chief = mirrored(servers), servers.session()
    chief.variable("v", full(1))
    chief.variable("small", full(1, 1 << 13))
    session = servers.session()
    large, small = session.variable("v"), session.variable("small")
    kept = large.read()
    for _ in range(3):
        assert large.read() is kept
        assert small.read().tree.nbytes == 1 << 16
    assert mirror.stats()["asked"] == 1
    assert session.mirror() == {"at": mirror.at, "copies": 1, "bytes": 8 * LARGE}


def test_a_spread_variable_comes_once_from_each_of_its_servers(servers: Servers) -> None:
    mirror, chief = mirrored(servers), servers.session()
    variable = chief.spread("v", {"a": full(0), "b": full(0)})
    readers = [servers.session().variable("v") for _ in range(3)]
    for value in range(1, 4):
        variable.assign_add({"a": full(1), "b": full(2)})
        for reader in readers:
            tree = reader.read().tree
            assert (tree["a"] == value).all()
            assert (tree["b"] == 2 * value).all()
    assert mirror.stats()["fetched"] == 6
    assert mirror.stats()["asked"] == 18


def test_tags_and_targets_and_replicas_are_read_through_a_mirror(servers: Servers) -> None:
    mirror, chief = mirrored(servers), servers.session()
    variable = chief.variable("v", full(1))
    variable.tag("old")
    variable.assign(full(2))
    reader, target = servers.session().variable("v"), np.empty(LARGE)
    assert reader.read_into(target) == variable.version
    assert (target == 2).all()
    assert (reader.read(tag="old").tree == 1).all()
    reader.read_into(target, tag="old")
    assert (target == 1).all()
    assert mirror.stats()["fetched"] == 2


@pytest.mark.parametrize("nbytes", [(64 << 10) + 8, 1 << 20, (3 << 20) + 8, 100 << 20])
def test_trees_of_any_size_come_whole(servers: Servers, nbytes: int) -> None:
    mirror, chief = mirrored(servers), servers.session()
    content = np.arange(nbytes, dtype=np.uint8)
    chief.variable("v", {"name": "net", "w": content, "none": np.empty((0, 3))})
    tree = servers.session().variable("v").read().tree
    assert tree["name"] == "net"
    assert np.array_equal(tree["w"], content)
    assert tree["none"].shape == (0, 3)
    assert mirror.stats()["fetched"] == 1


# Newest, whole


def test_a_read_after_an_assign_has_it_and_never_parts_of_two(servers: Servers) -> None:
    mirror = mirrored(servers)
    chief = servers.session()
    variable = chief.variable("v", full(0))
    mine = [servers.session().variable("v") for _ in range(2)]
    done: list[int] = []

    def follow(reader: paceline.Variable[Any]) -> int:
        seen = 0
        while not done:
            tree = reader.read().tree
            assert (tree == tree[0]).all()
            assert tree[0] >= seen
            seen = int(tree[0])
        return seen

    calls = [Call(follow, reader) for reader in mine]
    own = servers.session().variable("v")
    for value in range(1, 61):
        variable.assign(full(value))
        assert (own.read().tree == value).all()
    done.append(1)
    for call in calls:
        call.outcome()
    assert mirror.stats()["fetched"] <= 61


def test_a_snapshot_stays_as_it_is_while_others_come(servers: Servers) -> None:
    mirrored(servers, keep=1)
    variable, session = servers.session().variable("v", full(0)), servers.session()
    reader = session.variable("v")
    held = [reader.read()]
    for value in range(1, 8):
        variable.assign(full(value))
        held.append(reader.read())
    session.close()
    for value, snapshot in enumerate(held):
        assert (snapshot.tree == value).all()


def test_a_version_is_kept_at_home_until_the_reader_has_it(servers: Servers) -> None:
    """What a lean reply tells of stays, and goes when the reader lets go or is lost."""
    chief = servers.session()
    variable = chief.variable("v", full(1))
    reader = servers.session()
    value = reader.connection.call(m.Read("v", m.NO_VERSION, 0.0, lean=True))
    assert (value.version, value.layout) == (variable.version, b"")
    variable.assign(full(2))
    assert [one["held_by"] for one in variable.memory()["versions"]] == [
        [reader.task],
        ["current"],
    ]
    at = reader.connection.call(m.ReadAt("v", value.version))
    assert at.layout
    reader.connection.call(m.LetGo("v", value.version))
    assert len(variable.memory()["versions"]) == 1
    gone = reader.connection.call(m.ReadAt("v", value.version))
    assert (gone.version, gone.layout) == (m.NO_VERSION, b"")
    reader.connection.call(m.Read("v", m.NO_VERSION, 0.0, lean=True))
    variable.assign(full(3))
    reader.close()
    until(lambda: len(variable.memory()["versions"]) == 1)


# Without


def test_a_reset_reaches_readers_of_a_mirror(servers: Servers) -> None:
    mirrored(servers)
    chief = servers.session()
    chief.variable("v", full(1))
    session = servers.session()
    reader = session.variable("v")
    assert (reader.read().tree == 1).all()
    chief.reset("")
    with pytest.raises(paceline.WasReset, match=r"^the default container was reset by worker:0$"):
        reader.read()
    chief.variable("v", full(5))
    assert (session.variable("v").read().tree == 5).all()


def test_a_mirror_that_ends_costs_its_readers_nothing_and_one_that_comes_is_found(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    chief, session = servers.session(), servers.session()
    variable = chief.variable("v", full(0))
    reader = session.variable("v")
    assert (reader.read().tree == 0).all()
    assert session.mirror() is None
    for value in (1, 2):
        with of_cluster(servers.spec, secret=SECRET) as mirror:

            def found(number: int = value) -> bool:
                variable.assign(full(number))
                assert (reader.read().tree == number).all()
                return session.mirror() is not None

            until(found)
            assert mirror.stats()["fetched"]
        variable.assign(full(10 * value))
        assert (reader.read().tree == 10 * value).all()
        assert session.mirror() is None
    said = [record.getMessage() for record in caplog.records]
    assert f"{session.task}: the mirror of this host has ended" in said
    assert f"{session.task}: reads large variables through the mirror of this host" in said


def test_a_home_that_is_started_again_is_read_through_the_same_mirror(servers: Servers) -> None:
    mirror = mirrored(servers)
    session = servers.session()
    first = session.variable("v", full(1)).read()
    servers.end(0)
    servers.start(0)
    again = servers.session()
    again.variable("v", full(2))
    reader = servers.session().variable("v")
    # Started within a second, its versions have the numbers of those before.
    assert (reader.read().tree == 2).all()
    assert (first.tree == 1).all()

    def fetched() -> bool:
        before = mirror.stats()["fetched"]
        again.variable("v").assign_add(full(1))
        reader.read()
        return bool(mirror.stats()["fetched"] > before)

    until(fetched)
    session.close()


def test_what_a_mirror_cannot_have_the_reader_asks_the_home_for(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = mirrored(servers)
    line = mirror._lines.all[0]
    line.fail(paceline.Disconnected("cut off for the test"))
    monkeypatch.setattr(mirror._lines, "line", lambda task, timeout: line)
    servers.session().variable("v", full(3))
    assert (servers.session().variable("v").read().tree == 3).all()
    assert mirror.stats()["failed"] == 1


# Who it is for


def test_a_mirror_does_nothing_else(servers: Servers) -> None:
    mirror = mirrored(servers)
    carrier = transport("unix")
    channel = carrier.connect(mirror.at.removeprefix("unix:"), SECRET, 5.0)
    line = Connection(channel, carrier.arena(), mirror.at)
    try:
        line.session = line.call(m.Join("reader", -1, 1, b"")).session
        refused = r"Await: asked of a server that does not do that; mirrors lend copies,"
        with pytest.raises(paceline.Unsupported, match=f"^{refused}"):
            line.call(m.Await("v", 0.0))
        mirror._server.service.beside = lambda *work: None
        with pytest.raises(paceline.TimedOut, match=r"^read 'v': it is on its way from tcp:"):
            line.call(m.Mirrored("tcp:x:1", "v", 1, False, 0, 0.0))
    finally:
        line.close()


def test_its_name_says_nothing_to_those_without_the_secret() -> None:
    addresses = ["tcp:10.0.0.1:4032", "tcp:10.0.0.2:4032"]
    mine = place(b"one", addresses)
    assert mine == place(b"one", addresses[::-1])
    assert mine not in (place(b"two", addresses), place(b"one", addresses[:1]))
    assert mine.startswith("@paceline-")
    assert "10.0.0" not in mine


def test_a_host_has_one_mirror_of_a_cluster(servers: Servers) -> None:
    mirrored(servers)
    match = r"^a mirror of tcp:.* is there already: cannot listen at unix:@paceline-"
    with pytest.raises(paceline.Refused, match=match):
        of_cluster(servers.spec, secret=SECRET)


def test_what_shares_memory_needs_no_mirror(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "unix", ps=1, worker=1)
    match = r"^a mirror is for servers that are reached over TCP, these share memory .*: unix:"
    with pytest.raises(paceline.SchemaError, match=match):
        of_cluster(spec, secret=SECRET)


def test_names_without_files_are_linuxs(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    match = r"^a mirror needs names of sockets without files, which Linux has$"
    with pytest.raises(paceline.Unsupported, match=match):
        of_cluster(servers.spec, secret=SECRET)


# Processes

ROUNDS = """
import numpy as np
import paceline


def play(policy, worker):
    rng = np.random.default_rng(worker.seed)
    while True:
        tree = policy.read().tree
        assert (tree == tree[0]).all()
        yield tree[:4] + rng.normal(size=4)


with paceline.Cluster.from_environment(seed=3, progress="quiet") as cluster:
    policy = cluster.variable("policy", np.zeros(20_000))
    total = np.zeros(4)
    for n, batch in enumerate(cluster.collect(play, policy, batch_size=4, schedule="lockstep")):
        total += batch.data.sum(axis=0)
        policy.assign(np.full(20_000, float(batch.data.mean())))
        if n == 20:
            break
    if cluster.is_chief:
        print("total", total.tobytes().hex(), flush=True)
    else:
        print("mirror", cluster.session.mirror(), flush=True)
"""


@contextmanager
def by_hand(folder: Path, **programs: str) -> Iterator[Hand]:
    hand = Hand(folder, spec_of(folder, "tcp", ps=1, chief=1, worker=2), **programs)
    try:
        yield hand
    finally:
        hand.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_lockstep_gives_equal_bits_through_a_mirror(tmp_path: Path) -> None:
    totals = []
    for number, count in enumerate((0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with by_hand(folder, rounds=ROUNDS) as hand:
            server = hand.serve(0)
            mirrors = [hand.paceline("mirror", "--cluster", "cluster.toml") for _ in range(count)]
            for mirror in mirrors:
                lines_until(mirror, "a mirror of ps:0")
            workers = [hand.run("rounds.py", "worker", n) for n in (0, 1)]
            out, _ = ended(hand.run("rounds.py", "chief", 0))
            totals.append(out.splitlines()[-1])
            for worker in workers:
                assert ("mirror None" in ended(worker)[0]) == (not count)
            for mirror in mirrors:
                # Each of 21 rounds has a version, and one more may be there at the end.
                told = ended(mirror)[0].splitlines()[-1]
                assert told.startswith("the cluster is done: lent ")
                assert int(told.split()[8]) <= 22
            ended(server)
    assert totals[0].startswith("total ")
    assert totals[0] == totals[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_readers_go_on_when_a_mirror_is_killed_or_does_not_answer(
    tmp_path: Path, how: signal.Signals
) -> None:
    with by_hand(tmp_path) as hand:
        server = hand.serve(0)
        lines_until(server, "missing")
        mirror = hand.paceline("mirror", "--cluster", "cluster.toml")
        lines_until(mirror, "a mirror of ps:0")
        secret = tmp_path / ".paceline" / "secret"
        with (
            paceline.Session(hand.spec, secret_file=secret, job="chief", index=0) as chief,
            paceline.Session(hand.spec, secret_file=secret, job="worker", index=0) as session,
        ):
            variable = chief.variable("v", full(0))
            reader = session.variable("v")
            held = reader.read()
            assert session.mirror() is not None
            _stopped(mirror, how)
            for value in range(1, 6):
                variable.assign(full(value))
                began = time.monotonic()
                assert (reader.read().tree == value).all()
                assert time.monotonic() - began < 15.0
            assert (held.tree == 0).all()
            mirror.send_signal(signal.SIGCONT)
            if how == signal.SIGSTOP:
                # It goes on to lend what it has; what somebody looks at stays as it was.
                told = session.mirror()
                before = -1 if told is None else told["copies"]

                def again() -> bool:
                    variable.assign_add(full(1))
                    reader.read()
                    now = session.mirror()
                    return now is not None and now["copies"] > before

                until(again)
                assert (held.tree == 0).all()


def test_a_launched_mirror_ends_with_its_launcher(servers: Servers) -> None:
    session = servers.session()
    variable = session.variable("v", full(1))
    targets = tuple((str(task), servers.spec.target(*task)) for task in servers.spec.servers())
    heard: SimpleQueue[Any] = SimpleQueue()

    class Hears:
        def received(self, task: Task, message: object) -> None:
            heard.put(message)

        def printed(self, task: Task, line: str, stream: Stream) -> None:
            heard.put(line)

        def ended(self, task: Task, end: Exit) -> None:
            heard.put(end)

    with engine("processes") as tasks:
        task = tasks.start(TaskSpec("mirror:0", mirroring.run), Hears())
        task.send(mirroring.Setup(targets, SECRET))
        assert heard.get(timeout=60.0) == mirroring.UP
        assert (variable.read().tree == 1).all()
        assert session.mirror() is not None
        tasks.stop(task, 30.0)
        assert heard.get(timeout=1.0) == Exit(status=0)
        variable.assign(full(2))
        assert (variable.read().tree == 2).all()
        assert session.mirror() is None


def _stopped(program: subprocess.Popen[str], how: signal.Signals) -> None:
    program.send_signal(how)
    if how == signal.SIGKILL:
        program.wait()
    else:
        state = Path(f"/proc/{program.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
