"""Rows of a table on a server, beside the same rows in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from measure import Effort, Figure, compare, seconds
from served import served


def measure(effort: Effort) -> Iterator[Figure]:
    """Gather and scatter_add, few and many rows at a time, in millions of rows per second."""
    rows, width = (10_000 if effort.quick else 1_000_000), 64
    mine = np.zeros((rows, width), np.float32)
    draw = np.random.default_rng(0)
    with served() as session:
        table = session.variable("table", mine)
        for count in (1_000, 100_000):
            size = count if not effort.quick else count // 100
            indices = draw.integers(0, rows, size)
            added = draw.normal(size=(size, width)).astype(np.float32)
            # Once without being timed: an assigned table is copied by the first addition.
            table.scatter_add(indices, added)
            times = max(1, effort.times(50_000) // size)

            def rate(run: Callable[[], object], size: int = size, times: int = times) -> float:
                return size / seconds(run, times) / 1e6

            yield compare(
                f"gather of {size:,} rows of {width} floats",
                lambda: rate(lambda: table.gather(indices)),  # noqa: B023
                "indexing an array", lambda: rate(lambda: mine[indices]),  # noqa: B023
                "M rows/s", ">= 0.05", effort,
            )  # fmt: skip
            yield compare(
                f"scatter_add of {size:,} rows of {width} floats",
                lambda: rate(lambda: table.scatter_add(indices, added)),  # noqa: B023
                "np.add.at", lambda: rate(lambda: np.add.at(mine, indices, added)),  # noqa: B023
                "M rows/s", ">= 0.3", effort,
            )  # fmt: skip
