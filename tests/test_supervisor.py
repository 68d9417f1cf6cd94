"""Who initialises and who waits, when all stop, and what is saved last."""

from __future__ import annotations

import signal
import subprocess
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hands
import numpy as np
import pytest
from calls import Call
from clusters import until

import paceline
from paceline import checkpoints, reach
from paceline.core.cluster_state import ClusterState, Phase
from paceline.core.spec import Spec, Task

TRAIN = """
import sys
import numpy as np
import paceline

def train(sv, total):
    for step in sv.loop():
        total.assign_add(np.float64(1))

folder, steps, *how = sys.argv[1:]
with paceline.Session.from_environment() as session:
    init = {"total": np.float64(0)}
    with paceline.Supervisor(session, init=init, checkpoint=folder, steps=int(steps)) as sv:
        print("in", session.task, flush=True)
        total = session.variable("total")
        if how == ["fails"]:
            raise ValueError("bad luck")
        if how == ["waits"]:
            session.queue("nothing", 3).dequeue(timeout=None)
        if how == ["stays"]:
            while not sv.should_stop():
                pass
        train(sv, total)
print("out", flush=True)
"""


def program(
    folder: Path, file: Path, job: str, index: int, steps: int, *how: str
) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(TRAIN)
    words = ["-m", "paceline", "run", str(script), "--cluster", str(file), "--job", job]
    words += ["--task", str(index), "--", str(folder / "saved"), str(steps), *how]
    return hands.start(*words, folder=folder)


