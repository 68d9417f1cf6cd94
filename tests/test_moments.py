"""Who dies at which moment: workers, chiefs and servers of clusters by hand, killed right then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from calls import Call, until
from clusters import LIMIT, accounted
from hands import cluster, served
from mortals import SECRET, WIDE, Mortal, Mortals

from paceline import Closed, Disconnected, SchemaError, Session, checkpoints
from paceline.core import messages as m
from paceline.core.versions import EPOCHS, epoch_of
from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    made = Mortals()
    yield made
    made.close()


# Workers and chiefs

each_job = pytest.mark.parametrize(("job", "carrier"), [("worker", "unix"), ("chief", "tcp")])


class Bereaved:
    """A server, a variable and a queue on it, and somebody who dies."""

    def __init__(self, server: Serving, mortals: Mortals, moment: str, job: str) -> None:
        self.session = server.session()
        self.variable = self.session.variable("v", np.zeros(WIDE))
        self.queue = self.session.queue("q", 4)
        self._server, self._job = server, job
        secret = server.secret.hex()
        self.mortal = mortals.start(moment, job=job, target=server.target, secret=secret)

    def goes(self) -> None:
        """The server no longer counts it; over TCP that takes its time."""
        if self._server.target.startswith("unix"):
            began = time.monotonic()
            until(lambda: len(self.session.resources()["members"]) == 1)
            assert time.monotonic() - began < 1.0
            with Session(
                self._server.target, secret=self._server.secret, job=self._job, index=0
            ) as heir:
                assert heir.task == f"{self._job}:0"

    def unchanged(self) -> None:
        """All is as it was, and goes on."""
        assert self.queue.stats()["accepted"] == 0
        snapshot = self.variable.read()
        assert not snapshot.tree.any()
        assert self.variable.assign(np.ones(WIDE)) == snapshot.version + 1
        self.queue.enqueue(1)
        assert self.queue.dequeue(timeout=LIMIT) == 1
        assert accounted(self.queue.stats())


@pytest.fixture
def bereaved(
    mortals: Mortals, request: pytest.FixtureRequest, job: str, carrier: Carrier
) -> Iterator[Bereaved]:
    with serving(carrier, where="thread") as server:
        made = Bereaved(server, mortals, request.param, job)
        yield made
        # A test's arguments outlive it, and what they look at with them.
        vars(made).clear()


def at(moment: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bereaved", [moment], indirect=True)


@each_job
@at("starting")
def test_one_that_dies_while_it_joins_never_was_there(bereaved: Bereaved) -> None:
    bereaved.mortal.says("dies")
    bereaved.mortal.ended()
    assert len(bereaved.session.resources()["members"]) == 1
    bereaved.unchanged()
    bereaved.goes()


@each_job
@at("idle")
def test_what_one_made_that_dies_later_stays(bereaved: Bereaved) -> None:
    bereaved.mortal.says("idle")
    bereaved.mortal.kill()
    bereaved.goes()
    assert (bereaved.variable.read().tree == 7).all()
    assert bereaved.queue.dequeue(timeout=LIMIT) == 7
    assert accounted(bereaved.queue.stats())


@each_job
@at("assigning")
def test_an_assign_whose_maker_dies_in_it_never_was(bereaved: Bereaved) -> None:
    bereaved.mortal.says("dies")
    bereaved.mortal.ended()
    bereaved.unchanged()
    bereaved.goes()


@each_job
@at("enqueueing")
def test_an_item_whose_maker_dies_handing_it_in_never_was(bereaved: Bereaved) -> None:
    bereaved.mortal.says("dies")
    bereaved.mortal.ended()
    bereaved.unchanged()
    bereaved.goes()


@pytest.mark.parametrize(
    ("job", "carrier"),
    # Over TCP it is waited for, in case that it comes back.
    [("worker", "unix"), pytest.param("chief", "tcp", marks=pytest.mark.slow)],
)
@at("waiting")
def test_one_that_dies_waiting_takes_nothing(bereaved: Bereaved) -> None:
    bereaved.mortal.says("waits")

    def waits() -> bool:
        found = bereaved.session.connection.call(m.Stats()).content["members"].values()
        return any(each["waits"] for each in found)

    until(waits)
    bereaved.queue.enqueue(1)
    taking = Call(lambda: bereaved.queue.dequeue_many(2, timeout=LIMIT))
    bereaved.mortal.kill()
    bereaved.queue.enqueue(2)
    assert taking.outcome().data.tolist() == [1, 2]
    assert accounted(bereaved.queue.stats())
    bereaved.goes()


@each_job
@at("stopping")
def test_one_that_dies_leaving_may_come_back(bereaved: Bereaved) -> None:
    bereaved.mortal.says("dies")
    bereaved.mortal.ended()
    bereaved.unchanged()
    bereaved.goes()


# Servers


class Widow:
    """A session on a server that dies."""

    def __init__(self, mortals: Mortals, folder: Path, moment: str) -> None:
        self._mortals = mortals
        self.spec = cluster(folder, "unix", ps=1, chief=1)
        self.server = self.serve(moment)
        self.session: Session | None = None

    def serve(self, moment: str = "never") -> Mortal:
        made = self._mortals.start(moment, cluster=self.spec.as_dict())
        made.says("serves")
        return made

    def opened(self) -> Session:
        self.session = Session(self.spec, job="chief", index=0, secret=SECRET, timeout=LIMIT)
        return self.session

    def close(self) -> None:
        self.server.kill()
        if self.session is not None:
            self.session.close()


@pytest.fixture
def widow(mortals: Mortals, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Widow]:
    made = Widow(mortals, tmp_path, request.param)
    yield made
    made.close()
    vars(made).clear()


def dying(*moments: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("widow", moments, indirect=True)


@dying("starting")
def test_a_server_that_dies_while_a_session_opens_is_waited_for(widow: Widow) -> None:
    widow.server.arm()
    opening = Call(widow.opened)
    widow.server.says("dies")
    widow.server.ended()
    widow.server = widow.serve()
    assert opening.outcome().variable("v", 1).read().tree == 1


@dying("idle", "assigning", "enqueueing")
def test_what_a_server_had_is_lost_with_it_and_its_calls_say_so(
    widow: Widow, request: pytest.FixtureRequest
) -> None:
    session = widow.opened()
    variable, queue = session.variable("v", np.zeros(WIDE)), session.queue("q", 4)
    version = variable.version
    queue.enqueue(1)
    widow.server.arm()
    calls = {
        "idle": lambda: variable.read(),
        "assigning": lambda: variable.assign(np.ones(WIDE)),
        "enqueueing": lambda: queue.enqueue(2),
    }
    moment = request.node.callspec.params["widow"]
    if moment == "idle":
        widow.server.kill()
        began = time.monotonic()
        with pytest.raises(Disconnected, match=r"^ps:0 at unix:\S+: the other end is gone"):
            variable.assign(np.ones(WIDE))
    else:
        calling = Call(calls[moment])
        widow.server.says("dies")
        began = time.monotonic()
        with pytest.raises(Disconnected, match=r"^ps:0 at unix:\S+: the other end is gone"):
            calling.outcome()
        widow.server.ended()
    assert time.monotonic() - began < 1.0
    widow.server = widow.serve()
    # Nobody gets an old number for a new tree, and nothing of the old queue is counted again.
    assert session.uninitialized(["v"]) == ["v"]
    assert session.variable("v", np.zeros(WIDE)).version > version
    assert session.queue("q", 4).stats()["accepted"] == 0


@dying("waiting")
def test_a_wait_at_a_server_that_dies_ends_with_it(widow: Widow) -> None:
    session = widow.opened()
    queue, variable = session.queue("q", 4), session.variable("v", 1)
    waiting = [
        Call(lambda: queue.dequeue(timeout=None)),
        Call(lambda: variable.read(newer_than=variable.version, timeout=None)),
    ]

    def waits() -> int:
        found = session.connection.call(m.Stats()).content["members"].values()
        return sum(len(each["waits"]) for each in found)

    until(lambda: waits() == 2)
    widow.server.kill()
    began = time.monotonic()
    for call in waiting:
        with pytest.raises(Disconnected, match=r"^ps:0 at unix:\S+: the other end is gone"):
            call.outcome()
    assert time.monotonic() - began < 1.0
    widow.server = widow.serve()


@dying("checkpointing")
def test_a_server_that_dies_while_it_is_saved_leaves_the_checkpoints_there(
    widow: Widow, tmp_path: Path
) -> None:
    session = widow.opened()
    one, other = session.variable("a", np.ones(WIDE)), session.variable("z", np.ones(WIDE))
    first = session.save(tmp_path / "kept", step=1)
    for variable in (one, other):
        variable.assign_add(np.ones(WIDE))
    widow.server.arm()
    saving = Call(lambda: session.save(tmp_path / "kept", step=2))
    widow.server.says("dies")
    with pytest.raises(Disconnected):
        saving.outcome()
    widow.server.ended()
    widow.server = widow.serve()
    found = session.restore(tmp_path / "kept")
    assert found is not None
    assert found.path == first
    assert (session.variable("z").read().tree == 1).all()
    assert [path for _, path in checkpoints.found(tmp_path / "kept")] == [first]


@dying("stopping")
def test_a_server_that_dies_while_all_leave_holds_nobody_up(widow: Widow) -> None:
    session = widow.opened()
    variable = session.variable("v", 1)
    widow.server.arm()
    began = time.monotonic()
    session.close()
    assert time.monotonic() - began < 1.0
    widow.server.says("dies")
    widow.server.ended()
    with pytest.raises((Closed, Disconnected)):
        variable.read()
    widow.server = widow.serve()


def test_versions_grow_although_the_clock_of_a_server_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = cluster(tmp_path, "unix", ps=1, worker=2)
    with ExitStack() as sessions:
        versions = list[int]()
        for clock in (3000, 2000, 2000, 2001, 4000, 1000):
            monkeypatch.setattr("paceline.server.loop.time.time", lambda clock=clock: clock)
            with served(spec, secret=SECRET):
                if not versions:
                    one = sessions.enter_context(
                        Session(spec, job="worker", index=0, secret=SECRET)
                    )
                versions.append(one.variable("v", 1).version)
                with Session(spec, job="worker", index=1, secret=SECRET) as two:
                    assert two.variable("v").version == versions[-1]
    assert versions == sorted(set(versions))
    assert [epoch_of(version) for version in versions] == [3000, 3001, 3002, 3003, 4000, 4001]


@pytest.mark.parametrize("epoch", [-2, EPOCHS - 1, EPOCHS])
def test_an_epoch_that_cannot_be_is_refused(epoch: int) -> None:
    with Session() as session, pytest.raises(SchemaError, match=rf"there is no epoch {epoch}$"):
        session.connection.call(m.Outlived(epoch))
