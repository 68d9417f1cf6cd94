"""Clusters started by hand: every process from a command line, in unlucky order, some killed."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from clusters import LIMIT, until
from hands import Hand, cluster, ended, lines_until, served, start, toml, when_ended
from pages import ROOT
from programs import EXAMPLES

import paceline
from paceline.transports import lasting

CHIEF = """
import sys
import numpy as np
import paceline

with paceline.Session.from_environment() as session:
    with session.device("/job:ps/task:1"):
        session.variable("w", np.zeros(2))
    results = session.queue("results", 4)
    seen = set()
    while len(seen) < 3:
        seen.add(results.dequeue())
    print(sorted(seen), sys.argv[1:], flush=True)
"""

WORKER = """
import numpy as np
import paceline

with paceline.Session.from_environment() as session:
    weights, results = session.variable("w"), session.queue("results")
    print("works", flush=True)
    try:
        while not session.should_stop():
            weights.assign_add(np.ones(2))
            results.enqueue(session.task)
    except paceline.Closed as e:
        print(e)
"""


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    made = Hand(tmp_path, cluster(tmp_path, ps=2, chief=1, worker=3), chief=CHIEF, worker=WORKER)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(120)
def test_a_cluster_in_unlucky_order_works_and_ends_with_its_chief(hand: Hand) -> None:
    workers = [hand.run("worker.py", "worker", n) for n in (2, 0, 1)]
    chief = hand.run("chief.py", "chief", 0, "--", "--rate", "1")
    for program in workers:
        told = "".join(lines_until(program, "missing: "))
        assert told.count(": nobody is there yet\n") == 2
        assert "missing: ps:0, ps:1, chief:0, worker:" in told
    servers = [hand.serve(1), hand.serve(0)]
    everybody = [chief, *workers, *servers]
    ends = when_ended(everybody)
    out, _ = ended(chief)
    assert "['worker:0', 'worker:1', 'worker:2'] ['--rate', '1']\n" in out
    for program in workers:
        ended(program)
    for program in servers:
        out, _ = ended(program)
        assert re.search(r"^ps:\d: chief:0 has left; ", out, re.MULTILINE)
        assert re.search(r"it ends\n\Z", out)
    late = max(ends) - ends[0]
    # The interpreters need time to end, too.
    assert late < 2.0 + 2.0


@pytest.mark.timeout(120)
def test_a_worker_that_was_killed_is_started_again_and_goes_on(hand: Hand) -> None:
    hand.serve(0), hand.serve(1)
    first = hand.run("worker.py", "worker", 0)
    chief = hand.run("chief.py", "chief", 0)
    lines_until(first, "works")
    first.kill()
    first.wait(LIMIT)
    again = hand.run("worker.py", "worker", 0)
    lines_until(again, "works")
    others = [hand.run("worker.py", "worker", n) for n in (1, 2)]
    for program in (chief, again, *others):
        ended(program)


def test_who_asks_while_a_server_is_away_hears_the_one_that_takes_its_place(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "REFUSED", LIMIT)
    hand.serve(0)
    first = hand.serve(1)
    secret = hand.folder / ".paceline" / "secret"
    until(secret.exists)
    with paceline.Session(hand.spec, job="worker", index=0, secret_file=secret) as session:
        first.kill()
        first.wait(LIMIT)
        asked, unset = Call(session.resources), Call(session.uninitialized, ["w"])
        hand.serve(1)
        assert "worker:0" in asked.outcome()["members"]
        assert unset.outcome() == ["w"]


def test_two_processes_for_one_task_and_the_second_is_refused(hand: Hand) -> None:
    server, other = hand.serve(0), hand.serve(1)
    first = hand.run("worker.py", "worker", 0)
    lines_until(server, "worker:0 is here")
    second = hand.run("worker.py", "worker", 0)
    out, err = ended(second, 2)
    assert err == (
        f"Error: task worker:0 is held by process {first.pid} and alive: another cannot have it\n"
    )
    assert "  missing: " not in out
    for program in (server, other):
        program.send_signal(signal.SIGINT)
        _, err = ended(program, 130)
        assert err == "interrupted\n"


ELSEWHERE = """
import signal
import threading
import paceline

with paceline.Server(paceline.ClusterSpec.from_file("cluster.toml"), job_name="ps") as server:
    [other] = [each for each in threading.enumerate() if each.name == "paceline-server"]
    late = threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGINT))
    late.start()
    try:
        server.join()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_server_whichever_thread_is_given_the_signal(tmp_path: Path) -> None:
    toml(cluster(tmp_path, "unix", ps=1, worker=1), tmp_path / "cluster.toml")
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    out, _ = ended(start("elsewhere.py", folder=tmp_path))
    assert out == "interrupted\n"


def test_a_port_in_use_is_told_with_what_to_do(hand: Hand) -> None:
    first = hand.serve(0)
    lines_until(first, "missing: ")
    _, err = ended(hand.serve(0), 1)
    port = hand.spec.address("ps", 0).rpartition(":")[2]
    assert "ps:0 cannot listen at tcp:127.0.0.1:" in err
    assert f"`ss -ltnp 'sport = :{port}'` says which" in err
    first.send_signal(signal.SIGTERM)
    ended(first, 143)