def entered(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("in"):
            return
    raise AssertionError(process.communicate(timeout=30))


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[paceline.ClusterSpec, Path, bytes]:
    """A spec, its file, and the secret that its programs find."""
    spec = hands.cluster(tmp_path, ps=2, chief=1, worker=2)
    home = tmp_path / ".paceline"
    home.mkdir(mode=0o700)
    (home / "secret").write_bytes(b"a secret of the tests, and no other")
    (home / "secret").chmod(0o600)
    return spec, hands.toml(spec, tmp_path / "cluster.toml"), (home / "secret").read_bytes()


def test_a_program_alone_goes_on_where_it_ended(tmp_path: Path) -> None:
    for limit in (3, 8):
        with paceline.Session() as session:
            init = {"w": {"a": np.zeros(2)}, "never saved": np.ones(1)}
            with paceline.Supervisor(session, init=init, checkpoint=tmp_path, steps=limit) as sv:
                w = session.variable("w")
                begin = w.read().tree["a"][0]
                assert sv.step.value == begin == (0 if limit == 3 else 3)
                assert (sv.restored is None) == (limit == 3)
                for step in sv.loop():
                    w.assign({"a": np.full(2, float(step))})
            assert sv.step.value == limit
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert (found.manifest.step, set(found.manifest.of().variables)) == (8, {"w", "never saved"})


def test_init_may_be_a_function_and_keeps_what_there_is(tmp_path: Path) -> None:
    made = []

    def init(session: paceline.Session) -> None:
        made.append(session.variable("w", np.zeros(2)))
        session.queue("q", 3)

    with paceline.Session() as session:
        session.variable("w", np.ones(2))
        with paceline.Supervisor(session, init=init) as sv:
            assert session.variable("w").read().tree.tolist() == [1, 1]
            with pytest.raises(paceline.CheckpointError, match="say in which folder"):
                sv.save()
    assert len(made) == 1


def test_all_take_each_step_once_and_the_chief_saves_last(
    tmp_path: Path, cluster: tuple[paceline.ClusterSpec, Path, bytes]
) -> None:
    spec, file, secret = cluster
    workers = [program(tmp_path, file, "worker", n, 200) for n in range(2)]
    chief = program(tmp_path, file, "chief", 0, 200)
    with hands.served(spec, secret=secret) as servers:
        for process in (*workers, chief):
            assert "out" in hands.ended(process)[0]
        for server in servers:
            server.join(timeout=10)
    found = checkpoints.latest(tmp_path / "saved")
    assert found is not None
    assert found.manifest.step == 200
    assert found.read("total") == 200.0


def test_an_error_stops_all_and_the_chief_says_whose_it_was(
    tmp_path: Path, cluster: tuple[paceline.ClusterSpec, Path, bytes]
) -> None:
    spec, file, secret = cluster
    chief = program(tmp_path, file, "chief", 0, 10**9, "stays")
    waiting = program(tmp_path, file, "worker", 0, 10**9, "waits")
    with hands.served(spec, secret=secret):
        entered(chief)
        entered(waiting)
        failing = program(tmp_path, file, "worker", 1, 10**9, "fails")
        _, error = hands.ended(failing, 1)
        assert error.rstrip().endswith("ValueError: bad luck")
        out, error = hands.ended(waiting)
        assert "Traceback" not in error
        assert "out" in out
        _, error = hands.ended(chief, 1)
        assert "WorkerFailed: worker:1 failed: ValueError: bad luck" in error
    # What was trained until then is there.
    assert checkpoints.latest(tmp_path / "saved") is not None


def test_a_chief_that_is_killed_finds_what_lives(
    tmp_path: Path, cluster: tuple[paceline.ClusterSpec, Path, bytes]
) -> None:
    spec, file, secret = cluster
    with hands.served(spec, secret=secret):
        chief = program(tmp_path, file, "chief", 0, 300, "stays")
        entered(chief)
        with paceline.Session(spec, secret=secret, job="worker", index=0) as worker:
            with paceline.Supervisor(worker, steps=300) as sv:
                total = worker.variable("total")
                steps = sv.loop()
                for _ in range(100):
                    next(steps)
                    total.assign_add(np.float64(1))
                chief.send_signal(signal.SIGKILL)
                chief.communicate(timeout=30)
                chief = program(tmp_path, file, "chief", 0, 300, "stays")
                entered(chief)
                assert total.read().tree == 100.0
                for _ in steps:
                    total.assign_add(np.float64(1))
        hands.ended(chief)
    found = checkpoints.latest(tmp_path / "saved")
    assert found is not None
    assert (found.manifest.step, float(found.read("total"))) == (300, 300.0)


def test_who_waits_says_for_whom_again_and_again(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "SAY_AFTER", 0.05)
    monkeypatch.setattr(reach, "SAY_AGAIN", 0.05)
    spec = hands.cluster(tmp_path, ps=1, chief=1, worker=1)
    said = "worker:0 waits for the chief to initialise: it makes 'global_step'"
    with hands.served(spec, secret=b"s" * 32):
        with paceline.Session(spec, secret=b"s" * 32, job="worker", index=0) as session:
            with pytest.raises(paceline.TimedOut, match=f"^{said}; no chief is here: "):
                paceline.Supervisor(session, timeout=0.02).__enter__()
            assert not caplog.messages
            waiting = Call(paceline.Supervisor(session).__enter__)
            until(lambda: len(caplog.messages) > 2)
            assert all(each.startswith(f"{said}: no chief is") for each in caplog.messages)
            session.counter("global_step")
            waiting.outcome()
    assert caplog.messages[-1] == "worker:0: the chief has initialised, after 0 s"


def test_who_waits_for_a_chief_that_fails_is_told_in_one_short_error(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, ps=1, chief=1, worker=1)

    def enter(supervisor: paceline.Supervisor) -> None:
        with supervisor:
            raise AssertionError

    def broken(session: paceline.Session) -> None:
        raise ValueError("no data")

    with hands.served(spec, secret=b"s" * 32):
        chief, worker = (
            paceline.Session(spec, job=job, index=0, secret=b"s" * 32)
            for job in ("chief", "worker")
        )
        with worker:
            waiting = Call(enter, paceline.Supervisor(worker, timeout=30))
            with pytest.raises(ValueError, match="no data") as failed, chief:
                enter(paceline.Supervisor(chief, init=broken))
            with pytest.raises(paceline.Closed) as told:
                waiting.outcome()
    said = (
        "worker:0 waits for the chief to initialise: it makes 'global_step': the cluster is done: "
    )
    assert str(told.value) == f"{said}chief:0 failed: ValueError: no data"
    for error in (failed.value, told.value):
        assert "During handling" not in "".join(traceback.format_exception(error))
    own = [frame.name for frame in traceback.extract_tb(told.value.__traceback__)]
    assert own[-2:] == ["__enter__", "_waited"]


def test_those_who_are_waited_for_are_named(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, ps=1, chief=2, worker=1)
    with hands.served(spec, secret=b"s" * 32) as (server,), ExitStack() as sessions:
        for index in (0, 1):
            one = paceline.Session(spec, job="chief", index=index, secret=b"s" * 32)
            sessions.enter_context(one)
        worker = paceline.Session(spec, job="worker", index=0, secret=b"s" * 32)
        sessions.enter_context(worker)
        with pytest.raises(paceline.TimedOut, match="'global_step'; chief:0, chief:1 are here: no"):
            paceline.Supervisor(worker, timeout=0.1).__enter__()
        assert server.told().endswith("; chief:0, chief:1, worker:0 are here, nobody is missing")


def test_checkpoints_are_written_while_it_trains(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with paceline.Session() as session:
        init = {"w": np.zeros(2)}
        with paceline.Supervisor(session, init=init, checkpoint=folder, save_every=0.01, keep=2):
            until(lambda: len(list(folder.glob("checkpoint-*"))) == 2)


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with paceline.Session() as session:
        sv = paceline.Supervisor(
            session, init={"w": np.zeros(2)}, checkpoint=folder, save_every=0.01
        )

        def supervised() -> None:
            with sv:
                folder.touch()
                until(sv.should_stop)

        with pytest.raises(paceline.CheckpointError, match=r"File exists"):
            supervised()


def test_all_containers_are_saved_and_what_lives_in_another_is_left_alone(tmp_path: Path) -> None:
    def run(session: paceline.Session, made: list[str]) -> paceline.Supervisor:
        def init(session: paceline.Session) -> None:
            session.variable("w", np.zeros(2))
            with session.container("y"):
                # What another container had is there before.
                made.extend(session.uninitialized(["outside", "later"]))

        with (
            session.container("x"),
            paceline.Supervisor(session, init=init, checkpoint=tmp_path) as sv,
        ):
            session.variable("w").assign_add(np.ones(2))
            sv.step.add()
        return sv

    made: list[str] = []
    with paceline.Session() as session:
        with session.container("y"):
            session.variable("outside", 1)
            session.queue("q", 5).enqueue(3)
        run(session, made)
    with paceline.Session() as session:
        with session.container("y"):
            session.variable("outside", 2)
        sv = run(session, made)
        with session.container("y"):
            assert session.variable("outside").read().tree == 2
            assert session.queue("q").dequeue(timeout=0) == 3
        with session.container("x"):
            assert session.variable("w").read().tree.tolist() == [2, 2]
    assert sv.restored is not None
    assert list(sv.restored.manifest.containers) == ["x", "y"]
    assert made == ["later", "later"]


def test_a_spread_variable_comes_back_spread_without_being_made_first(tmp_path: Path) -> None:
    for first in (True, False):
        spec = hands.cluster(tmp_path, ps=2, chief=1)
        with hands.served(spec, secret=b"s" * 32):
            with paceline.Session(spec, job="chief", index=0, secret=b"s" * 32) as session:
                if first:
                    session.spread("net", {"a": np.ones(3), "b": np.ones((2, 2))})
                with paceline.Supervisor(session, checkpoint=tmp_path / "saved"):
                    assert session.resources()["spread"].keys() == {"net"}
                    assert session.variable("net").read().tree["b"].tolist() == [[1, 1], [1, 1]]


LOSES = """
import sys
import numpy as np
import paceline

def init(session):
    session.replica("net", {"a": np.zeros(3), "b": np.zeros((2, 2))})

with paceline.Session.from_environment() as session:
    with paceline.Supervisor(session, init=init, checkpoint=sys.argv[1], save_every=None) as sv:
        net = session.variable("net")
        if sv.restored is None:
            net.assign({"a": np.ones(3), "b": np.ones((2, 2))})
            sv.save()
            net.assign({"a": np.full(3, 2.0), "b": np.full((2, 2), 2.0)})
        print("in", flush=True)
        while not sv.should_stop():
            pass
"""


@pytest.mark.parametrize("chief_too", [False, True])
def test_what_a_server_lost_is_brought_back(
    tmp_path: Path, cluster: tuple[paceline.ClusterSpec, Path, bytes], chief_too: bool
) -> None:
    spec, file, secret = cluster
    (tmp_path / "train.py").write_text(LOSES)
    words = ["-m", "paceline", "run", str(tmp_path / "train.py"), "--cluster", str(file)]
    words += ["--job", "chief", "--", str(tmp_path / "saved")]

    def begun() -> subprocess.Popen[str]:
        process = hands.start(*words, folder=tmp_path)
        entered(process)
        return process

    first = paceline.Server(spec, job_name="ps", task_index=0, secret=secret)
    second = paceline.Server(spec, job_name="ps", task_index=1, secret=secret)
    try:
        chief = begun()
        with paceline.Session(spec, job="worker", index=0, secret=secret) as worker:
            if chief_too:
                chief.kill()
                chief.communicate(timeout=30)
            second.close()
            second = paceline.Server(spec, job_name="ps", task_index=1, secret=secret)
            if chief_too:
                chief = begun()
            # What one server still has is no whole: it is the checkpoint's again.
            found = worker.variable("net").read(timeout=30).tree
            assert found["a"].tolist() == [1, 1, 1]
            assert found["b"].tolist() == [[1, 1], [1, 1]]
            worker.request_stop()
        hands.ended(chief)
    finally:
        first.close()
        second.close()


def test_a_chief_that_died_before_all_was_restored_is_followed_by_one_that_restores(
    tmp_path: Path,
) -> None:
    checkpoints.save(
        tmp_path, 1000, {"": checkpoints.Contents({"w": checkpoints.Saved(1, np.full(3, 7.0))})}
    )
    with paceline.Session() as session:
        # What `init` made of the one before.
        session.variable("w", np.zeros(3))
        with paceline.Supervisor(session, init={"w": np.zeros(3)}, checkpoint=tmp_path) as sv:
            assert sv.step.value == 1000
            assert session.variable("w").read().tree.tolist() == [7, 7, 7]


def test_saving_goes_on_after_a_server_was_started_again(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, ps=2, chief=1)
    folder = tmp_path / "saved"
    first = paceline.Server(spec, job_name="ps", task_index=0, secret=b"s" * 32)
    second = paceline.Server(spec, job_name="ps", task_index=1, secret=b"s" * 32)
    try:
        with paceline.Session(spec, job="chief", index=0, secret=b"s" * 32) as session:

            def init(session: paceline.Session) -> None:
                session.variable("here", np.ones(1))
                with session.device("ps:1"):
                    session.variable("there", np.zeros(1), overwrite=False)

            sv = paceline.Supervisor(session, init=init, checkpoint=folder, save_every=0.1)
            with sv:
                session.variable("there").assign(np.ones(1))
                sv.save()
                second.close()
                second = paceline.Server(spec, job_name="ps", task_index=1, secret=b"s" * 32)
                until(lambda: not session.uninitialized(["there"]))
                assert session.variable("there").read().tree.tolist() == [1]
                newest = checkpoints.found(folder)[-1][0]
                until(lambda: checkpoints.found(folder)[-1][0] > newest + 1)
                assert not sv.should_stop()
    finally:
        first.close()
        second.close()


def test_a_server_that_dies_is_no_end_of_training(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, ps=1, chief=1, worker=1)
    server = paceline.Server(spec, job_name="ps", task_index=0, secret=b"s" * 32)
    with paceline.Session(spec, job="worker", index=0, secret=b"s" * 32) as session:
        session.counter("global_step")
        sv = paceline.Supervisor(session)
        sv.__enter__()
        server.close()
        with pytest.raises(paceline.Disconnected) as caught:
            sv.step.add()
        assert not sv.__exit__(paceline.Disconnected, caught.value, None)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_workers_of_a_launched_cluster_are_not_waited_for(engine: str) -> None:
    with paceline.Cluster(1, engine=engine, progress="quiet") as cluster:
        began = time.monotonic()
        with paceline.Supervisor(cluster.session, init={"w": np.zeros(1)}):
            pass
        assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"session": None}, "the first argument is a session"),
        ({"init": 5}, "init: a dict"),
        ({"checkpoint": 5}, "checkpoint: the path of a folder"),
        ({"checkpoint": ""}, "checkpoint: the path of a folder"),
        ({"checkpoint": "a\0b"}, "checkpoint: the path of a folder"),
        ({"is_chief": "no"}, "is_chief"),
    ],
)
def test_what_is_no_option_is_named(options: dict[str, Any], said: str) -> None:
    with paceline.Session() as session:
        with pytest.raises(paceline.SchemaError, match=said):
            paceline.Supervisor(**{"session": session, **options})


