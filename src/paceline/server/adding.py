"""Sums, computed beside the loop where they are long."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.arithmetic import add, add_values
from paceline.core.tree import decoded
from paceline.core.waiting import Stored
from paceline.server.service import Service, at_once, bytes_of

LONG_WORK = 1 << 20


def add_beside(
    service: Service,
    current: Stored,
    delta: Stored,
    done: Callable[[Stored, Exception | None], None],
) -> None:
    """Compute a sum in new memory, so that readers of the current tree go on; tell `done` of it."""
    total = Stored(current.layout, [], None)

    def work() -> None:
        nbytes = decoded(current.layout).nbytes
        block = service.arena.allocate(nbytes)
        add(current.layout, bytes_of(current), delta.layout, bytes_of(delta), block.array())
        total.memory = block
        total.values = add_values(current.layout, current.values, delta.layout, delta.values)

    long = delta.memory is not None and delta.memory.nbytes > LONG_WORK
    (service.run_long if long else at_once)(work, lambda error: done(total, error))
