"""What collections have on their way when a checkpoint is taken, and who gets it afterwards."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import hands
import numpy as np
import pytest
from clusters import LIMIT, accounted, beside, following, gated, quiet, script, until

import paceline
from paceline import checkpoints
from paceline.core import messages as m
from paceline.core.queue_items import Run
from paceline.core.tree import flatten
from paceline.core.versions import count_of, epoch_of

SECRET = b"s" * 32


def opening(
    key: str = "c",
    variable: str | None = "policy",
    size: int = 2,
    turns: list[str] | None = None,
    makers: list[str] | None = None,
) -> m.OpenCollection:
    return m.OpenCollection(key, variable, size, 2, 6, 1 << 20, turns, makers)


def hand_in(session: paceline.Session, *marks: int, key: str = "c", stamp: int = 0) -> None:
    """Items of a worker that read what has that stamp."""
    admitted = session.connection.call(m.Offer(key, [], len(marks), 0, 0.0)).items
    assert admitted == len(marks)
    made = m.RunHead(flatten(1).layout, len(marks), [list(marks)], stamp)
    session.connection.call(m.Offer(key, [made], 0, 0, None))


def counters(session: paceline.Session, key: str = "c") -> dict[str, Any]:
    found: dict[str, Any] = session.connection.call(m.CollectionStats(key)).content
    assert accounted(found)
    return found


def taken(session: paceline.Session, key: str = "c") -> tuple[list[int], list[int]]:
    """The marks and the lags of the next batch."""
    items = session.connection.call(m.Next(key, False, 0.0))
    session.connection.call(m.CollectionStats(key))
    session.connection.tell(m.Delivered(key, items.delivery))
    marks = [mark for head in items.runs for mark in head.columns[0]]
    return marks, [
        lag for head, lag in zip(items.runs, items.lags, strict=True) for _ in head.columns[0]
    ]


def going(session: paceline.Session, folder: Path) -> None:
    """Two items were handed over, two are being so, and one waits."""
    policy = session.variable("policy", 0)
    session.connection.call(opening())
    hand_in(session, 1, 2, stamp=policy.version)
    assert taken(session) == ([1, 2], [0, 0])
    hand_in(session, 3, stamp=policy.version)
    policy.assign(1)
    hand_in(session, 4, 5, stamp=policy.version)
    session.connection.call(m.Next("c", False, 0.0))
    session.save(folder)


def test_what_was_on_its_way_is_handed_over_in_order_with_its_lags(tmp_path: Path) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
        # Whoever held two of them has had them since; that is not in the checkpoint.
        before = counters(session)
    with paceline.Session() as session:
        assert session.restore(tmp_path) is not None
        policy = session.variable("policy")
        assert session.resources()["collections"] == {}
        session.connection.call(opening())
        found = counters(session)
        assert found["accepted"] == before["accepted"] == 5
        assert (found["delivered"], found["stored"], found["started"]) == (2, 3, 3)
        policy.assign(2)
        assert taken(session) == ([3, 4], [2, 1])
        # Its pace is that of one that begins: three batches, of which three items are made.
        assert (counters(session)["finished"], counters(session)["started"]) == (0, 3)
        hand_in(session, 6, 7, 8, stamp=policy.version)
        assert taken(session) == ([5, 6], [1, 0])
        assert counters(session)["finished"] == 1


def test_what_is_too_old_by_then_is_dropped_as_ever(tmp_path: Path) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
    with paceline.Session() as session:
        session.restore(tmp_path)
        session.connection.call(opening())
        session.variable("policy").assign(2)
        session.variable("policy").assign(3)
        assert taken(session) == ([4, 5], [2, 2])
        assert counters(session)["dropped"] == {"stale": 1}


@pytest.mark.parametrize(
    "other",
    [
        opening(size=3),
        opening(variable=None),
        opening(turns=["c:0"]),
        m.OpenCollection("c", "policy", 2, None, 6, 1 << 20),
        m.OpenCollection("c", "policy", 2, 2, 7, 1 << 20),
        m.OpenCollection("c", "policy", 2, 2, 6, 1 << 21),
    ],
)
def test_one_that_is_opened_otherwise_drops_it_and_counts_it(
    tmp_path: Path, other: m.OpenCollection
) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
    with paceline.Session() as session:
        session.restore(tmp_path)
        session.connection.call(other)
        found = counters(session)
        assert (found["accepted"], found["delivered"], found["stored"]) == (5, 2, 0)
        assert (found["dropped"], found["started"]) == ({"epoch": 3}, 0)


def test_one_in_lockstep_begins_anew_after_what_is_dropped(tmp_path: Path) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
    with paceline.Session(job="w") as session:
        session.restore(tmp_path)
        session.connection.call(opening(turns=[session.task]))
        asked = session.connection.post(m.Next("c", False, None), timeout=None)
        stamp = session.variable("policy").version
        hand_in(session, 8, stamp=stamp)
        # One more of its two, and none beyond.
        assert session.connection.call(m.Offer("c", [], 9, 0, 0.0)).items == 1
        made = m.RunHead(flatten(1).layout, 1, [[9]], stamp)
        session.connection.call(m.Offer("c", [made], 0, 0, None))
        assert [head.columns for head in asked.result()[0].runs] == [[[8]], [[9]]]
        assert counters(session)["finished"] == 0


def test_nothing_comes_of_what_has_ended_or_was_reset(tmp_path: Path) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
        session.connection.call(m.EndCollection("c"))
        session.save(tmp_path / "ended")
    for folder, accepted in ((tmp_path / "ended", 0), (tmp_path, 5)):
        with paceline.Session() as session:
            session.restore(folder)
            session.connection.call(opening())
            assert counters(session)["accepted"] == accepted
    with paceline.Session() as session:
        session.restore(tmp_path)
        session.reset()
        session.variable("policy", 0)
        key = session.key("c")
        session.connection.call(opening(key, session.key("policy")))
        assert counters(session, key)["accepted"] == 0


def test_what_nobody_has_opened_goes_with_its_container(tmp_path: Path) -> None:
    def there() -> int:
        gc.collect()
        return sum(type(each) is Run for each in gc.get_objects())

    with paceline.Session() as session:
        going(session, tmp_path)
    del session
    before = there()
    with paceline.Session() as session:
        session.restore(tmp_path)
        assert there() > before
        session.reset()
        assert there() == before


def test_what_nobody_has_opened_is_saved_again_while_it_is_not_too_old(tmp_path: Path) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
    for assigned, stored, dropped in ((0, 3, {}), (1, 3, {}), (1, 2, {"stale": 1})):
        with paceline.Session() as session:
            session.restore(tmp_path)
            for _ in range(assigned):
                session.variable("policy").assign(7)
            session.save(tmp_path)
            session.connection.call(opening())
            found = counters(session)
            assert (found["stored"], found["dropped"]) == (stored, dropped)
            assert found["accepted"] == 5


def test_it_comes_back_once_and_not_to_one_that_is_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline")
    with paceline.Session() as session:
        going(session, tmp_path)
    with paceline.Session() as session:
        session.variable("policy", 0)
        session.connection.call(opening())
        session.restore(tmp_path)
        assert counters(session)["accepted"] == 0
        assert f"{session.task}: collection 'c' is not restored: it exists" in caplog.messages
        session.connection.call(m.EndCollection("c"))
        session.restore(tmp_path)
        session.connection.call(opening("d"))
        assert counters(session, "d")["accepted"] == 0


@pytest.mark.parametrize("resets", [0, 1, 2])
def test_a_variable_that_kept_another_value_stamps_none_of_it(tmp_path: Path, resets: int) -> None:
    with paceline.Session() as session:
        going(session, tmp_path)
    with paceline.Session() as session:
        for _ in range(resets):
            session.variable("policy", 5)
            session.reset()
        policy = session.variable("policy", 5)
        for _ in range(3):
            policy.assign(6)
        session.restore(tmp_path)
        key = session.key("c")
        session.connection.call(opening(key, policy.key))
        assert counters(session, key)["dropped"] == {"epoch": 3}


def test_a_variable_that_was_made_and_assigned_on_the_way_stamps_none_of_it(tmp_path: Path) -> None:
    def init(session: paceline.Session) -> None:
        session.variable("policy", 5).assign(6)

    with paceline.Session() as session:
        going(session, tmp_path)
    with paceline.Session() as session:
        session.variable("policy", 5)
        session.reset()
        with paceline.Supervisor(session, init=init, checkpoint=tmp_path):
            key = session.key("c")
            session.connection.call(opening(key, session.key("policy")))
            assert session.variable("policy").read().tree == 1
            assert counters(session, key)["dropped"] == {"epoch": 3}


def test_by_hand_it_comes_back_when_all_was_started_again_and_once(tmp_path: Path) -> None:
    by_hand = opening(makers=["w:0"])
    with paceline.Session() as session:
        session.variable("policy", 0)
        session.connection.call(by_hand)
        hand_in(session, 1, 2, 3, stamp=session.variable("policy").version)
        session.save(tmp_path)
        # The next chief, of the same servers.
        session.restore(tmp_path)
        session.connection.call(by_hand)
        assert counters(session)["stored"] == 3
    with paceline.Session() as session:
        session.restore(tmp_path)
        for _ in range(2):
            session.connection.call(by_hand)
            assert (counters(session)["stored"], counters(session)["started"]) == (3, 3)
        assert taken(session) == ([1, 2], [0, 0])
        # The program anew: this one has another definition, and the other one has ended.
        session.connection.call(opening(size=1, makers=["w:0"]))
        assert counters(session)["accepted"] == 0


@pytest.mark.parametrize(
    ("saved", "restored"),
    [(None, ["runs", "nets"]), (None, None), (None, ["runs"]), (["runs"], None)],
)
def test_its_variable_may_be_in_another_container(
    tmp_path: Path, saved: list[str] | None, restored: list[str] | None
) -> None:
    def opened(session: paceline.Session) -> str:
        with session.container("runs"):
            key = session.key("c")
        with session.container("nets"):
            policy = session.variable("policy", 0)
        session.connection.call(opening(key, policy.key))
        return key

    with paceline.Session() as session:
        key = opened(session)
        with session.container("nets"):
            policy = session.variable("policy")
        hand_in(session, 1, 2, key=key, stamp=policy.version)
        policy.assign(1)
        session.save(tmp_path, containers=saved)
    with paceline.Session() as session:
        session.restore(tmp_path, containers=restored)
        key = opened(session)
        if saved is None and restored != ["runs"]:
            assert taken(session, key) == ([1, 2], [1, 1])
        else:
            assert counters(session, key)["dropped"] == {"epoch": 2}


def test_it_goes_with_its_variable_to_another_number_of_servers(tmp_path: Path) -> None:
    for turn, ps in enumerate((2, 3, 1, 2)):
        spec = hands.cluster(tmp_path, "unix", ps=ps, worker=1)
        with (
            hands.served(spec, secret=SECRET),
            paceline.Session(spec, job="worker", index=0, secret=SECRET) as session,
        ):
            with session.device(session.servers()[-1]):
                session.restore(tmp_path / "saved")
                policy = session.variable("policy", 0)
                net = session.spread("net", {"a": np.zeros(3), "b": np.zeros(2)})
            for name, of in (("c", policy), ("d", net)):
                near = session.lines.home("variable", of.key, make=False)
                home = session.lines.home("collection", name, near=near)
                home.call(opening(name, of.key, size=1))
                found = home.call(m.CollectionStats(name)).content
                assert accounted(found)
                if name == "c":
                    assert found["stored"] == found["accepted"] == turn
                else:
                    # Its versions began anew, whether it is on several servers or not.
                    assert sum(found["dropped"].values()) == found["accepted"]
                if turn == 0 or (name == "c" and turn < 3):
                    assert home.call(m.Offer(name, [], 1, 0, 0.0)).items == 1
                    made = m.RunHead(flatten(1).layout, 1, [[turn]], of.version)
                    home.call(m.Offer(name, [made], 0, 0, None))
            session.save(tmp_path / "saved")


def test_of_several_servers_one_has_what_no_variable_stamps_any_more(tmp_path: Path) -> None:
    with paceline.Session() as session:
        with session.container("nets"):
            policy = session.variable("policy", 0)
        session.connection.call(opening(variable=policy.key))
        hand_in(session, 1, 2, stamp=policy.version)
        session.save(tmp_path / "saved")
    spec = hands.cluster(tmp_path, "unix", ps=2, worker=1)
    with (
        hands.served(spec, secret=SECRET),
        paceline.Session(spec, job="worker", index=0, secret=SECRET) as session,
    ):
        session.restore(tmp_path / "saved", containers="")
        session.connection.call(opening(variable=None))
        assert counters(session)["dropped"] == {"epoch": 2}


def test_what_waits_elsewhere_is_not_saved_beside_what_was_opened(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, "unix", ps=2, worker=1)

    def opened(session: paceline.Session, ps: str) -> tuple[Any, int]:
        with session.device(ps):
            stamps = session.variable(f"policy on {ps}", 0)
        near = session.lines.home("variable", stamps.key, make=False)
        home = session.lines.home("collection", "c", near=near)
        home.call(opening(variable=stamps.key, size=1))
        return home, stamps.version

    for turn, ps in enumerate(("ps:0", "ps:1", "ps:1")):
        with (
            hands.served(spec, secret=SECRET),
            paceline.Session(spec, job="worker", index=0, secret=SECRET) as session,
        ):
            session.restore(tmp_path / "saved")
            home, stamp = opened(session, ps)
            found = home.call(m.CollectionStats("c")).content
            # What the first one had waits where its variable is, and is no part of this one.
            assert found["accepted"] == found["stored"] == max(0, turn - 1)
            assert home.call(m.Offer("c", [], 1, 0, 0.0)).items == 1
            made = m.RunHead(flatten(1).layout, 1, [[turn]], stamp)
            home.call(m.Offer("c", [made], 0, 0, None))
            session.save(tmp_path / "saved")
    found_last = checkpoints.latest(tmp_path / "saved")
    assert found_last is not None
    kept = [each for each in found_last.manifest.of().things if each.kind == "collection"]
    assert [len(found_last.thing(each).heads) for each in kept] == [2]


def test_a_server_that_alone_was_started_again_has_none_of_it(tmp_path: Path) -> None:
    spec = hands.cluster(tmp_path, "unix", ps=2, worker=1)
    servers = [paceline.Server(spec, job_name="ps", task_index=n, secret=SECRET) for n in range(2)]
    try:
        with paceline.Session(spec, job="worker", index=0, secret=SECRET) as session:
            with session.device("ps:1"):
                policy = session.variable("policy", 0)
            line = session.lines.home("collection", "c", near=session.lines.now(["ps:1"])["ps:1"])
            line.call(opening(size=1))
            line.call(m.Offer("c", [], 1, 0, 0.0))
            made = m.RunHead(flatten(1).layout, 1, [[1]], policy.version)
            line.call(m.Offer("c", [made], 0, 0, None))
            session.save(tmp_path / "saved")
            servers[1].close()
            servers[1] = paceline.Server(spec, job_name="ps", task_index=1, secret=SECRET)
            session.lines.again()
            session.restore(tmp_path / "saved")
            line = session.lines.home("collection", "c", make=False)
            line.call(opening(size=1))
            assert line.call(m.CollectionStats("c")).content["accepted"] == 0
    finally:
        for server in servers:
            server.close()


# Launched clusters


@pytest.mark.timeout(120)
@beside
def test_a_cluster_that_is_started_again_hands_over_what_was_on_its_way(
    engine: str, tmp_path: Path
) -> None:
    with quiet(2, engine, checkpoint=tmp_path, save_every=None) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        batches = cluster.collect(following, policy, batch_size=1, max_lag=2)
        batches.next(timeout=LIMIT)
        until(lambda: batches.stats()["stored"] == 2)
        policy.assign(np.ones(1))
        made = count_of(policy.version) - 1
    with quiet(1, engine, checkpoint=tmp_path, save_every=None) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        batches = cluster.collect(following, policy, batch_size=1, max_lag=2)
        for lag in (1, 2):
            batch = batches.next(timeout=LIMIT)
            assert batch.lag.tolist() == [lag]
            assert count_of(batch.version).tolist() == [made]
            assert epoch_of(batch.version[0]) == epoch_of(policy.version)
            # What it has of its own is from before.
            assert epoch_of(int(batch.data["version"][0])) < epoch_of(policy.version)
            policy.assign(policy.read().tree + 1)
        batch = batches.next(timeout=LIMIT)
        assert epoch_of(int(batch.data["version"][0])) == epoch_of(policy.version)
        assert accounted(batches.stats())
        assert batches.stats()["dropped"] == {}
        until(lambda: batches.stats()["stored"])
    with quiet(1, engine, checkpoint=tmp_path, save_every=None) as cluster:
        policy = cluster.variable("policy", np.zeros(1))
        batches = cluster.collect(following, policy, batch_size=2, max_lag=2)
        found = batches.stats()
        assert accounted(found)
        assert found["dropped"]["epoch"] == found["accepted"] - found["delivered"] - found["stored"]
        assert epoch_of(int(batches.next(timeout=LIMIT).data["version"][0])) == epoch_of(
            policy.version
        )


@pytest.mark.timeout(120)
def test_a_launched_server_that_dies_takes_what_was_on_its_way_with_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with quiet(1, checkpoint=tmp_path / "run", save_every=None) as cluster:
        batches = cluster.collect(gated, str(gate), batch_size=1)
        until(lambda: batches.stats()["stored"] == 1)
        cluster.save()
        os.kill(cluster.processes()["ps:0"], signal.SIGKILL)
        until(lambda: batches.stats()["accepted"] == 0)
        gate.touch()
        assert batches.next(timeout=LIMIT).data.tolist() == [1]


TRAIN = """
import json
import numpy as np
import paceline

