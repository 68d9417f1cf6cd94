"""What a desk must see to when a state changes: that those who wait are asked again."""

from paceline.core import messages as m
from paceline.core.tree import flatten
from paceline.server.loop import LocalServer
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