def test_a_step_is_asked_for_within_the_block() -> None:
    with paceline.Session() as session:
        sv = paceline.Supervisor(session)
        with pytest.raises(paceline.SchemaError, match="with"):
            next(sv.loop())


def test_who_interrupts_a_worker_stops_nobody_else() -> None:
    with paceline.Session() as session:
        with pytest.raises(KeyboardInterrupt), paceline.Supervisor(session):
            # A private session's own.
            raise KeyboardInterrupt
        worker = paceline.Supervisor(session, is_chief=False)
        with pytest.raises(KeyboardInterrupt), worker:
            raise KeyboardInterrupt


def test_init_is_a_dict_or_takes_the_session() -> None:
    with paceline.Session() as session:
        with pytest.raises(paceline.SchemaError, match=r"^init: a dict of values"):
            paceline.Supervisor(session, init=lambda: None)  # type: ignore[arg-type]


def unlucky(session: paceline.Session) -> None:
    with session:
        raise ValueError("bad luck")


def test_a_variable_over_several_servers_is_restored_so(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        spec = hands.cluster(tmp_path, ps=2, chief=1)
        with hands.served(spec, secret=b"s" * 32):
            with paceline.Session(spec, job="chief", index=0, secret=b"s" * 32) as session:

                def init(session: paceline.Session) -> None:
                    session.spread("net", {"a": np.zeros(3), "b": np.zeros((2, 2))})

                with paceline.Supervisor(session, init=init, checkpoint=tmp_path / "saved"):
                    net = session.variable("net")
                    assert net.read().tree["b"][1, 1] == value - 1
                    net.assign({"a": np.full(3, value), "b": np.full((2, 2), value)})
                    assert len(session.resources()["parts"]) > 0


def test_a_chief_that_fails_stops_the_others_with_its_reason(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, ps=1, chief=1, worker=1)
    options = {"secret": b"s" * 32}
    with hands.served(spec, **options):
        worker = paceline.Session(spec, job="worker", index=0, secret=b"s" * 32)
        assert worker.stopped() is None
        with pytest.raises(ValueError, match="bad luck"):
            unlucky(paceline.Session(spec, job="chief", index=0, secret=b"s" * 32))
        stopped = worker.stopped()
        assert stopped == ("chief:0 failed: ValueError: bad luck", True)
        with pytest.raises(paceline.Closed, match="chief:0 failed: ValueError: bad luck"):
            worker.queue("q", 3).dequeue()
        worker.close()


def test_a_worker_that_fails_may_come_back(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, ps=1, worker=1)
    with hands.served(spec, secret=b"s" * 32) as (server,):
        with pytest.raises(ValueError, match="bad luck"):
            unlucky(paceline.Session(spec, job="worker", index=0, secret=b"s" * 32))
        with pytest.raises(paceline.TimedOut, match="worker:0 is missing"):
            server.join(timeout=0.05)
        with paceline.Session(spec, job="worker", index=0, secret=b"s" * 32):
            pass
        server.join(timeout=10)


def test_a_chief_that_comes_back_takes_its_failure_back() -> None:
    state = ClusterState(
        Spec({"ps": ["a:1"], "chief": ["b:1"], "worker": ["c:1"]}), [Task("ps", 0)]
    )
    chief, worker = Task("chief", 0), Task("worker", 0)
    state.joined(chief)
    state.joined(worker)
    state.gone(chief, goodbye=True, failed="it did")
    assert (state.reason, state.failed, state.phase) == (
        "chief:0 failed: it did", True, Phase.ENDING,
    )  # fmt: skip
    state.joined(chief)
    assert (state.reason, state.failed, state.phase) == (None, False, Phase.RUNNING)
