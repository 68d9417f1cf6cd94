"""What every program of the comparison is asked, and how it tells: lines of JSON.

Imported in the environment of each peer, so it needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from settings import GOALS, JOBS, Job

EPISODES = 100


class Report:
    """Counts steps and episodes, and knows when there is enough of both.

    Attributes:
        job: the hyper-parameters.
        environment, seed: of Gymnasium; what all random numbers come from.
        measure: `rate` (steps per second while it trains), `collect` (without training) or
            `solve` (until the last 100 episodes have the mean return that counts as solved).
    """

    def __init__(self, job: str | None = None) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--job", default=job, required=job is None)
        parser.add_argument("--environment", choices=GOALS, default="CartPole-v1")
        parser.add_argument("--measure", choices=["rate", "collect", "solve"], default="rate")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--warm", type=float, default=5, help="seconds that do not count")
        parser.add_argument("--window", type=float, default=15, help="seconds that do")
        parser.add_argument("--began", type=float, default=time.monotonic())
        options = parser.parse_args()
        self.environment: str = options.environment
        self.measure: str = options.measure
        self.seed: int = options.seed
        self.name: str = options.job
        self.job: Job = JOBS[self.environment][options.job]
        self.steps = 0
        self._options = options
        self._returns: deque[float] = deque(maxlen=EPISODES)
        self._first = self._warm = self._counted = 0.0
        self._done = False

    def add(self, steps: int, returns: Iterable[float] = ()) -> bool:
        """Count so many steps more, and episodes that ended; say whether that was all."""
        if self._done:
            return True
        self.steps += steps
        self._returns.extend(float(value) for value in returns)
        now = time.monotonic()
        if self.measure == "solve":
            return self.solved(sum(self._returns) / EPISODES, len(self._returns))
        return self._rated(now)

    def solved(self, mean: float, episodes: int) -> bool:
        """The same, where a peer itself has the mean of its last 100 episodes."""
        if self.measure != "solve" or episodes < EPISODES or mean < GOALS[self.environment]:
            return False
        self._tell(seconds=time.monotonic() - self._options.began, steps=self.steps, mean=mean)
        return True

    def _rated(self, now: float) -> bool:
        if not self._first:
            self._first = now
        if not self._warm:
            if now - self._first >= self._options.warm:
                self._warm, self._counted = now, self.steps
            return False
        took = now - self._warm
        if took < self._options.window:
            return False
        done = self.steps - self._counted
        self._tell(
            rate=done / took, steps=done, window=took, began=self._first - self._options.began
        )
        return True

    def _tell(self, **what: Any) -> None:
        self._done = True
        print(json.dumps({"measure": self.measure, **what}), flush=True)
