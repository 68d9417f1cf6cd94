"""What a desk must see to when a state changes: that those who wait are asked again."""

import gc

from paceline.core import messages as m
from paceline.core.round import Round
from paceline.core.tree import flatten
from paceline.server.collection_desk import REMEMBERED
from paceline.server.local import LocalServer
from paceline.session import Session


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
