"""Honest clients: whatever others do to their servers, what they share stays as it should be.

One gives and one takes. Every value says what it must be, so that a torn, lost, doubled or altered
one shows.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from paceline import Closed, Session

CONTAINER = "honest"
SIDE = "honest.side"
LIMIT = 60.0


def filled(k: int) -> dict[str, Any]:
    """A tree that says `k` everywhere: inline, in shared memory, and as plain values."""
    return {
        "k": k,
        "text": str(k),
        "few": np.full(16, k, np.int64),
        "many": np.full((64, 200), k, np.float64),
    }


def said(tree: dict[str, Any]) -> int:
    """What it says; raises if it does not say the same everywhere."""
    k = int(tree["k"])
    assert tree["text"] == str(k), f"{tree['text']!r} beside {k}"
    for name in ("few", "many"):
        assert np.all(tree[name] == k), f"{name!r} has {np.unique(tree[name])} beside {k}"
    return k


class Shared:
    """What the two share, on that session."""

    def __init__(self, session: Session, *, spread: bool) -> None:
        with session.container(CONTAINER):
            self.policy = session.variable("policy", filled(0))
            self.total = session.variable("total", np.zeros(4, np.int64))
            with session.device("ps:1" if spread else None):
                self.queue = session.queue("items", 16)
            self.steps = session.counter("steps")
            self.gradients = session.accumulator("gradients", like=np.zeros(3), capacity=64)
            self.wide: Any = None
            if spread:
                # An array for each server.
                self.wide = session.spread("wide", {"a": np.zeros(5), "b": np.zeros(9000)})


def give(
    session: Session, stop: threading.Event, *, spread: bool, pause: float = 0.0
) -> dict[str, int]:
    """Write, add, hand in, until told to stop, with pauses; how often."""
    shared = Shared(session, spread=spread)
    k = 0
    while not stop.wait(pause):
        k += 1
        shared.policy.assign(filled(k))
        shared.total.assign_add(np.ones(4, np.int64))
        shared.queue.enqueue(filled(k), timeout=LIMIT)
        shared.steps.add(2)
        shared.gradients.apply(np.full(3, 0.5), timeout=LIMIT)
        if shared.wide is not None:
            shared.wide.assign({"a": np.full(5, float(k)), "b": np.full(9000, float(k))})
        if k % 64 == 0:
            session.reset(SIDE)
            with session.container(SIDE):
                assert session.variable("v", k).read().tree == k
    shared.queue.close()
    stats = shared.queue.stats()
    assert stats["accepted"] == k, (k, stats)
    return {"given": k, "version": shared.policy.read().count}


def take(session: Session, *, spread: bool) -> dict[str, int]:
    """Take and read all there is, until the queue has been closed; how much."""
    shared = Shared(session, spread=spread)
    taken = version = wide = reads = 0
    while True:
        try:
            item = shared.queue.dequeue(timeout=LIMIT)
        except Closed:
            break
        taken += 1
        assert said(item) == taken, f"item {said(item)} came as number {taken}"
        snapshot = shared.policy.read()
        assert snapshot.version >= version
        version = snapshot.version
        assert said(snapshot.tree) >= taken
        reads += 1
        assert np.all(shared.gradients.take(1, timeout=LIMIT).tree == 0.5)
        if shared.wide is not None and taken % 4 == 0:
            tree = shared.wide.read().tree
            found = {*tree["a"].tolist(), *tree["b"].tolist()}
            assert len(found) == 1, f"a torn read: {found}"
            assert max(found) >= wide, f"{found} after {wide}"
            wide = found.pop()
    stats = shared.queue.stats()
    assert stats["accepted"] == stats["delivered"] == taken, stats
    assert shared.steps.value == 2 * taken, (shared.steps.value, taken)
    total = shared.total.read().tree
    assert np.all(total == taken), (total, taken)
    assert said(shared.policy.read().tree) == taken
    return {"taken": taken, "reads": reads}
