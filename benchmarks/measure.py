"""How everything here is measured: beside a limit, in alternation, within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How long to measure: `quick` shows that a benchmark works, its figures mean nothing.

    `large` is for what takes many GB of memory.
    """

    quick: bool = False
    large: bool = False

    def times(self, many: int) -> int:
        """How often to do what is done `many` times in earnest."""
        return max(1, many // 50) if self.quick else many

    @property
    def rounds(self) -> int:
        """How many rounds, each of what is measured and of its limit."""
        return 2 if self.quick else 9


@dataclass(frozen=True)
class Figure:
    """One line of a report; `value` and `limit` are medians over the rounds, both in `unit`.

    Attributes:
        what: what was measured.
        beside: what the limit is.
        ratio: median of `value / limit` of each round.
        low, high: the smallest and the largest of these.
        wanted: the bound that the ratio has to keep, such as `>= 0.9`.
    """

    what: str
    value: float
    unit: str
    limit: float
    beside: str
    ratio: float
    low: float
    high: float
    wanted: str

    @property
    def good(self) -> bool:
        """Whether the ratio is as wanted."""
        sign, bound = self.wanted.split()
        return self.ratio >= float(bound) if sign == ">=" else self.ratio <= float(bound)


def compare(
    what: str,
    run: Callable[[], float],
    beside: str,
    limit: Callable[[], float],
    unit: str,
    wanted: str,
    effort: Effort,
) -> Figure:
    """Let `run` and `limit` each give a number in turn; whoever is first changes each round."""
    pairs = []
    for number in range(effort.rounds):
        if number % 2:
            bound = limit()
            pairs.append((run(), bound))
        else:
            value = run()
            pairs.append((value, limit()))
    return figure(what, pairs, beside, unit, wanted)


def figure(
    what: str, pairs: Sequence[tuple[float, float]], beside: str, unit: str, wanted: str
) -> Figure:
    """The line of a report on rounds of (value, limit)."""
    ratios = [value / limit for value, limit in pairs]
    return Figure(
        what,
        statistics.median(value for value, _ in pairs),
        unit,
        statistics.median(limit for _, limit in pairs),
        beside,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        wanted,
    )


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """Seconds that `run` takes, the mean of so many times in a row."""
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


def memcpy(nbytes: int) -> Callable[[], float]:
    """Measures GB/s of a copy between two arrays that are in use already."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return lambda: nbytes / seconds(lambda: np.copyto(target, source), 3) / 1e9
