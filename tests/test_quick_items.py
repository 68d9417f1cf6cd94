"""Items that workers make quickly travel together, and are what they were when yielded."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import every_engine, quiet

import paceline
from paceline.core.tree import unflatten
from paceline.packing import SMALL_ITEM, pack_item, pack_made
from paceline.transports.base import HeapArena


@every_engine
@pytest.mark.parametrize("size", [4, SMALL_ITEM])
def test_an_item_is_as_it_was_yielded_whatever_becomes_of_its_arrays(
    engine: str, size: int
) -> None:
    def counting() -> Iterator[Any]:
        array = np.zeros(size, np.int64)
        for n in range(10_000):
            array[:] = n
            yield {"array": array, "n": n}

    with quiet(1, engine) as cluster, cluster.collect(counting, batch_size=300) as batches:
        for start in (0, 300, 600):
            data = batches.next().data
            assert data["n"].tolist() == list(range(start, start + 300))
            assert (data["array"] == data["n"][:, None]).all()


@every_engine
def test_what_was_logged_with_some_items_stays_with_them(engine: str) -> None:
    def logging(worker: paceline.Worker) -> Iterator[Any]:
        for n in range(10_000):
            if n % 3 == 0:
                worker.log(n=n)
            yield n

    with quiet(1, engine) as cluster, cluster.collect(logging, batch_size=100) as batches:
        for start in (0, 100, 200):
            batch = batches.next()
            assert batch.data.tolist() == list(range(start, start + 100))
            assert batch.metrics["n"].tolist() == [n for n in batch.data if n % 3 == 0]


def test_those_alike_are_one_run_and_others_are_not() -> None:
    arena = HeapArena()
    small, other, large = np.arange(3), np.arange(2.0), np.zeros(SMALL_ITEM)
    made = [
        pack_item(arena, item, "item", version, logged)
        for item, version, logged in [
            ({"x": small, "n": 1}, 7, None),
            ({"x": small + 1, "n": 2}, 7, {"r": [1.0, 2.0]}),
            ({"x": small + 2, "n": 3}, 8, None),
            ({"x": other, "n": 4}, 8, None),
            (large, 8, None),
            (large + 1, 8, None),
            (5, 8, None),
            (6, 8, {"r": [3.0]}),
        ]
    ]
    runs = pack_made(arena, made)
    assert [(head.count, head.version, head.columns) for head, _ in runs] == [
        (2, 7, [[1, 2]]),
        (1, 8, [[3]]),
        (1, 8, [[4]]),
        (1, 8, []),
        (1, 8, []),
        (2, 8, [[5, 6]]),
    ]
    assert [head.metrics for head, _ in runs] == [
        [{}, {"r": [1.0, 2.0]}], [], [], [], [], [{}, {"r": [3.0]}],
    ]  # fmt: skip
    (_, first), *_, (_, last) = runs
    assert first is not None
    assert last is None
    row = len(first.view()) // 2
    for n, values in enumerate(([0, 1, 2], [1, 2, 3])):
        tree = unflatten(runs[0][0].layout, [n], np.array(first.view()[n * row : (n + 1) * row]))
        assert tree["x"].tolist() == values