def follows(policy, worker):
    while True:
        yield {"count": policy.read().version & (1 << 31) - 1, "run": run}

run = int(open("turn").read())
with paceline.Cluster(2, checkpoint="run", save_every=0.05, progress="quiet") as cluster:
    policy = cluster.variable("policy", np.zeros(1))
    batches = cluster.collect(follows, policy, batch_size=2, max_lag=3)
    print(json.dumps(batches.stats()), flush=True)
    for batch in batches:
        now = int(policy.version) & (1 << 31) - 1
        assert (batch.lag <= 3).all()
        assert (batch.lag == now - batch.data["count"]).all(), batch
        policy.assign(np.full(1, now + 1.0))
        print(json.dumps([batch.data["run"].tolist(), batches.stats()]), flush=True)
"""


@pytest.mark.timeout(120)
def test_a_chief_that_is_killed_finds_what_was_on_its_way_when_it_was_saved(tmp_path: Path) -> None:
    run, before = tmp_path / "run", set[int]()
    for turn in range(3):
        (tmp_path / "turn").write_text(str(turn))
        chief = script(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n{TRAIN}")
        assert chief.stdout is not None
        begins = json.loads(chief.stdout.readline())
        assert accounted(begins)
        assert (begins["delivered"] > 0) == (turn > 0)
        seen, newest = set[int](), 0
        while turn not in seen or checkpoints.found(run)[-1][0] < newest + 3:
            made, stats = json.loads(chief.stdout.readline())
            assert accounted(stats)
            assert "epoch" not in stats["dropped"]
            if turn not in seen:
                # What was on its way came first; a later one began in the midst of it all.
                newest = checkpoints.found(run)[-1][0]
                assert not before.intersection(made) or begins["stored"]
            seen.update(made)
        chief.send_signal(signal.SIGKILL)
        _, err = chief.communicate(timeout=LIMIT)
        assert "Error" not in err
        assert seen <= {turn, turn - 1}
        before = seen
