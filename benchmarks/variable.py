"""64 MB into a variable and out of it, beside memcpy; and reads that copy nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
from measure import MB, Effort, Figure, compare, memcpy, seconds
from served import served


def measure(effort: Effort) -> Iterator[Figure]:
    """Assign, read_into, a view of a large variable, a read of what has not changed."""
    size = (1 if effort.quick else 64) * MB
    source = np.random.default_rng(0).random(size // 8)
    target = np.zeros_like(source)
    with served() as session:
        large = session.variable("large", source)
        for _ in range(3):
            large.assign(source)
            large.read_into(target)
        copied = memcpy(size)

        def read_into() -> None:
            # A new handle has read nothing yet, so it has to ask.
            copy.copy(large).read_into(target)

        for what, run in (
            (f"assign of {size // MB} MB", lambda: large.assign(source)),
            (f"read_into of {size // MB} MB", read_into),
        ):
            yield compare(
                what,
                lambda: size / seconds(run, 3) / 1e9,  # noqa: B023
                "memcpy", copied, "GB/s", ">= 0.7", effort,
            )  # fmt: skip
        small = session.variable("scalar", np.float64(1.0))
        times = effort.times(1000)

        def view(of: Any) -> float:
            return 1e6 * seconds(lambda: copy.copy(of).read(), times)

        yield compare(
            f"read of {size // MB} MB as a view", lambda: view(large),
            "of a scalar", lambda: view(small), "us", "<= 2", effort,
        )  # fmt: skip
        small.read()
        yield compare(
            "read of an unchanged version", lambda: 1e6 * seconds(small.read, 20 * times),
            "what is wanted", lambda: 5.0, "us", "<= 1", effort,
        )  # fmt: skip
