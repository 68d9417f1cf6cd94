"""Tags: versions that stay, under a name, for leagues and self-play."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from calls import Call
from clusters import every_engine, quiet

import paceline
from paceline.core import messages as m
from paceline.core.errors import SchemaError, UnknownName
from paceline.core.versions import count_of
from paceline.testing import Serving

LARGE = 100_000


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_tagged_version_stays_as_it_was(server: Serving, size: int) -> None:
    variable = server.session().variable("v", np.zeros(size))
    other = server.session().variable("v")
    tagged = {}
    for n in range(1, 6):
        variable.assign(np.full(size, float(n)))
        tagged[n] = variable.tag(f"gen-{n}")
    for _ in range(20):
        variable.assign(np.full(size, -1.0))
    for n, version in tagged.items():
        for reader in (variable, other):
            snapshot = reader.read(tag=f"gen-{n}")
            assert snapshot.version == version
            assert (snapshot.tree == n).all()
    assert (variable.read().tree == -1).all()


def test_a_tag_is_of_the_current_version_unless_told_another(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(LARGE))
    first = variable.read()
    variable.tag("also then")
    variable.assign(np.ones(LARGE))
    assert variable.tag("now") == variable.version
    assert variable.tag("then", first.version) == first.version
    assert variable.tag("again", np.int64(first.version)) == first.version  # type: ignore[arg-type]
    variable.untag("also then")
    del first
    variable.assign(np.ones(LARGE))
    assert (variable.read(tag="then").tree == 0).all()


def test_tags_are_listed_in_order_of_tagging_for_everybody(server: Serving) -> None:
    variable = server.session().variable("v", 0)
    for name in ("b", "a", "c"):
        variable.tag(name)
        variable.assign(1)
    variable.untag("a")
    variable.tag("a")
    found = server.session().variable("v").tags()
    assert [(name, count_of(version)) for name, version in found.items()] == [
        ("b", 1),
        ("c", 3),
        ("a", 4),
    ]


def test_a_tag_names_one_version_until_it_is_taken_off(server: Serving) -> None:
    variable = server.session().variable("v", 0)
    first = variable.tag("best")
    assert variable.tag("best") == first
    variable.assign(1)
    with pytest.raises(
        SchemaError, match=r"^tag 'best' of 'v': it names version 1 already, not 2; untag\('best'\)"
    ):
        variable.tag("best")
    assert variable.read(tag="best").tree == 0
    variable.untag("best")
    assert variable.tag("best") == first + 1
    assert variable.read(tag="best").tree == 1


def test_an_unknown_tag_names_those_there_are(server: Serving) -> None:
    variable = server.session().variable("v", 0)
    variable.tag("one")
    calls = (
        lambda: variable.read(tag="two"),
        lambda: variable.read_into(np.zeros(()), tag="two"),
        lambda: variable.untag("two"),
    )
    for call in calls:
        with pytest.raises(UnknownName, match=r"^no tag 'two' of 'v'; there are \['one'\]$"):
            call()


def test_a_version_that_is_gone_cannot_be_tagged(server: Serving) -> None:
    variable = server.session().variable("v", 0)
    first = variable.version
    variable.assign(1)
    variable.assign(2)
    for version in (first, first + 9, -1):
        with pytest.raises(
            UnknownName,
            match=r"^tag 'old' of 'v': version \S+ \(count \d+\) is not kept; those of counts",
        ):
            variable.tag("old", version)
    assert variable.tags() == {}


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_the_name_of_a_tag_is_checked_as_others_are(server: Serving, name: str) -> None:
    variable = server.session().variable("v", 0)
    with pytest.raises(SchemaError, match=r"^a name has 1 to 256 characters, not "):
        variable.tag(name)
    with pytest.raises(SchemaError, match=r"^a tag is a str, not 3$"):
        variable.tag(3)  # type: ignore[arg-type]


def test_a_tag_and_a_newer_version_cannot_both_be_asked_for(server: Serving) -> None:
    variable = server.session().variable("v", 0)
    variable.tag("one")
    with pytest.raises(
        SchemaError, match=r"^read 'v': tag='one' names one version, .* newer_than=5; give one of"
    ):
        variable.read(tag="one", newer_than=5)


class Point(NamedTuple):
    x: Any


def test_containers_of_a_tagged_version_come_back_as_declared(server: Serving) -> None:
    point = Point(np.zeros(2))
    variable = server.session().variable("v", point)
    variable.tag("one")
    found: Any = variable.read(tag="one", like=point).tree
    assert type(found) is Point


def test_a_tagged_version_that_is_held_already_is_not_fetched_again(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", np.zeros(LARGE))
    variable.tag("one")
    variable.assign(np.ones(LARGE))
    first = variable.read(tag="one")
    assert variable.read(tag="one") is first
    value, buffers = session.connection.exchange(m.ReadTag("v", "one", first.version))
    assert (value.version, value.layout, list(buffers)) == (first.version, b"", [])
    variable.untag("one")
    variable.tag("one")
    assert (variable.read(tag="one").tree == 1).all()
    assert (first.tree == 0).all()


def test_reads_by_tag_leave_the_stamp_alone(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(2))
    old = variable.tag("old")
    variable.read(tag="old")
    variable.read_into(np.zeros(2), tag="old")
    assert (variable.first_read, variable.held) == (None, None)
    new = variable.assign(np.ones(2))
    variable.read()
    variable.read(tag="old")
    variable.read_into(np.zeros(2), tag="old")
    assert (variable.first_read, variable.held) == (new, new)
    assert old < new


def test_a_model_takes_on_tagged_versions_and_the_newest(server: Serving) -> None:
    net = torch.nn.Linear(40, 50)
    variable = server.session().variable("v", net)
    weights = []
    for n in range(3):
        with torch.no_grad():
            net.weight.fill_(float(n))
        variable.assign(net)
        weights.append(variable.tag(f"gen-{n}"))
    opponent = torch.nn.Linear(40, 50)
    for n in (2, 0, 0, 1, 2):
        assert variable.read_into(opponent, tag=f"gen-{n}") == weights[n]
        assert (opponent.weight == n).all()
    mark = opponent.weight._version
    assert variable.read_into(opponent, tag="gen-2") == variable.read_into(opponent)
    assert opponent.weight._version == mark
    with torch.no_grad():
        opponent.weight.zero_()
    variable.read_into(opponent, tag="gen-2")
    assert (opponent.weight == 2).all()


def test_tags_outlive_the_session_that_made_them(server: Serving) -> None:
    chief = server.session(job="chief", index=0)
    variable = chief.variable("v", np.full(LARGE, 7.0))
    variable.tag("kept")
    variable.assign(np.zeros(LARGE))
    chief.close()
    again = server.session(job="chief", index=0).variable("v")
    assert (again.read(tag="kept").tree == 7).all()
    again.assign(np.ones(LARGE))
    assert (again.read(tag="kept").tree == 7).all()


def test_a_tag_made_while_others_assign_is_of_one_whole_version(server: Serving) -> None:
    variable = server.session().variable("v", np.zeros(LARGE))
    deadline = time.monotonic() + 1.0

    def assign() -> None:
        mine = server.session().variable("v")
        while time.monotonic() < deadline:
            mine.assign(np.full(LARGE, float(count_of(mine.version))))

    writer = Call(assign)
    n = 0
    while writer.is_alive():
        version = variable.tag(f"t{n}")
        tree = variable.read(tag=f"t{n}").tree
        # Only one writes, so the version before told it what to write.
        assert (tree == count_of(version) - 1).all()
        variable.untag(f"t{n}")
        n += 1
    writer.outcome()
    assert n > 5


def against_the_past(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    while True:
        newest = policy.read()
        past = policy.read(tag="gen-0")
        yield {"newest": newest.version, "past": past.version, "value": past.tree.sum()}


@every_engine
def test_workers_of_every_engine_read_tags_and_are_stamped_with_the_newest(engine: str) -> None:
    with quiet(2, engine) as cluster:
        policy = cluster.variable("policy", np.ones(LARGE))
        first = policy.tag("gen-0")
        batches = cluster.collect(against_the_past, policy, batch_size=2, max_lag=1)
        for _ in range(3):
            batch = batches.next(timeout=30)
            assert batch.version.tolist() == batch.data["newest"].tolist()
            assert batch.data["past"].tolist() == [first] * 2
            assert batch.data["value"].tolist() == [LARGE] * 2
            policy.assign(np.zeros(LARGE))
        assert policy.tags() == {"gen-0": first}


def test_a_tag_may_be_a_string_of_numpy(server: Serving) -> None:
    variable = server.session().variable(np.str_("v"), 0)
    variable.tag(np.str_("one"))
    assert variable.read(tag=np.array(list(variable.tags()))[0]).tree == 0
    variable.untag(np.str_("one"))


@pytest.mark.parametrize("call", ["tag", "variable", "queue"])
def test_a_name_that_no_text_can_hold_is_refused(server: Serving, call: str) -> None:
    session = server.session()
    variable = session.variable("v", 0)
    calls: dict[str, Any] = {
        "tag": variable.tag,
        "variable": session.variable,
        "queue": session.queue,
    }
    with pytest.raises(SchemaError, match=r"is a str that UTF-8 can hold, not '\\ud800'$"):
        calls[call]("\ud800")
