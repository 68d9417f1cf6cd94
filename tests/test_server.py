"""A server by hand: who may come in, when it is done, and what a session finds on it."""

import os
import re
import stat
import threading
import time
from pathlib import Path

import pytest
from calls import Call
from clusters import until
from hands import cluster, served

import paceline
from paceline import (
    Closed,
    ClusterSpec,
    Refused,
    SchemaError,
    Server,
    Session,
    TimedOut,
    UnknownName,
    reach,
)
from paceline import secret as secrets
from paceline.server.local import LocalServer

SECRET = b"a secret of sixteen bytes"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, where secrets are."""
    for name in ("PACELINE_SECRET_FILE", "PACELINE_CLUSTER", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


carriers = pytest.mark.parametrize("carrier", ["tcp", "unix"])


@carriers
def test_sessions_on_a_servers_target_and_on_its_spec_share(home: Path, carrier: str) -> None:
    spec = cluster(home, carrier, ps=1, worker=2)
    with Server(spec, job_name="ps") as server:
        assert server.target == spec.target("ps", 0)
        with Session(server.target) as one, Session(spec, job="worker", index=1) as two:
            one.variable("v", 3)
            assert two.variable("v").read().tree == 3
            assert (one.task, two.task) == ("session:0", "worker:1")
            assert one.resources()["members"] == ["session:0", "worker:1"]


@carriers
def test_join_returns_when_all_workers_have_said_goodbye(home: Path, carrier: str) -> None:
    spec = cluster(home, carrier, ps=1, worker=2)
    with Server(spec, job_name="ps") as server:
        joined = Call(server.join)
        first, second = (Session(spec, job="worker", index=n) for n in range(2))
        with pytest.raises(
            TimedOut,
            match=r"^join ps:0 after 0\.0 s: the cluster goes on; worker:0, worker:1 are here,",
        ):
            server.join(timeout=0)
        first.close()
        with Session(spec, job="guest"):
            pass
        with pytest.raises(TimedOut, match=r"; worker:1 is here, nobody is missing$"):
            server.join(timeout=0.05)
        second.close()
        joined.outcome()
        server.join()


def test_a_session_says_which_server_it_waits_for_again_and_again(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "SAY_AFTER", 0.05)
    monkeypatch.setattr(reach, "SAY_AGAIN", 0.05)
    spec = cluster(home, ps=2, worker=1)
    second = spec.target("ps", 1)
    with Server(spec, job_name="ps", task_index=0):
        opening = Call(lambda: Session(spec, job="worker", index=0))
        until(lambda: len(caplog.messages) > 2)
        assert all(
            re.match(f"worker:0 waits for the server ps:1 at {second}: no server at ", said)
            for said in caplog.messages
        )
        assert all(isinstance(r.args, tuple) and type(r.args[1]) is str for r in caplog.records)
        with Server(spec, job_name="ps", task_index=1):
            opening.outcome().close()
    assert re.match(
        f"worker:0: the server ps:1 at {second} is there, after . s", caplog.messages[-1]
    )


def test_a_session_that_comes_again_is_waited_for_again(home: Path) -> None:
    spec = cluster(home, ps=1, worker=2)
    with Server(spec, job_name="ps") as server, Session(spec, job="worker", index=1):
        first = Session(spec, job="worker", index=0)
        first.connection.leave()
        with Session(spec, job="worker", index=0):
            # The first one's connection ends after the second has come.
            first.connection.close(left=True)
            until(lambda: len(server._server._peers) == 2)
            assert "worker:0, worker:1 are here" in server.told()
        first.close()
        assert "worker:1 is here, nobody is missing" in server.told()


def test_a_chiefs_goodbye_ends_the_waits_of_all_and_then_the_server(home: Path) -> None:
    spec = cluster(home, ps=1, chief=1, worker=1)
    with Server(spec, job_name="ps") as server:
        chief = Session(spec, job="chief", index=0)
        with Session(spec, job="worker", index=0) as worker:
            queue = worker.queue("q", 4)
            waiting = Call(lambda: queue.dequeue(timeout=None))
            until(lambda: server._server.service.parking.waiting(("items", "q")))
            assert not worker.should_stop()
            chief.close()
            with pytest.raises(Closed, match=r"^the cluster is done: chief:0 has left$"):
                waiting.outcome()
            with pytest.raises(Closed, match=r"^the cluster is done: chief:0 has left$"):
                queue.dequeue()
            assert worker.should_stop()
            began = time.monotonic()
            server.join(timeout=20)
            assert time.monotonic() - began > 1
            server.close()
            assert worker.should_stop()


def test_anybody_may_ask_to_stop_and_the_chief_has_the_last_word(home: Path) -> None:
    spec = cluster(home, ps=1, chief=1, worker=1)
    with Server(spec, job_name="ps") as server:
        chief = Session(spec, job="chief", index=0)
        with Session(spec, job="worker", index=0) as worker:
            worker.request_stop("solved")
            assert chief.should_stop()
        with pytest.raises(TimedOut, match=r"the cluster goes on; chief:0 is here"):
            server.join(timeout=0.05)
        chief.variable("v", 1)
        chief.close()
        server.join(timeout=20)


def test_private_sessions_can_be_asked_to_stop_too() -> None:
    with Session(channel=LocalServer(waits=False).connect()) as session:
        assert not session.should_stop()
        session.request_stop()
        assert session.should_stop()
        assert session.uninitialized(["v", "w"]) == ["v", "w"]
        session.variable("w", 1)
        assert session.uninitialized(["v", "w"]) == ["v"]
        with pytest.raises(paceline.WouldBlock, match=r"no variable 'v' is initialised"):
            session.wait_until_initialized(["w", "v"])


def test_waiting_until_all_are_initialised(home: Path) -> None:
    spec = cluster(home, ps=1, worker=2)
    with Server(spec, job_name="ps"), Session(spec, job="worker", index=0) as one:
        with Session(spec, job="worker", index=1) as two:
            one.variable("v", 1)
            with pytest.raises(
                TimedOut, match=r"^\['w'\] of \['v', 'w'\] are not initialised: no var"
            ):
                two.wait_until_initialized(["v", "w"], timeout=0.05)
            waiting = Call(lambda: two.wait_until_initialized(["v", "w"]))
            one.variable("w", 1)
            waiting.outcome()
            assert two.uninitialized(["v", "w"]) == []


def test_a_session_with_another_spec_is_refused_with_the_first_difference(home: Path) -> None:
    spec = cluster(home, ps=1, worker=2)
    other = ClusterSpec({**spec.as_dict(), "worker": [spec.address("worker", 0)]})
    there = spec.address("worker", 1)
    with Server(spec, job_name="ps"):
        with pytest.raises(
            Refused,
            match=rf"^the cluster that worker:0 was given is not the one of this server, ps:0:"
            rf" worker:1 is at {there} here, missing there; give all processes the same$",
        ):
            Session(other, job="worker", index=0)


def test_two_processes_cannot_be_the_same_task(home: Path) -> None:
    spec = cluster(home, ps=1, worker=2)
    with Server(spec, job_name="ps"), Session(spec, job="worker", index=0):
        with pytest.raises(
            Refused, match=rf"^task worker:0 is held by process {os.getpid()} and al"
        ):
            Session(spec, job="worker", index=0)


def test_a_task_that_is_not_in_the_spec_is_an_error(home: Path) -> None:
    spec = cluster(home, ps=1, worker=2)
    with pytest.raises(
        UnknownName, match=r"^no task worker:2 in the cluster; job 'worker' has \[0, 1"
    ):
        Session(spec, job="worker", index=2)
    with pytest.raises(
        SchemaError, match=r"^say which task of job 'worker' this is: index= one of"
    ):
        Session(spec, job="worker")
    with pytest.raises(UnknownName, match=r"^no task ps:1 in the cluster; job 'ps' has \[0\]$"):
        Server(spec, job_name="ps", task_index=1)
    with pytest.raises(
        SchemaError, match=r"^say which task this is: job_name= one of \['ps', 'work"
    ):
        Server(spec)
    with pytest.raises(
        SchemaError, match=r"^say which task of job 'worker' this is: task_index= on"
    ):
        Server(spec, job_name="worker")
    with pytest.raises(
        SchemaError, match=r"^worker:0 runs a server, and by their jobs only \['ps:0"
    ):
        Server(spec, job_name="worker", task_index=0)


@carriers
def test_a_place_in_use_is_told_with_what_to_do(home: Path, carrier: str) -> None:
    spec = cluster(home, carrier, ps=1)
    said = f"ps:0 cannot listen at {spec.target('ps', 0)}: Address already in use; another process"
    with Server(spec, job_name="ps"):
        with pytest.raises(Refused, match=f"^{re.escape(said)}"):
            Server(spec, job_name="ps")
    Server(spec, job_name="ps").close()


def test_a_host_that_does_not_resolve_is_told(home: Path) -> None:
    spec = ClusterSpec({"ps": ["no-such-host.invalid:4032"]})
    with pytest.raises(Refused, match=r"^ps:0 cannot listen at tcp:no-such-host\.invalid:4032: "):
        Server(spec, job_name="ps", secret=SECRET)
    with pytest.raises(
        TimedOut, match=r"ps:0 at tcp:no-such-host\.invalid:4032 cannot be reached: "
    ):
        Session(spec, secret=SECRET, timeout=0.2)


def test_a_server_that_is_missing_is_waited_for_and_named(home: Path) -> None:
    spec = cluster(home, ps=1, worker=1)
    with pytest.raises(
        TimedOut,
        match=rf"^open the session of worker:0, after 0\.\d s: ps:0 at {spec.target('ps', 0)}"
        r" cannot be reached: .*; starting what is missing ends the wait$",
    ):
        Session(spec, job="worker", index=0, timeout=0.2)
    waiting = Call(lambda: Session(spec, job="worker", index=0))
    with Server(spec, job_name="ps") as server:
        waiting.outcome().close()
        server.join(timeout=20)


def test_the_users_own_secret_is_made_once_and_only_its_owner_may_read_it(home: Path) -> None:
    spec = cluster(home, ps=1)
    made = [Call(lambda: secrets.found(None, None, ["127.0.0.1:1"], "x")) for _ in range(8)]
    assert len({call.outcome() for call in made}) == 1
    path = home / ".paceline" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(path.parent.iterdir()) == [path]
    with Server(spec, job_name="ps"), Session(spec.target("ps", 0)):
        pass


def test_another_secret_is_refused(home: Path) -> None:
    spec = cluster(home, ps=1)
    with Server(spec, job_name="ps", secret=SECRET):
        with Session(spec, secret=SECRET):
            pass
        for wrong in (None, b"another one, also long"):
            with pytest.raises(
                Refused, match=r"^the server refused this session: its secret is ano"
            ):
                Session(spec, secret=wrong)


def test_a_server_that_other_hosts_can_reach_needs_a_secret(home: Path) -> None:
    spec = ClusterSpec({"ps": ["0.0.0.0:0"]})
    said = (
        r"^the server ps:0 has no secret, and other hosts can reach tcp:0\.0\.0\.0:0: make the same"
    )
    with pytest.raises(Refused, match=said):
        Server(spec, job_name="ps")
    with pytest.raises(Refused, match=r"^the server ps:0 has an empty secret$"):
        Server(spec, job_name="ps", secret=b"")
    assert not (home / ".paceline").exists()


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [
        (0o640, SECRET, "has mode 640: others may use it; chmod 600 it"),
        (0o602, SECRET, "has mode 602: others may use it; chmod 600 it"),
        (0o600, b"short\n", "has 5 bytes, at least 16 are needed"),
        (None, b"", "cannot be read: No such file or directory; make one: "),
    ],
)
def test_a_secret_file_that_will_not_do_is_refused(
    home: Path, mode: int | None, content: bytes, said: str
) -> None:
    path = home / "secret"
    if mode is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(Refused, match=f"^the secret file {re.escape(str(path))} {re.escape(said)}"):
        Server(cluster(home, ps=1), job_name="ps", secret_file=path)


def test_the_secret_may_be_in_a_file_that_the_environment_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    spec = cluster(home, ps=1)
    with Server(spec, job_name="ps", secret_file=path):
        monkeypatch.setenv("PACELINE_SECRET_FILE", str(path))
        for target in (spec, spec.target("ps", 0)):
            with Session(target):
                pass


def test_closing_a_server_ends_join_and_is_fine_twice(home: Path) -> None:
    spec = cluster(home, ps=1, worker=1)
    server = Server(spec, job_name="ps")
    joined = Call(server.join)
    server.close()
    server.close()
    joined.outcome()
    server.join()
    assert repr(server) == f"<Server ps:0 at {spec.target('ps', 0)}>"
    assert "paceline-server" not in [thread.name for thread in threading.enumerate()]


def test_news_say_who_comes_and_goes(home: Path) -> None:
    news: list[str] = []
    spec = cluster(home, calculation=1, worker=1)
    with Server(spec, job_name="calculation", on_news=news.append) as server:
        with Session(spec, job="worker", index=0) as session:
            session.request_stop("solved")
        server.join(timeout=20)
    assert news == [
        f"calculation:0: worker:0 is here (process {os.getpid()}); the cluster goes on; worker:0 is"
        " here, nobody is missing",
        "calculation:0: worker:0 asks all to stop: solved; the cluster was stopped; worker:0 is"
        " here, nobody is missing",
        "calculation:0: worker:0 has left; the cluster is done; nobody is here, nobody is missing",
    ]


def test_a_server_in_a_training_process_with_its_own_session(home: Path) -> None:
    spec = cluster(home, "unix", chief=1, worker=1)
    for servers in (None, ["chief"]):
        server = Server(spec, job_name="chief", servers=servers)
        with server, Session(server.target, job="chief", index=0) as chief:
            queue = chief.queue("q", 2)
            with Session(spec, job="worker", index=0, servers=["chief"]) as worker:
                worker.queue("q").enqueue(1)
            server.join(timeout=20)
            assert queue.dequeue(timeout=20) == 1


@carriers
def test_names_have_one_home_among_several_servers(home: Path, carrier: str) -> None:
    spec = cluster(home, carrier, ps=2, worker=2)
    with served(spec), Session(spec, job="worker", index=0) as one:
        with Session(spec.target("ps", 1)) as two:
            waiting = Call(lambda: two.variable("later"))
            counting = Call(lambda: two.counter("steps", start=None))
            sharing = Call(lambda: two.reader("pieces"))
            meeting = Call(lambda: two.barrier("all"))
            with one.device("/job:ps/task:1"):
                one.variable("v", 1)
                one.variable("later", 5)
                with one.device("ps:0"):
                    one.queue("q", 4)
                one.queue("r", 4)
                one.counter("steps").add(3)
                one.reader("pieces", [1, 2])
                one.barrier("all", 2)
            one.variable("w", 2)
            with two.device("ps:0"):
                assert two.variable("v", 7).read().tree == 1
            assert waiting.outcome().read().tree == 5
            assert counting.outcome().add(1) == 4
            assert repr(sharing.outcome()).startswith("<Reader 'pieces'")
            assert repr(meeting.outcome()).startswith("<Barrier 'all'")
            homes = two.resources()["homes"]
            made = ("counter steps", "reader pieces", "barrier all")
            assert [homes.pop(each) for each in made] == ["ps:1"] * 3
            assert homes == {
                "variable v": "ps:1",
                "variable later": "ps:1",
                "queue q": "ps:0",
                "queue r": "ps:1",
                "variable w": "ps:0",
            }
            assert sorted(two.resources()["variables"]) == ["later", "v", "w"]
            assert two.resources()["members"] == ["worker:0", "session:0"]
            assert two.uninitialized(["w", "x", "v"]) == ["x"]
            with pytest.raises(
                TimedOut, match=r"^nobody has made the variable 'x' on any server; there"
            ):
                two.variable("x", timeout=0.05)
            with pytest.raises(
                UnknownName, match=r"^ps:2 runs no server; there are \['ps:0', 'ps:1'\]$"
            ):
                with one.device("ps:2"):
                    pass
        assert one.handle(one.variable("v").__paceline_handle__()).read().tree == 1


@carriers
def test_counters_barriers_and_readers_are_waited_for_at_their_home(
    home: Path, carrier: str
) -> None:
    spec = cluster(home, carrier, ps=2, worker=2)
    with served(spec), Session(spec, job="worker", index=0) as one:
        with Session(spec.target("ps", 1)) as two:
            waiting = [
                Call(lambda: two.counter("step", None, timeout=20).add()),
                Call(lambda: two.barrier("b", timeout=20).n),
                Call(lambda: [piece.value for piece in two.reader("r", timeout=20)]),
            ]
            with one.device("ps:1"):
                one.counter("step", 5)
                one.barrier("b", 3)
                one.reader("r", ["a"])
            assert [call.outcome() for call in waiting] == [6, 3, ["a"]]
            assert set(two.resources()["homes"].values()) == {"ps:1"}
            with pytest.raises(TimedOut, match=r"^nobody has made the barrier 'x' on any server;"):
                two.barrier("x", timeout=0)
        assert one.handle(one.counter("step", 5).__paceline_handle__()).value == 6


def test_each_server_knows_each_session_and_is_done_by_itself(home: Path) -> None:
    spec = cluster(home, ps=2, chief=1, worker=1)
    with served(spec) as servers:
        chief = Session(spec, job="chief", index=0)
        worker = Session(spec, job="worker", index=0)
        for server in servers:
            assert "chief:0, worker:0 are here, nobody is missing" in server.told()
        worker.close()
        chief.close()
        for server in servers:
            server.join(timeout=20)


def test_of_several_servers_all_that_are_missing_are_named(home: Path) -> None:
    spec = cluster(home, ps=3, worker=1)
    with Server(spec, job_name="ps", task_index=1):
        with pytest.raises(
            TimedOut,
            match=rf"^open the session of worker:0, after .* s: ps:0 at {spec.target('ps', 0)} and"
            rf" ps:2 at {spec.target('ps', 2)} cannot be reached; ps:1 answered: ",
        ):
            Session(spec, job="worker", index=0, timeout=0.2)


def test_a_session_takes_its_task_from_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = cluster(home, ps=1, worker=1)
    told = str(spec.as_dict()).replace("'", '"')
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {told}, "task": {{"type": "worker"}}}}')
    with Server(spec, job_name="ps"), Session.from_environment() as session:
        assert session.task == "worker:0"
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {told}, "task": {{"type": "ps", "index": 0}}}}')
    with Server(ClusterSpec.from_environment()) as server:
        assert str(server.task) == "ps:0"
