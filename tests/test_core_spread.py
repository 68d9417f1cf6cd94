"""Spread variables without servers: how trees are cut and joined, and who may commit what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core import spreading
from paceline.core.errors import ProtocolError, Refused, SchemaError
from paceline.core.messages.replies import Spreading
from paceline.core.part_state import Grants, PartState
from paceline.core.tree import flatten
from paceline.core.variable_state import VariableState
from paceline.core.versions import first
from paceline.core.waiting import NOT_YET, Stored

TASKS = ["ps:0", "ps:1", "ps:2"]
WRITERS, READERS = st.sampled_from("abc"), st.sampled_from("xy")
PLACES, TAGS = st.sampled_from([0, 1]), st.sampled_from(["one", "two"])
SHAPES = st.lists(st.integers(0, 5), max_size=2).map(tuple)
LEAVES = SHAPES.map(
    lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape)
) | st.integers(0, 9)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and np.array_equal(one, two)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (5, r"placement= is a function of the paths and bytes of all arrays, not 5"),
        (lambda _: None, r"placement= returns a list with a task for each, not None"),
        (lambda _: "ps:1", r"placement= returns a list with a task for each, not 'ps:1'"),
        (lambda _: ["ps:1"], r"it has 2 arrays, and 1 were placed"),
        (lambda _: ["ps:1", None], r"leaf \$\.b was placed at None: a task is a text such as 'p"),
        (lambda _: ["ps:1", 1], r"leaf \$\.b was placed at 1: a task is a text such as 'ps:1', n"),
        (lambda _: ["ps:1", ["ps:0", 2]], r"leaf \$\.b was placed at \['ps:0', 2\]: a task is a t"),
        (
            lambda _: ["ps:1", "ps:x"],
            r"leaf \$\.b was placed at 'ps:x': a task is written 'ps:1' or '/",
        ),
        (lambda _: ["ps:1", []], r"leaf \$\.b was placed at no task"),
        (lambda _: ["ps:1", "ps:9"], r"leaf \$\.b was placed at \['ps:9'\]; there are \['ps:0', "),
    ],
)
def test_a_placement_that_is_none_is_refused(placement: Any, message: str) -> None:
    layout = flatten({"a": np.zeros(1), "b": np.zeros(1)}).layout
    with pytest.raises(SchemaError, match=rf"^spread 'v': {message}"):
        spreading.spread(layout, "ps:1", TASKS, placement, "spread 'v'")


def test_a_placement_may_write_tasks_as_devices() -> None:
    layout = flatten({"a": np.zeros(2), "b": np.zeros(2)}).layout
    plan = spreading.spread(
        layout, "ps:0", TASKS, lambda _: ("/job:ps/task:1", ["/job:ps/task:2", "ps"]), ""
    )
    assert plan.parts == [("ps:0", [(1, 1, 2)]), ("ps:1", [(0, 0, -1)]), ("ps:2", [(1, 0, 1)])]


@given(TREES, st.data())
def test_what_is_cut_is_joined_again(tree: Any, data: Any) -> None:
    flat = flatten(tree)
    choices = st.sampled_from(TASKS) | st.lists(
        st.sampled_from(TASKS), min_size=1, max_size=3, unique=True
    )
    chosen = data.draw(st.lists(choices, min_size=len(flat.arrays), max_size=len(flat.arrays)))
    plan = spreading.spread(flat.layout, "ps:1", TASKS, lambda leaves: chosen, "")
    spreading.check(plan)
    shares = spreading.shares(plan, flat, "")
    assert plan.parts[0][0] == "ps:1"
    assert len(shares) == len(plan.parts)
    kept = sum(
        leaf.nbytes for share in shares for leaf in share.values() if isinstance(leaf, np.ndarray)
    )
    assert kept == flat.size
    assert same(spreading.joined(plan, shares), tree)


@given(st.dictionaries(st.sampled_from("abcd"), LEAVES, min_size=2))
def test_a_tree_in_another_order_is_cut_alike(tree: dict[str, Any]) -> None:
    plan = spreading.spread(flatten(tree).layout, "ps:0", TASKS, None, "")
    turned = flatten(dict(reversed(tree.items())))
    assert same(spreading.joined(plan, spreading.shares(plan, turned, "")), tree)


@given(st.lists(st.integers(0, 1000)))
def test_greedy_leaves_no_server_behind(sizes: list[int]) -> None:
    chosen = spreading.greedy([("", size) for size in sizes], TASKS)
    load = dict.fromkeys(TASKS, 0)
    for size, task in zip(sizes, chosen, strict=True):
        assert load[task] == min(load.values())
        load[task] += size
    assert chosen[:3] == TASKS[: len(sizes)] or 0 in sizes[:3]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("ps:0", [])],
        [("ps:0", [(0, 0, -1)]), ("ps:1", [(0, 0, -1)])],
        [("ps:0", [(0, 0, 2)])],
        [("ps:0", [(0, 0, 2)]), ("ps:1", [(0, 3, 4)])],
        [("ps:0", [(0, 0, 5)])],
        [("ps:0", [(0, 1, -1)])],
        [("ps:0", [(0, 0, 3), (0, 3, 2), (0, 2, 4)])],
        [("ps:0", [(0, 0, -1), (1, 0, -1)])],
        [("ps:0", [(0, 0, -1), (7, 0, -1)])],
    ],
)
def test_a_peer_places_every_row_once(parts: Any) -> None:
    layout = flatten({"rows": np.zeros(4), "plain": 1}).layout
    with pytest.raises(ProtocolError):
        spreading.check(Spreading(layout, parts))


def test_a_layout_that_is_none_is_not_placed() -> None:
    with pytest.raises(SchemaError, match="are not a layout"):
        spreading.check(Spreading(b"x", []))


def test_stages_only_grow_and_only_their_holder_commits_them() -> None:
    grants = Grants(7)
    one = grants.grant("v", "a", turn=False)
    two = grants.grant("v", "b", turn=True)
    other = grants.grant("w", "a", turn=False)
    assert first(7) < one < two < other < grants.below
    assert grants.of("v") == {one, two}
    grants.check("v", two, "b", turn=True)
    for name, stage, holder, turn in (
        ("v", one, "b", False),
        ("w", one, "a", False),
        ("v", two, "b", False),
        ("v", 0, "a", False),
    ):
        with pytest.raises(Refused):
            grants.check(name, stage, holder, turn=turn)
    assert grants.abandon("v", one, "b") is None
    assert grants.abandon("v", one, "a") is not None
    with pytest.raises(Refused):
        grants.check("v", one, "a", turn=False)
    # What is being committed does not end with its holder.
    grants.keep(two)
    assert grants.lost("b") == []
    assert grants.of("v") == {two}
    assert [grant.name for grant in grants.lost("a")] == ["w"]
    grants.end(two)
    assert grants.of("v") == set()


def test_a_part_drops_what_the_home_did_not_name() -> None:
    part = PartState()
    part.trees = {stage: Stored(b"", [], None) for stage in range(6)}
    part.drop({1, 3}, 5)
    assert sorted(part.trees) == [1, 3, 5]


class SpreadMachine(RuleBasedStateMachine):
    """A home and two parts, with writers, readers and deaths at every step between messages.

    Trees are numbers: that of the home and of the parts of one version must be one number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.parts = [PartState(), PartState()]
        self.written = 0
        self.begin_home()

    def begin_home(self) -> None:
        """A home that was started, or started again: nothing is known of before."""
        self.epoch += 1
        self.grants = Grants(self.epoch)
        self.state = VariableState("v", self.epoch)
        # By writer: its turn, and how many parts have staged it.
        self.writing: dict[str, dict[str, Any]] = {}
        # By reader: the version it holds, its number, and how many parts it has read.
        self.reading: dict[str, list[Any]] = {}
        self.numbers: dict[int, float] = {}
        # What parts lost when they were started again, by version.
        self.lost: set[tuple[int, int]] = set()

    def number(self, stored: Stored) -> float:
        return float(stored.values[0])

    def stored(self, number: float, stage: int) -> Stored:
        flat = flatten(number)
        made = Stored(flat.layout, list(flat.values), None)
        made.stage = stage
        return made

    @rule(who=WRITERS, adding=st.booleans(), first=PLACES)
    def write(self, who: str, adding: bool, first: int) -> None:
        """A writer's next step."""
        write = self.writing.get(who)
        if write is None:
            self.begin(who, adding)
        elif len(write["staged"]) == 2:
            self.commit(who)
        else:
            self.stage(who, first if first not in write["staged"] else 1 - first)

    def begin(self, who: str, adding: bool) -> None:
        if adding:
            base = self.state.take_turn(who)
            if base is NOT_YET:
                assert self.state.stored is None or any(w["adding"] for w in self.writing.values())
                return
        stage = self.grants.grant("v", who, turn=adding)
        needed = self.grants.of("v") | self.state.kept.stages()
        current = self.state.stored
        self.written += 1
        self.writing[who] = {
            "stage": stage, "adding": adding, "keep": needed, "below": self.grants.below,
            "base": current.stage if current and adding else None,
            "number": self.number(current) + 1 if current and adding else float(self.written),
            "staged": [],
        }  # fmt: skip

    def stage(self, who: str, place: int) -> None:
        write, part = self.writing[who], self.parts[place]
        part.drop(write["keep"], write["below"])
        number = write["number"]
        if write["adding"]:
            base = part.trees.get(write["base"])
            if base is None:
                # It was started again: the turn is given back.
                assert (place, self.state.version) in self.lost
                self.end(who)
                return
            assert self.number(base) + 1 == number
        part.trees[write["stage"]] = self.stored(number, write["stage"])
        write["staged"].append(place)

    def commit(self, who: str) -> None:
        write = self.writing[who]
        self.grants.check("v", write["stage"], who, turn=write["adding"])
        new = self.stored(write["number"], write["stage"])
        if write["adding"]:
            version: Any = self.state.end_add(new)
        else:
            version = self.state.assign(new, who)
            if version is NOT_YET:
                return
        self.grants.end(write["stage"])
        self.numbers[version] = write["number"]
        for place, part in enumerate(self.parts):
            if write["stage"] not in part.trees:
                self.lost.add((place, version))
                assert place in write.get("restarted", ())
        del self.writing[who]

    @rule(who=WRITERS)
    def end(self, who: str) -> None:
        """A writer gives up, or dies: what it has not committed never existed."""
        write = self.writing.pop(who, None)
        if write is not None:
            (grant,) = self.grants.lost(who)
            if grant.turn:
                self.state.end_add(None)

    @rule(who=READERS)
    def read(self, who: str) -> None:
        """A reader's next step."""
        if who in self.reading:
            self.read_part(who)
            return
        found = self.state.read(-1)
        if found is NOT_YET:
            return
        version, tree = found
        assert self.number(tree) == self.numbers[version]
        self.state.kept.hold(version, who)
        self.reading[who] = [version, tree.stage, 0]

    def read_part(self, who: str) -> None:
        version, stage, place = self.reading[who]
        found = self.parts[place].trees.get(stage)
        # A part is there unless its server was started again; and it is that of this version.
        assert (found is None) == ((place, version) in self.lost)
        assert found is None or self.number(found) == self.numbers[version]
        self.reading[who][2] += 1
        if found is None or place == 1:
            self.let_go(who)

    @rule(who=READERS)
    def let_go(self, who: str) -> None:
        """A reader has read it all, or dies."""
        if who in self.reading:
            self.state.kept.let_go(self.reading.pop(who)[0], who)

    @rule(tag=TAGS, on=st.booleans())
    def tag(self, tag: str, on: bool) -> None:
        if on and self.state.stored is not None and tag not in self.state.kept.tags:
            self.state.kept.tag(tag, None)
        elif not on and tag in self.state.kept.tags:
            self.state.kept.untag(tag)

    @rule(place=PLACES, sure=st.integers(0, 3))
    def restart_part(self, place: int, sure: int) -> None:
        if sure:
            return
        self.parts[place] = PartState()
        self.lost |= {(place, kept.version) for kept in self.state.kept.listing()}
        for write in self.writing.values():
            write.setdefault("restarted", set()).add(place)

    @rule(sure=st.integers(0, 9))
    def restart_home(self, sure: int) -> None:
        if sure == 0:
            self.begin_home()

    # What must hold after every step.

    @invariant()
    def every_version_that_is_kept_is_whole(self) -> None:
        for kept in self.state.kept.listing():
            home = self.state.at(kept.version)
            assert home is not None
            for place, part in enumerate(self.parts):
                found = part.trees.get(home.stage)
                assert (found is None) == ((place, kept.version) in self.lost)
                assert found is None or self.number(found) == self.numbers[kept.version]

    @invariant()
    def what_nobody_needs_is_bounded(self) -> None:
        # After the next write all that is left is what the home keeps, and what is being written.
        for part in self.parts:
            after = PartState()
            after.trees = dict(part.trees)
            needed = self.grants.of("v") | self.state.kept.stages()
            after.drop(needed, self.grants.below)
            assert set(after.trees) <= needed


TestSpread = SpreadMachine.TestCase
TestSpread.settings = settings(max_examples=150, stateful_step_count=50)
