"""What a desk must see to when a state changes: that those who wait are asked again."""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
from wires import SECRET, serve

from paceline.core import messages as m
from paceline.core import names
from paceline.core.errors import UnknownName
from paceline.core.round import Round
from paceline.core.tree import flatten
from paceline.server import loop
from paceline.server.collection_desk import REMEMBERED
from paceline.server.lines import Peer
from paceline.server.local import LocalServer
from paceline.server.service import Desk, Handler, Service
from paceline.session import Session
from paceline.transports.unix import UnixListener


def test_a_dropped_item_lets_the_next_waiting_worker_start() -> None:
    server = LocalServer(waits=False)
    chief, first, second = (Session(channel=server.connect()) for _ in range(3))
    policy = chief.variable("policy", 0)
    chief.connection.call(m.OpenCollection("c", "policy", 1, 0, 1, 1 << 20))
    stamp = policy.version
    granted = first.connection.call(m.Offer("c", [], 1, 0, 0.0))
    waiting = second.connection.post(m.Offer("c", [], 1, 0, None), timeout=None)
    chief.connection.post(m.Next("c", False, None), timeout=None)
    policy.assign(1)
    stale = m.RunHead(flatten(1).layout, 1, [[1]], stamp)
    first.connection.post(m.Offer("c", [stale], 1, 0, None), timeout=None)
    assert (granted.items, waiting.result()[0].items) == (1, 1)
    assert chief.connection.call(m.CollectionStats("c")).content["dropped"] == {"stale": 1}
    server.close()


def test_a_batch_in_lockstep_that_comes_back_is_handed_over_again_in_order() -> None:
    server = LocalServer(waits=False)
    chief = Session(channel=server.connect())
    workers = [Session(job="w", channel=server.connect()) for _ in range(2)]
    turns = ["w:0", "w:1"]
    chief.connection.call(m.OpenCollection("c", None, 3, 0, 3, 1 << 20, turns))
    asked = chief.connection.post(m.Next("c", False, None), timeout=None)
    for place in (1, 0):
        granted = workers[place].connection.call(m.Offer("c", [], 9, 0, 0.0)).items
        made = m.RunHead(flatten(1).layout, granted, [[10 * place + n for n in range(granted)]])
        workers[place].connection.post(m.Offer("c", [made], 1, 0, None), timeout=None)

    def marks(found: m.Items) -> list[list[list[int]]]:
        return [run.columns for run in found.runs]

    first = asked.result()[0]
    assert marks(first) == [[[0]], [[10]], [[1]]]
    assert first.producers == ["w:0", "w:1", "w:0"]
    chief.connection.tell(m.Delivered("c", first.delivery, True))
    again = chief.connection.call(m.Next("c", False, 0.0))
    assert marks(again) == marks(first)
    server.close()


def test_runs_in_lockstep_that_have_ended_are_forgotten() -> None:
    server = LocalServer(waits=False)
    chief, worker = (Session(job="w", channel=server.connect()) for _ in range(2))
    policy, mine = chief.variable("policy", 0), worker.variable("policy")
    for number in range(2 * REMEMBERED):
        name = f"c-{number}"
        chief.connection.call(m.OpenCollection(name, "policy", 1, 0, 1, 1 << 20, ["w:1"]))
        worker.connection.call(m.Offer(name, [], 0, 0, 0.0))
        chief.connection.post(m.Next(name, False, None), timeout=None)
        asked_at = policy.version
        policy.assign(number)
        assert worker.connection.call(m.Await("policy", 0.0)).version == asked_at
        chief.connection.call(m.EndCollection(name))
        assert worker.connection.call(m.Await("policy", 0.0)).version == mine.version
    assert len(policy.memory()["versions"]) == 1
    gc.collect()
    assert sum(type(each) is Round for each in gc.get_objects()) <= REMEMBERED + 1
    server.close()


def test_a_collection_that_makers_return_to_is_made_again_after_a_reset_and_a_mistake() -> None:
    server = LocalServer(waits=False)
    chief = Session(channel=server.connect())
    makers = ["worker:0"]
    wrong = m.OpenCollection("c", "nobody", 1, 0, 1, 1 << 20, makers=makers)
    for _ in range(2):
        with pytest.raises(UnknownName, match=r"^no variable 'nobody'"):
            chief.connection.call(wrong)
    right = m.OpenCollection("c", None, 1, 0, 1, 1 << 20, makers=makers)
    chief.connection.call(right)
    for _ in range(2):
        with pytest.raises(UnknownName, match=r"^no variable 'nobody'"):
            chief.connection.call(wrong)
    assert not chief.connection.call(m.CollectionStats("c")).content["stored"]
    number, _ = chief.connection.call(m.Reset([""])).content
    named = names.key("c", "", number)
    chief.connection.call(m.OpenCollection(named, None, 2, 0, 2, 1 << 20, makers=makers))
    chief.connection.call(m.OpenCollection(named, None, 1, 0, 1, 1 << 20, makers=makers))
    assert chief.connection.call(m.CollectionStats(named)).content["accepted"] == 0
    for count in range(REMEMBERED + 1):
        each = names.key(f"c{count}", "", number)
        chief.connection.call(m.OpenCollection(each, None, 1, 0, 1, 1 << 20, makers=makers))
        chief.connection.call(m.EndCollection(each))
    for count in range(REMEMBERED + 1):
        each = names.key(f"c{count}", "", number)
        chief.connection.call(m.OpenCollection(each, None, 1, 0, 1, 1 << 20, makers=makers))
    server.close()


class Odd(Desk):
    """A desk that fails at the end of whoever is here."""

    def __init__(self, service: Service) -> None:
        """It keeps nothing."""

    def handlers(self) -> dict[type, Handler]:
        return {}

    def lost(self, peer: Peer) -> None:
        raise ValueError(f"odd about {peer.name}")

    def reset(self, gone: Callable[[str], bool]) -> None:
        """There is nothing."""

    def listing(self) -> tuple[str, dict[str, Any]]:
        return "odd", {}


def test_what_one_desk_fails_at_the_others_still_do_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "DESKS", (Odd, *loop.DESKS))
    notes: list[str] = []
    listener = UnixListener(f"@paceline-odd-{os.getpid()}")
    with serve(listener, on_note=notes.append) as server:
        target = f"unix:{listener.place}"
        with Session(target, secret=SECRET) as other:
            queue = other.queue("q", 1)
            with Session(target, secret=SECRET, job="bad") as bad:
                queue.enqueue("x")
                taken = bad.connection.post(m.Dequeue("q", 1, 1, None), timeout=None)
                assert taken.result()[0].delivery
            assert queue.dequeue() == "x"
            server.service.run_long(lambda: None, lambda error: (1 // 0, None)[1])
            with pytest.raises(ZeroDivisionError):
                server.do(lambda: 1 // 0)
    assert "odd about bad:0" in notes[0]
    assert notes[0].startswith("cut off bad:0 after an error:\n")
    assert any("ZeroDivisionError" in note for note in notes[1:])


def test_a_server_whose_every_turn_fails_ends_with_the_error() -> None:
    listener = UnixListener(f"@paceline-odd-{os.getpid()}")
    notes: list[str] = []
    server = loop.Server([listener], SECRET, on_note=notes.append)
    for _ in range(loop.FAILURES):
        server.service.ended.append(lambda: (1 // 0, None)[1])
    with pytest.raises(ZeroDivisionError):
        server.serve()
    assert len(notes) == loop.FAILURES - 1
    assert all(note.startswith("went on after an error:\n") for note in notes)
    server.close()
