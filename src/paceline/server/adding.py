"""Sums, computed beside the loop where they are long."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.arithmetic import add, add_values
from paceline.core.tree import decoded
from paceline.core.waiting import Stored
from paceline.server.frames import bytes_of
from paceline.server.service import Service, at_once

LONG_WORK = 1 << 20


def add_beside(
    service: Service,
    current: Stored,
    delta: Stored,
    done: Callable[[Stored, Exception | None], None],
) -> None:
    """Compute a sum in new memory, so that readers of the current tree go on; tell `done` of it."""
    total: list[Stored] = []

    def work() -> None:
        total.append(sum_of(service, current, delta))

    def finish(error: Exception | None) -> None:
        done(total.pop() if total else current, error)

    long = delta.memory is not None and delta.memory.nbytes > LONG_WORK
    (service.run_long if long else at_once)(work, finish)


def sum_of(service: Service, current: Stored, delta: Stored) -> Stored:
    """Their sum, in new memory."""
    block = service.arena.allocate(decoded(current.layout).nbytes)
    add(current.layout, bytes_of(current), delta.layout, bytes_of(delta), block.array())
    values = add_values(current.layout, current.values, delta.layout, delta.values)
    return Stored(current.layout, values, block)
