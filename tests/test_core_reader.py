"""The state of a reader: each piece done once per epoch, whoever has it, returns it or dies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.core.errors import Closed, SchemaError
from paceline.core.facts import ReaderFacts
from paceline.core.reader_state import EPOCHS, PIECES, Content, ReaderState, Terms, shuffled
from paceline.core.waiting import NOT_YET

HOLDERS = st.sampled_from("abc")


def pieces(count: int, first: int = 0) -> list[Content]:
    return [(b"i", [number]) for number in range(first, first + count)]


class ReaderMachine(RuleBasedStateMachine):
    """Holders take pieces, end them, give them back and die, in any order."""

    @initialize(
        count=st.integers(0, 4), epochs=st.one_of(st.integers(1, 3), st.none()),
        shuffle=st.booleans(), stream=st.booleans(),
    )  # fmt: skip
    def begin(self, count: int, epochs: int | None, shuffle: bool, stream: bool) -> None:
        if stream:
            epochs, shuffle = 1, False
        if epochs is None:
            count += 1
        self.stream, self.last = stream, epochs
        self.open = stream
        self.reader = ReaderState("r", pieces(count), Terms(epochs, shuffle, 7, None, stream))
        self.count = count
        self.held: dict[int, tuple[str, int, int, int]] = {}
        self.back: list[tuple[int, int]] = []
        self.attempts: Counter[tuple[int, int]] = Counter()
        self.done: set[tuple[int, int]] = set()
        self.firsts: list[tuple[int, int]] = []

    def order(self, epoch: int) -> list[int]:
        if self.reader.terms.shuffle:
            return list(shuffled(self.count, f"7 {epoch}"))
        return list(range(self.count))

    @rule(holder=HOLDERS)
    def take(self, holder: str) -> None:
        handed = self.reader.next(holder)
        epochs_left = self.last is None or len(self.firsts) < self.count * self.last
        if handed is NOT_YET or handed is None:
            assert not self.back
            assert not epochs_left
            assert (handed is None) == (not self.held and not self.open)
            return
        key = (handed.epoch, handed.number)
        assert key not in self.done
        assert self.reader.content(handed.number) == (b"i", [handed.number])
        self.attempts[key] += 1
        assert handed.attempt == self.attempts[key]
        if self.back:
            ordered = sorted(self.back, key=lambda k: (k[0], self.order(k[0]).index(k[1])))
            assert key == ordered[0]
            self.back.remove(key)
        else:
            assert handed.attempt == 1
            self.firsts.append(key)
        self.held[handed.delivery] = (holder, *key, handed.attempt)

    @rule(data=st.data(), how=st.sampled_from(["done", "back", "expires"]))
    def end(self, data: Any, how: str) -> None:
        if not self.held:
            return
        delivery = data.draw(st.sampled_from(sorted(self.held)))
        holder, epoch, number, _ = self.held.pop(delivery)
        assert not self.reader.end(delivery, "somebody else")
        assert self.reader.holds(delivery)
        if how == "expires":
            self.reader.expire(delivery)
        else:
            assert self.reader.end(delivery, holder, returned=how == "back")
        assert not self.reader.end(delivery, holder)
        assert not self.reader.holds(delivery)
        if how == "done":
            self.done.add((epoch, number))
        else:
            self.back.append((epoch, number))

    @rule(holder=HOLDERS)
    def dies(self, holder: str) -> None:
        mine = [delivery for delivery, held in self.held.items() if held[0] == holder]
        assert sorted(self.reader.lost(holder)) == sorted(mine)
        for delivery in mine:
            _, epoch, number, _ = self.held.pop(delivery)
            self.back.append((epoch, number))

    @rule(count=st.integers(0, 3))
    def add(self, count: int) -> None:
        try:
            self.reader.add(pieces(count, self.count))
        except SchemaError:
            assert not self.stream
        except Closed:
            assert self.stream
            assert not self.open
        else:
            assert self.open
            self.count += count

    @rule(really=st.integers(0, 9))
    def close(self, really: int) -> None:
        if really == 0:
            self.reader.close()
            self.open = False
            self.last = self.reader.epoch + 1

    @rule()
    def is_noted_and_made_again(self) -> None:
        noted = self.reader.noted()
        facts = noted.facts
        assert isinstance(facts, ReaderFacts)
        content = [
            (piece.head.layout, list(row))
            for piece in noted.pieces()
            for row in zip(*piece.head.columns, strict=True)
        ]
        before = self.reader
        self.reader = ReaderState.again("r", facts, content)
        assert self.reader.pristine
        assert self.reader.definition == before.definition
        self.reader.revive(facts, content)
        assert self.reader.closed == before.closed
        assert self.reader.nbytes == before.nbytes
        self.back += [(epoch, number) for _, epoch, number, _ in self.held.values()]
        self.held = {}

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "reader"):
            return
        stats = self.reader.stats()
        assert stats["pieces"] == self.count
        assert stats["held"] == len(self.held) == sum(self.reader.holders().values())
        for epoch, found in stats["epochs"].items():
            assert found["pieces"] == found["done"] + found["held"] + found["waiting"]
            assert found["pieces"] == self.count
            mine = {key: n for key, n in self.attempts.items() if key[0] == epoch}
            assert found["delivered"] == sum(mine.values())
            assert found["redelivered"] == sum(mine.values()) - len(mine)
            assert found["done"] == sum(key[0] == epoch for key in self.done)
        firsts = [number for epoch in range(self.reader.epoch + 1) for number in self.order(epoch)]
        assert [number for _, number in self.firsts] == firsts[: len(self.firsts)]
        assert [epoch for epoch, _ in self.firsts] == sorted(epoch for epoch, _ in self.firsts)


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = settings(deadline=None, max_examples=80, stateful_step_count=40)


@given(count=st.integers(0, 50), seed=st.text(max_size=3))
@settings(deadline=None, max_examples=50)
def test_a_shuffle_has_each_number_once(count: int, seed: str) -> None:
    assert sorted(shuffled(count, seed)) == list(range(count))


def test_a_shuffle_depends_on_its_seed_alone_and_is_fair() -> None:
    # Written down, since programs rely on finding the same order again.
    assert list(shuffled(8, "0 0")) == list(shuffled(8, "0 0"))
    assert list(shuffled(8, "0 0")) != list(shuffled(8, "0 1"))
    firsts = Counter(tuple(shuffled(3, str(seed))) for seed in range(6000))
    assert len(firsts) == 6
    assert all(850 < count < 1150 for count in firsts.values())


def orders(seed: int) -> list[list[int]]:
    reader = ReaderState("r", pieces(20), Terms(3, True, seed))
    found: list[list[int]] = [[], [], []]
    while (handed := reader.next("a")) is not None:
        assert handed is not NOT_YET
        found[handed.epoch].append(handed.number)
        assert reader.end(handed.delivery, "a")
    return found


def test_the_same_seed_gives_the_same_orders_and_each_epoch_another() -> None:
    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    first, second, third = orders(1)
    assert first != second != third != first
    assert sorted(first) == sorted(second) == sorted(third) == list(range(20))


def test_the_end_is_told_only_when_nothing_can_come_back() -> None:
    reader = ReaderState("r", pieces(1), Terms())
    handed = reader.next("a")
    assert handed is not NOT_YET
    assert handed is not None
    assert reader.next("b") is NOT_YET
    reader.lost("a")
    again = reader.next("b")
    assert again is not NOT_YET
    assert again is not None
    assert (again.number, again.attempt) == (0, 2)
    reader.end(again.delivery, "b")
    assert reader.next("a") is None


def test_counters_of_old_epochs_are_dropped_but_for_those_that_go_on() -> None:
    reader = ReaderState("r", pieces(2), Terms(None))
    stuck = reader.next("stuck")
    for _ in range(100):
        handed = reader.next("a")
        assert handed is not NOT_YET
        assert handed is not None
        reader.end(handed.delivery, "a")
    kept = reader.stats()["epochs"]
    assert len(kept) <= EPOCHS + 1
    assert kept[0] == {
        "pieces": 2, "delivered": 2, "redelivered": 0, "done": 1, "held": 1, "waiting": 0,
    }  # fmt: skip
    assert stuck is not None


def test_a_stream_forgets_what_is_done() -> None:
    reader = ReaderState("r", [], Terms(stream=True))
    for number in range(50):
        reader.add(pieces(1, number))
        handed = reader.next("a")
        assert handed is not NOT_YET
        assert handed is not None
        reader.end(handed.delivery, "a")
    assert reader.nbytes == 0
    reader.close()
    assert reader.next("a") is None
    with pytest.raises(Closed, match=r"^add to reader 'r': it is closed$"):
        reader.add(pieces(1))


@pytest.mark.parametrize(
    ("given", "terms", "says"),
    [
        (0, Terms(None), r"no pieces, and that without an end$"),
        (1, Terms(2, stream=True), r"a stream has one epoch and an order of its own, not epochs=2"),
        (1, Terms(1, True, stream=True), r"a stream has one epoch .* shuffle=True$"),
        (1, Terms(lease=0.0), r"lease is seconds > 0, not 0\.0$"),
        (1, Terms(lease=float("nan")), r"lease is seconds > 0, not nan$"),
        (PIECES + 1, Terms(), r"it would hold 1048577 pieces of \d+ bytes, 1048576 of \d+ are al"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: int, terms: Terms, says: str) -> None:
    with pytest.raises(SchemaError, match=rf"^reader 'r': {says}"):
        ReaderState("r", [(b"", [])] * given, terms)


def test_adding_to_a_list_is_refused_with_the_way_out() -> None:
    reader = ReaderState("r", pieces(2), Terms())
    with pytest.raises(SchemaError, match=r"^reader 'r': it is a list of 2 pieces; .*stream=True$"):
        reader.add(pieces(1))


def test_many_bytes_of_text_are_bounded() -> None:
    with pytest.raises(SchemaError, match=r"^reader 'r': it would hold 300 pieces of 300002700 b"):
        ReaderState("r", [(b"s", ["x" * 1_000_000])] * 300, Terms())
