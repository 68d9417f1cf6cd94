"""Lockstep: whose turn is it, in which order do items come, and what do their makers read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from items import marks, run

from paceline.core.errors import Closed, ProtocolError
from paceline.core.lockstep_state import LockstepState
from paceline.core.queue_state import QueueState
from paceline.core.round import Round
from paceline.core.tree import flatten
from paceline.core.variable_state import VariableState
from paceline.core.waiting import NOT_YET, Stored

LAYOUT = flatten(0).layout


def tree(value: int) -> Stored:
    return Stored(LAYOUT, [value], None)


class Desk:
    """A lockstep collection of workers `0` to `N - 1`, its trainer, and one variable."""

    def __init__(self, batch_size: int, workers: int) -> None:
        self.policy = VariableState("policy", 7)
        self.policy.define(tree(0))
        self.variables = {"policy": self.policy}
        self.freed: list[str] = []
        self.round = Round("a round of 'c'", self.variables, self.freed.append)
        self.state = LockstepState(
            QueueState("c", batch_size, 1),
            batch_size,
            [f"worker:{index}" for index in range(workers)],
            lambda: self.policy.version,
            self.round,
            name_of=lambda peer: str(peer) if peer == "trainer" else f"worker:{peer}",
        )
        self.numbers = [0] * workers

    def assign(self) -> None:
        assert self.policy.assign(tree(0)) is not NOT_YET

    def admit(self, worker: int, want: int = 99) -> int:
        """How many items it may start, 0 where it has to wait."""
        granted = self.state.admit(worker, want)
        return 0 if granted is NOT_YET else granted

    def hand_in(self, worker: int, many: int = 1, abandoned: int = 0) -> None:
        """A run of items that say who made them, and how many that worker had made before."""
        first = self.numbers[worker]
        self.numbers[worker] += many
        made = [worker * 100 + nth for nth in range(first, first + many)]
        self.state.offer(worker, [run(*made, stamp=self.policy.version)] if made else [], abandoned)

    def ask(self, *, retry: bool = False, returned: bool = False) -> list[tuple[int, int]] | None:
        """What the items of the next batch say, if there is one."""
        found = self.state.next(retry=retry)
        if found is NOT_YET:
            return None
        items, _ = found
        delivery = self.state.queue.hand_out(items, "trainer")
        self.state.queue.receipt(delivery, "trainer", returned=returned)
        return [divmod(mark, 100) for mark in marks(items)]

    def fill(self) -> None:
        """Each worker makes what is due."""
        for worker in range(len(self.numbers)):
            if granted := self.admit(worker):
                self.hand_in(worker, granted)


@pytest.mark.parametrize(
    ("batch_size", "workers", "batches"),
    [
        (1, 1, ["0", "0", "0"]),
        (3, 1, ["000", "000"]),
        (4, 2, ["0101", "0101"]),
        (5, 3, ["01201", "20120", "12012", "01201"]),
        (2, 3, ["01", "20", "12", "01"]),
        (1, 4, ["0", "1", "2", "3", "0"]),
        (7, 4, ["0123012", "3012301", "2301230"]),
    ],
)
def test_item_j_of_batch_b_is_made_by_worker_b_times_batch_size_plus_j_mod_n(
    batch_size: int, workers: int, batches: list[str]
) -> None:
    desk = Desk(batch_size, workers)
    made = [0] * workers
    for number, expected in enumerate(batches):
        assert desk.ask() is None
        desk.fill()
        found = desk.ask(retry=True)
        assert found is not None
        assert "".join(str(worker) for worker, _ in found) == expected
        turns = [(number * batch_size + j) % workers for j in range(batch_size)]
        assert [worker for worker, _ in found] == turns
        for worker, nth in found:
            assert nth == made[worker]
            made[worker] += 1


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 1 << 32))
def test_any_order_of_hand_ins_gives_the_same_batches(
    batch_size: int, workers: int, seed: int
) -> None:
    chance = random.Random(seed)
    desk, expected = Desk(batch_size, workers), Desk(batch_size, workers)
    for _ in range(5):
        asked = desk.ask()
        admitted = [0] * workers
        while asked is None:
            worker = chance.randrange(workers)
            if admitted[worker] == 0:
                admitted[worker] = desk.admit(worker, chance.randint(1, 3))
            many = chance.randint(0, admitted[worker])
            abandoned = chance.randint(0, admitted[worker] - many)
            desk.hand_in(worker, many, abandoned)
            admitted[worker] -= many + abandoned
            if chance.random() < 0.5:
                desk.state.give_up()
            asked = desk.ask(retry=chance.random() < 0.5)
        assert expected.ask() is None
        expected.fill()
        assert asked == expected.ask(retry=True)
        assert desk.state.running == 0
        assert desk.state.started == desk.state.queue.counters.delivered


def test_nobody_starts_before_the_trainer_asks_and_nobody_more_than_its_turns() -> None:
    desk = Desk(5, 3)
    assert [desk.admit(worker) for worker in range(3)] == [0, 0, 0]
    assert desk.ask() is None
    assert [desk.admit(worker) for worker in range(3)] == [2, 2, 1]
    assert [desk.admit(worker) for worker in range(3)] == [0, 0, 0]
    assert desk.state.stats()["depth"] == 0
    for worker, many in enumerate((2, 2, 1)):
        desk.hand_in(worker, many)
    assert desk.ask(retry=True) is not None
    assert [desk.admit(worker) for worker in range(3)] == [0, 0, 0]


def test_a_wait_given_up_is_the_same_round_when_asked_again() -> None:
    desk = Desk(2, 2)
    assert desk.ask() is None
    assert desk.admit(0) == 1
    desk.hand_in(0)
    desk.state.give_up()
    for retry in (True, False):
        assert desk.ask(retry=retry) is None
        assert desk.admit(0) == 0
    assert desk.state.owing == ["worker:1"]
    assert desk.admit(1) == 1
    desk.hand_in(1)
    assert desk.state.owing == []
    assert desk.ask(retry=True) == [(0, 0), (1, 0)]


def test_a_batch_that_came_back_is_handed_over_again_in_the_same_order() -> None:
    desk = Desk(3, 2)
    assert desk.ask() is None
    for worker in (1, 0, 0):
        assert desk.admit(worker, 1) == 1
        desk.hand_in(worker)
    first = desk.ask(retry=True, returned=True)
    assert first == [(0, 0), (1, 0), (0, 1)]
    assert desk.ask(returned=True) == first
    assert desk.ask() == first
    assert desk.state.finished == 0
    assert desk.ask() is None
    assert desk.state.finished == 1
    assert [desk.admit(worker) for worker in range(2)] == [1, 2]


def test_a_batch_whose_trainer_died_is_not_lost() -> None:
    desk = Desk(2, 1)
    assert desk.ask() is None
    desk.fill()
    found = desk.state.next(retry=True)
    assert found is not NOT_YET
    desk.state.queue.hand_out(found[0], "trainer")
    desk.state.lost("trainer")
    assert desk.ask() == [(0, 0), (0, 1)]


def test_what_was_admitted_and_given_back_is_still_the_same_workers_turn() -> None:
    desk = Desk(2, 2)
    assert desk.ask() is None
    assert desk.admit(1) == 1
    desk.hand_in(1, 0, abandoned=1)
    assert (desk.state.running, desk.state.started) == (0, 0)
    assert desk.admit(0) == 1
    assert desk.admit(1) == 1


def test_lag_is_measured_at_hand_over_and_nothing_is_dropped() -> None:
    desk = Desk(2, 2)
    assert desk.ask() is None
    desk.fill()
    for _ in range(3):
        desk.assign()
    found = desk.state.next(retry=True)
    assert found is not NOT_YET
    assert found[1] == [3, 3]
    assert desk.state.stats()["max_lag_seen"] == 3
    assert desk.state.stats()["dropped"] == {}


# How it ends


def test_a_function_that_returned_ends_the_run_when_its_turn_comes() -> None:
    desk = Desk(2, 3)
    assert desk.ask() is None
    desk.fill()
    desk.state.drain(1)
    assert desk.ask(retry=True) == [(0, 0), (1, 0)]
    assert desk.ask() is None
    desk.fill()
    assert desk.ask(retry=True) == [(2, 0), (0, 1)]
    said = (
        r"^collection 'c': the function of worker:1 has returned, and in lockstep item 0 of batch 2"
        r" is its turn: such a run goes on with all its workers or ends$"
    )
    for retry in (False, True, False):
        with pytest.raises(Closed, match=said):
            desk.ask(retry=retry)


def test_of_several_that_returned_the_first_missing_turn_is_told() -> None:
    desk = Desk(4, 4)
    assert desk.ask() is None
    for worker in (3, 1):
        desk.state.drain(worker)
    with pytest.raises(Closed, match=r"the function of worker:1 has .* item 1 of batch 0 is"):
        desk.ask(retry=True)


def test_the_trainers_word_that_all_have_returned_changes_nothing() -> None:
    desk = Desk(1, 1)
    assert desk.ask() is None
    desk.state.drain("trainer")
    desk.fill()
    assert desk.ask(retry=True) == [(0, 0)]


def test_an_ended_run_refuses_and_drops_what_is_left() -> None:
    desk = Desk(2, 2)
    assert desk.ask() is None
    assert [desk.admit(worker) for worker in range(2)] == [1, 1]
    desk.hand_in(0)
    desk.state.end()
    over = [desk.state.over]
    desk.hand_in(1)
    assert [*over, desk.state.over] == [False, True]
    assert dict(desk.state.queue.counters.dropped) == {"closed": 2}
    for call in (lambda: desk.ask(), lambda: desk.admit(0)):
        with pytest.raises(Closed, match=r"^collection 'c' has ended$"):
            call()


def test_only_its_own_workers_make_items() -> None:
    desk = Desk(2, 2)
    desk.ask()
    said = (
        r"^offer to collection 'c' by worker:2: in lockstep its items are made by \['worker:0',"
        r" 'worker:1'\]$"
    )
    with pytest.raises(ProtocolError, match=said):
        desk.state.admit(2, 1)
    with pytest.raises(ProtocolError, match=said):
        desk.state.offer(2, [], 0)
    with pytest.raises(ProtocolError, match=r"1 items and 0 abandoned ones, but 0 were admitted$"):
        desk.hand_in(1)


# What its makers read


def test_a_round_has_the_version_of_the_moment_it_was_asked_for_until_it_is_complete() -> None:
    desk = Desk(2, 2)
    assert desk.round.version("policy") is None
    for _ in range(3):
        asked_at = desk.policy.version
        assert desk.ask() is None
        for worker in range(2):
            assert desk.admit(worker) == 1
            desk.assign()
            assert desk.ask(retry=True) is None
            assert desk.round.version("policy") == asked_at
            assert desk.policy.at(asked_at) is not None
            desk.hand_in(worker)
        assert desk.round.version("policy") is None
        assert desk.policy.at(asked_at) is None
        assert desk.ask(retry=True) is not None
        desk.assign()


def test_a_variable_defined_in_a_round_has_its_first_version_for_the_rest_of_it() -> None:
    desk = Desk(1, 1)
    new = desk.variables["new"] = VariableState("new", 7)
    desk.round.defined(new)
    assert desk.round.version("new") is None
    assert desk.ask() is None
    assert desk.round.version("new") is None
    assert new.define(tree(1)) is True
    first = new.version
    for _ in range(2):
        desk.round.defined(new)
        assert desk.round.version("new") == first
        new.assign(tree(2))
    assert new.at(first) is not None
    desk.fill()
    assert desk.ask(retry=True) is not None
    assert desk.ask() is None
    assert desk.round.version("new") == new.version


def test_what_a_round_holds_counts_and_is_told_by_its_name() -> None:
    desk = Desk(1, 1)
    assert desk.ask() is None
    [kept] = desk.policy.kept.listing()
    assert list(map(str, kept.holders)) == ["a round of 'c'"]
    desk.fill()
    assert desk.policy.kept.listing()[0].holders == ()
    assert desk.freed == []


def test_memory_that_a_round_frees_is_told_so_that_writers_go_on() -> None:
    desk = Desk(1, 1)
    assert desk.ask() is None
    desk.assign()
    assert desk.freed == []
    desk.fill()
    assert desk.freed == ["policy"]


def test_an_ended_run_holds_no_version() -> None:
    desk = Desk(1, 1)
    assert desk.ask() is None
    desk.state.end()
    assert desk.round.version("policy") is None
    assert desk.policy.kept.listing()[0].holders == ()
