"""Several requests in one: all or none, in order, and nobody sees the midst of it."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import DEADLINE_SECONDS, Call, until, waits
from hands import cluster, served
from hypothesis import given
from hypothesis import strategies as st
from wires import wired

from paceline import (
    Closed,
    Counter,
    Disconnected,
    OutOfMemory,
    PacelineError,
    Queue,
    SchemaError,
    Server,
    Session,
    TimedOut,
    UnknownName,
)
from paceline.testing import Serving

SECRET = b"a secret of sixteen bytes"
CAPACITY = 3
LARGE = 10_000
HUGE = (1 << 63) - 2

pytestmark = pytest.mark.timeout(120)


class Model:
    """What there would be if requests were done one after the other."""

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []
        self.closed = False
        self.value = 0.0
        self.gradients = 0

    def run(self, words: list[tuple[str, int]]) -> list[Any] | None:
        """The results; `None`, and nothing else has changed, if one cannot be done."""
        draft = copy.deepcopy(self)
        results: list[Any] = []
        written, room = False, CAPACITY - len(self.items)
        for word, n in words:
            if word in ("assigning", "adding"):
                if written or n == 4:
                    return None
                written, draft.value = True, n + (draft.value if word == "adding" else 0.0)
                results.append(None)
            elif word == "reading":
                results.append(draft.value)
            elif word == "counting":
                draft.count += HUGE if n == 4 else n
                if draft.count > HUGE + 1:
                    return None
                results.append(draft.count)
            elif word == "enqueueing":
                # What is taken in the same step makes no room yet.
                room -= 1
                if draft.closed or room < 0:
                    return None
                draft.items.append(n)
                results.append(None)
            elif word == "dequeueing":
                if not draft.items:
                    return None
                results.append(draft.items.pop(0))
            elif word == "applying":
                draft.gradients += 1
                if draft.gradients > CAPACITY:
                    return None
                results.append(True)
        self.__dict__ |= draft.__dict__
        return results


WORDS = st.sampled_from(
    ["assigning", "adding", "reading", "counting", "enqueueing", "dequeueing", "applying"]
)
RUNS = st.lists(st.lists(st.tuples(WORDS, st.integers(0, 4)), min_size=1, max_size=6), max_size=12)


@given(runs=RUNS, closed=st.booleans())
def test_all_of_a_run_happens_or_nothing_does(
    runs: list[list[tuple[str, int]]], closed: bool
) -> None:
    model = Model()
    with Session() as session:
        count, items = session.counter("n"), session.queue("q", CAPACITY)
        value = session.variable("v", 0.0)
        gradients = session.accumulator("g", like=0.0, capacity=CAPACITY)

        def request(word: str, n: int) -> Any:
            if word in ("assigning", "adding"):
                tree: Any = [1.0] if n == 4 else float(n)
                return value.assigning(tree) if word == "assigning" else value.adding(tree)
            make: dict[str, Any] = {
                "reading": value.reading,
                "counting": lambda: count.adding(HUGE if n == 4 else n),
                "enqueueing": lambda: items.enqueueing(n),
                "dequeueing": items.dequeueing,
                "applying": lambda: gradients.applying(float(n)),
            }
            return make[word]()

        for place, words in enumerate(runs):
            if closed and place == len(runs) // 2:
                items.close()
                model.closed = True
            before = value.version
            expected = model.run(words)
            requests = [request(*each) for each in words]
            if expected is None:
                with pytest.raises((TimedOut, SchemaError, Closed)):
                    session.run(requests, timeout=0)
                assert value.version == before
            else:
                found = session.run(requests, timeout=0)
                for (word, _), result, wanted in zip(words, found, expected, strict=True):
                    if word in ("assigning", "adding"):
                        assert result == value.version == before + 1
                    else:
                        assert (result.tree if word == "reading" else result) == wanted
            assert (count.value, value.read().tree) == (model.count, model.value)
            assert items.stats()["stored"] == items.size == len(model.items)
            assert gradients.stats()["held"] == model.gradients


def test_a_run_waits_for_all_it_needs_and_holds_up_nobody(server: Serving) -> None:
    session, other = server.session(), server.session()
    count, items = session.counter("n"), session.queue("items", 4)
    full = session.queue("full", 1)
    full.enqueue("first")
    waiting = Call(session.run, [count.adding(1), full.enqueueing("second"), items.dequeueing()])
    until(lambda: waits(other, "together") == 1)
    other.queue("items").enqueue("one")
    # It needs room too: the item stays, for whoever takes it.
    assert other.counter("n").value == 0
    assert other.queue("items").dequeue(timeout=0) == "one"
    other.queue("items").enqueue("two")
    assert other.queue("full").dequeue(timeout=0) == "first"
    assert waiting.outcome() == [1, None, "two"]
    assert other.queue("full").dequeue(timeout=0) == "second"
    assert items.stats()["delivered"] == 2


def test_a_timeout_changes_nothing_and_says_what_could_not_be_done(server: Serving) -> None:
    session = server.session()
    count, items = session.counter("n"), session.queue("items", 4)
    with pytest.raises(
        TimedOut,
        match=r"^run of 2 requests: request 2: dequeue of 1 items from 'items': it holds 0, after",
    ):
        session.run([count.adding(1), items.dequeueing()], timeout=0.05)
    items.enqueue(1)
    assert (count.value, items.size) == (0, 1)


def test_an_error_is_of_one_request_and_none_is_done(server: Serving) -> None:
    session = server.session()
    count, value = session.counter("n"), session.variable("v", np.zeros(2))
    with pytest.raises(SchemaError, match=r"^request 2: assign 'v': leaf \$ is float64\[3\], decl"):
        session.run([count.adding(1), value.assigning(np.zeros(3))])
    with pytest.raises(SchemaError, match=r"^request 2: variable 'v' is written twice in one step"):
        session.run([value.assigning(np.zeros(2)), value.adding(np.zeros(2))])
    large = session.variable("large", np.zeros(1 << 18))
    with pytest.raises(SchemaError, match=r"^request 2: assign_add 'large': 2097152 bytes; 10"):
        session.run([count.adding(1), large.adding(np.zeros(1 << 18))])
    with pytest.raises(
        SchemaError, match=r"^run: str at place 2 is no request, such as counter\.a"
    ):
        session.run([count.adding(1), "train_step"])  # type: ignore[list-item]
    assert (count.value, value.read().tree.sum()) == (0, 0.0)
    assert session.run([]) == []


@pytest.mark.parametrize("what", [None, 0, 5, b"x", {"a": 1}, iter([])])
def test_only_a_name_or_a_list_of_requests_is_run(server: Serving, what: Any) -> None:
    with pytest.raises(
        SchemaError, match=r"^run takes an operation's name or a list of requests, "
    ):
        server.session().run(what)


def test_a_single_request_is_run_in_a_list(server: Serving) -> None:
    session: Any = server.session()
    with pytest.raises(
        SchemaError, match=r", not <Request AddToCounter of 'n'>: put it in a list$"
    ):
        session.run(session.counter("n").adding(1))


def test_nothing_is_run_in_a_closed_session(server: Serving) -> None:
    session = server.session()
    session.close()
    with pytest.raises(Closed):
        session.run([])


def test_whoever_looks_sees_all_of_a_run_or_nothing(server: Serving) -> None:
    """One who waits for the first change already finds the last one made."""
    session, other = server.session(), server.session()
    value, count = session.variable("v", np.zeros(50_000)), session.counter("n")
    items = session.queue("q", 4)
    mine = other.variable("v")
    seen = Call(lambda: mine.read(newer_than=mine.version, timeout=DEADLINE_SECONDS).tree[0])
    until(lambda: waits(session, "variable") == 1)
    taken = Call(lambda: other.queue("q").dequeue(timeout=DEADLINE_SECONDS))
    until(lambda: waits(session, "items") == 1)
    # The item that the other waits for is taken by the run itself, as it was told.
    ones = np.ones(50_000)
    assert session.run(
        [value.assigning(ones), items.enqueueing("mine"), items.dequeueing(), count.adding(7)]
    )[2:] == ["mine", 7]
    assert seen.outcome() == 1.0
    assert waits(session, "items") == 1
    items.enqueue("theirs")
    assert taken.outcome() == "theirs"


def test_what_a_run_took_and_its_session_did_not_have_goes_back(server: Serving) -> None:
    session, other = server.session(), server.session()
    items, later = session.queue("items", 4), session.queue("later", 1)
    items.enqueue("one")
    waiting = Call(session.run, [items.dequeueing(), later.dequeueing()])
    until(lambda: waits(other, "together") == 1)
    session.close()
    with pytest.raises((Closed, Disconnected)):
        waiting.outcome()
    assert other.queue("items").dequeue(timeout=DEADLINE_SECONDS) == "one"


def test_a_queue_that_is_closed_and_a_reset_end_the_wait(server: Serving) -> None:
    session, other = server.session(), server.session()
    count, full = session.counter("n"), session.queue("full", 1)
    full.enqueue(0)
    waiting = Call(session.run, [count.adding(1), full.enqueueing(1)])
    until(lambda: waits(other, "together") == 1)
    other.queue("full").close()
    with pytest.raises(Closed, match=r"^request 2: enqueue 'full': it is closed"):
        waiting.outcome()
    assert count.value == 0
    again = session.queue("again", 1)
    waiting = Call(session.run, [count.adding(1), again.dequeueing()])
    until(lambda: waits(other, "together") == 1)
    other.reset("")
    with pytest.raises(Closed):
        waiting.outcome()


def test_a_write_waits_for_room_below_a_bound(server: Serving) -> None:
    session = server.session()
    tree = np.zeros(5000)
    value, count = session.variable("v", tree, memory=2 * tree.nbytes), session.counter("n")
    value.tag("old")
    value.assign(tree)
    waiting = Call(session.run, [count.adding(1), value.assigning(tree + 1)])
    other = server.session()
    until(lambda: waits(other, "together") == 1)
    assert other.counter("n").value == 0
    other.variable("v").untag("old")
    assert waiting.outcome()[0] == 1
    assert value.read().tree[0] == 1
    assert issubclass(OutOfMemory, PacelineError)


def test_requests_to_several_servers_are_done_by_each_all_or_none(tmp_path: Path) -> None:
    spec = cluster(tmp_path, ps=2, worker=1)
    with served(spec, secret=SECRET), Session(spec, secret=SECRET) as session:
        count = session.counter("n")
        with session.device("ps:1"):
            value, items = session.variable("v", np.zeros(3)), session.queue("q", 1)
        found = session.run([value.assigning(np.ones(3)), count.adding(2), items.enqueueing(5)])
        assert found == [value.version, 2, None]
        with pytest.raises(TimedOut, match=r"what went to ps:\d at tcp:\S+ was done$"):
            session.run(
                [value.adding(np.ones(3)), count.adding(1), items.enqueueing(6)], timeout=0.1
            )
        assert (count.value, value.read().tree[0]) == (3, 1.0)
        with pytest.raises(UnknownName):
            session.run("nothing", timeout=0)
        spread = session.spread("s", {"a": np.zeros(3), "b": np.zeros(3)})
        tree = {"a": np.ones(3), "b": np.ones(3)}
        for ask, what in (
            (lambda: spread.adding(tree), "assign_add"),
            (lambda: spread.assigning(tree), "assign"),
            (spread.reading, "read"),
        ):
            message = (
                rf"^{what} 's': it is spread over ps:0, ps:1, and what is on several servers ca"
            )
            with pytest.raises(SchemaError, match=message):
                session.run([count.adding(1), ask()])
        assert count.value == 3


class Two(NamedTuple):
    """A session on two servers, of each a queue and a counter."""

    servers: list[Server]
    session: Session
    queues: list[Queue[Any]]
    counts: list[Counter]


@contextmanager
def two_servers(tmp_path: Path) -> Iterator[Two]:
    spec = cluster(tmp_path, ps=2, worker=1)
    with served(spec, secret=SECRET) as servers, Session(spec, secret=SECRET) as session:
        found = Two(servers, session, [], [])
        for n in range(2):
            with session.device(f"ps:{n}"):
                found.queues.append(session.queue(f"q{n}", 4))
                found.counts.append(session.counter(f"n{n}"))
        yield found


@pytest.mark.parametrize("empty", [0, 1])
def test_what_one_server_took_goes_back_when_another_had_nothing(
    tmp_path: Path, empty: int
) -> None:
    full = 1 - empty
    with two_servers(tmp_path) as two:
        two.queues[full].enqueue("precious")
        taking: list[Any] = [each.dequeueing() for each in two.queues]
        with pytest.raises(
            TimedOut,
            match=rf"from 'q{empty}'.*; what went to ps:\d at \S+ was done, but what it took went"
            " back$",
        ):
            two.session.run([*taking, two.counts[full].adding(1)], timeout=0.1)
        assert two.counts[full].value == 1
        assert two.queues[full].size == 1
        two.queues[empty].enqueue("late")
        assert set(two.session.run(taking, timeout=0)) == {"precious", "late"}


def test_a_run_on_several_servers_that_ctrl_c_ends_takes_nothing_later(tmp_path: Path) -> None:
    with two_servers(tmp_path) as two:

        def interrupt() -> None:
            until(lambda: waits(two.session, "together") == 1)
            signal.raise_signal(signal.SIGINT)

        coming = threading.Thread(target=interrupt)
        coming.start()
        with pytest.raises(KeyboardInterrupt):
            two.session.run([two.queues[0].dequeueing(), two.counts[1].adding(1)], timeout=60)
        coming.join()
        assert waits(two.session, "together") == 0
        two.queues[0].enqueue("precious")
        assert two.queues[0].dequeue(timeout=0) == "precious"
        assert two.counts[1].value == 1


@pytest.mark.parametrize("dead", [0, 1])
def test_with_a_dead_server_an_error_says_what_was_done(tmp_path: Path, dead: int) -> None:
    with two_servers(tmp_path) as two:
        two.servers[dead].close()
        alive = two.counts[1 - dead]
        requests: list[Any] = [alive.adding(1), two.counts[dead].adding(1)]
        with pytest.raises(
            (Disconnected, Closed), match=r"; what went to ps:\d at tcp:\S+ was done$"
        ):
            two.session.run(requests, timeout=60)
        assert alive.value == 1


def test_a_request_may_be_run_again(server: Serving) -> None:
    session = server.session()
    items, count = session.queue("q", 8), session.counter("n")
    value = session.variable("v", np.zeros(LARGE))
    again: list[Any] = [
        items.enqueueing(np.ones(LARGE)),
        count.adding(2),
        value.adding(np.ones(LARGE)),
        items.dequeueing(),
    ]
    for number in range(1, 4):
        *_, item = found = session.run(again)
        assert found[1] == 2 * number
        assert value.read().tree.sum() == number * LARGE
        assert item.sum() == LARGE


def test_a_run_whose_reply_was_lost_is_done_once() -> None:
    cuts = [None, *range(900, 2400, 100), None]
    with wired(iter(cuts)) as (_, wire), wire.session() as chief, wire.session() as session:
        chief.queue("q", 100)
        count, items = session.counter("n"), session.queue("q")
        for number in range(40):
            assert session.run([count.adding(1), items.enqueueing(number)]) == [number + 1, None]
        assert wire.carried > 2
        assert chief.queue("q").dequeue_many(40).data.tolist() == list(range(40))