def test_another_secret_and_another_spec_are_refused(hand: Hand) -> None:
    lines_until(hand.serve(0), "missing: ")
    lines_until(hand.serve(1), "missing: ")
    secret = hand.folder / "secret"
    secret.write_text("not that of the others")
    secret.chmod(0o600)
    out, err = ended(hand.run("worker.py", "worker", 0, "--secret-file", str(secret)), 2)
    assert "the server refused this session: its secret is another one" in out
    assert re.fullmatch(
        r"Error: .*the server refused this session: its secret is another .*\n", err
    )
    assert "  missing: " not in out
    secret.chmod(0o644)
    _, err = ended(hand.run("worker.py", "worker", 0, "--secret-file", str(secret)), 2)
    assert f"the secret file {secret} has mode 644: others may use it; chmod 600 it" in err
    tasks: Any = hand.spec.as_dict()
    toml(
        paceline.ClusterSpec({**tasks, "worker": tasks["worker"][:2]}), hand.folder / "cluster.toml"
    )
    out, err = ended(hand.run("worker.py", "worker", 0), 2)
    assert re.fullmatch(
        r"Error: the cluster that this process was given is not the one of this server, ps:0:"
        r" worker:2 is .*\n",
        err,
    )
    assert "  missing: " not in out


def test_a_session_of_a_task_that_serves_is_told_how_to_serve(hand: Hand) -> None:
    hand.serve(0)
    (hand.folder / "one.py").write_text(
        "import paceline\npaceline.Session.from_environment(timeout=0.5)\n"
    )
    out, err = ended(hand.run("one.py", "ps", 1), 1)
    assert "ps:1 runs a server: `paceline serve` does that, if one.py makes no paceline.Serv" in out
    assert re.search(
        r"TimedOut: open the session of ps:1, .*; ps:1 is this process itself: `paceline serve` or"
        r" paceline\.Server serves it$",
        err.strip(),
    )


def test_tf_config_alone_says_it_all(hand: Hand) -> None:
    spec = paceline.ClusterSpec({"ps": [hand.spec.address("ps", 0)], "worker": ["127.0.0.1:1"]})

    def config(job: str) -> str:
        return json.dumps({"cluster": spec.as_dict(), "task": {"type": job, "index": 0}})

    (hand.folder / "one.py").write_text(
        "import paceline\n"
        "with paceline.Session.from_environment() as session:\n"
        "    print(session.task, session.resources()['members'])\n"
    )
    worker = hand.paceline("run", "one.py", TF_CONFIG=config("worker"))
    server = hand.paceline("serve", TF_CONFIG=config("ps"))
    out, _ = ended(worker)
    assert out.endswith("worker:0 ['worker:0']\n")
    out, _ = ended(server)
    assert out.endswith("ps:0: the cluster is done; nobody is here, nobody is missing: it ends\n")
    _, err = ended(hand.paceline("serve", TF_CONFIG='{"cluster": 3}'), 1)
    assert "TF_CONFIG: a cluster is a dict of jobs with their tasks, not 3" in err
    _, err = ended(hand.paceline("serve"), 1)
    assert "no cluster in the environment" in err


def test_what_is_not_said_is_asked_for(hand: Hand) -> None:
    _, err = ended(hand.paceline("serve", "--cluster", "cluster.toml"), 2)
    assert "say which task this is: --job, one of ['ps', 'chief', 'worker'], and --task" in err
    _, err = ended(hand.paceline("serve", "--cluster", "cluster.toml", "--job", "ps"), 2)
    assert "say which task of job 'ps' this is: --task, one of [0, 1]" in err
    _, err = ended(hand.serve(7), 1)
    assert "no task ps:7 in the cluster; job 'ps' has [0, 1]" in err


@pytest.mark.timeout(120)
def test_the_commands_of_the_readme_start_a_cluster_that_ends_by_itself(tmp_path: Path) -> None:
    for file in (EXAMPLES / "by_hand").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_text(file.read_text())
    # The same tasks, where nobody else is.
    tasks = paceline.ClusterSpec.from_file(tmp_path / "cluster.toml")
    counts = {job: tasks.num_tasks(job) for job in tasks.jobs}
    toml(cluster(tmp_path, "tcp", **counts), tmp_path / "cluster.toml")
    commands = re.findall(r"^paceline (?:run|serve) .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == sum(counts.values())
    started = [start("-m", *line.split(), folder=tmp_path) for line in commands]
    try:
        said = [ended(program)[0] for program in started]
    finally:
        for program in started:
            program.kill()
            program.communicate()
    assert "weights [ 2. -3.]\n" in said[3]
    for index in range(3):
        assert re.search(rf"^worker:{index} ends after [1-9]\d* steps\n\Z", said[index], re.M)


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_a_server_that_ends_tells_every_session_why(tmp_path: Path, carrier: str) -> None:
    spec = cluster(tmp_path, carrier, ps=2, worker=2)
    with (
        served(spec, secret=b"s" * 32) as servers,
        paceline.Session(spec, secret=b"s" * 32, job="worker", index=0) as idle,
        paceline.Session(spec, secret=b"s" * 32, job="worker", index=1) as asks,
    ):
        queue = idle.queue("q", 1)
        asks.request_stop("enough")
        for server in servers:
            server.join(timeout=LIMIT)
            server.close()
        # Nobody has read what the server said last.
        assert idle.should_stop()
        stopped = asks.stopped()
        assert stopped is not None
        assert stopped.reason.endswith("the cluster is done: enough")
        with pytest.raises(paceline.Closed, match="the cluster is done: enough"):
            queue.enqueue(1)
