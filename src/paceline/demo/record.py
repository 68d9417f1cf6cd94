"""What a run of the demo leaves behind: a folder with metrics, a reward curve and parameters."""

from __future__ import annotations

import itertools
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np

from paceline import Batch
from paceline.core.closing import Closing
from paceline.demo.cartpole import SOLVED_EPISODES, solved
from paceline.demo.policy import Params

NEEDED = ("gymnasium", "matplotlib")


def missing() -> list[str]:
    """The packages that the demo needs beyond paceline's own and that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


@final
class Record(Closing):
    """The progress of one run, written to a folder of its own. A context manager.

    `metrics.jsonl` grows by a line with each batch; `parameters.npz` and `curve.png` are written at
    the end, however the run ended. The folder is `<parent>/<name>`, or with a number where that
    exists: nothing is ever overwritten.
    """

    def __init__(self, parent: Path, name: str, *, target: float) -> None:
        self.folder = _new_folder(parent, name)
        self.target = target
        self.returns: list[float] = []
        self.steps = 0
        self.seconds = 0.0
        self._batches = 0
        self._ended_at: list[int] = []
        self._params: Params = {}
        self._began = time.monotonic()
        self._metrics = (self.folder / "metrics.jsonl").open("w", buffering=1)

    @property
    def mean_return(self) -> float | None:
        """The mean return of the last 100 episodes, or of as many as there are."""
        last = self.returns[-SOLVED_EPISODES:]
        return sum(last) / len(last) if last else None

    @property
    def solved(self) -> bool:
        """Whether the last 100 episodes reached the target."""
        return solved(self.returns, self.target)

    def add(self, batch: Batch[Any], params: Params, stats: dict[str, float]) -> None:
        """Note a batch, the parameters after it, and what its update said."""
        self._batches += 1
        self.steps += batch.data["reward"].size
        self.seconds = time.monotonic() - self._began
        ended = batch.metrics.get("episode_return", np.empty(0)).tolist()
        self.returns += ended
        self._ended_at += [self.steps] * len(ended)
        self._params = params
        line = {
            "seconds": round(self.seconds, 4),
            "batch": self._batches,
            "steps": self.steps,
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "lag": int(batch.lag.max()),
            **stats,
        }
        self._metrics.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Write what is written at the end. Idempotent."""
        if self._metrics.closed:
            return
        self._metrics.close()
        if self._batches:
            np.savez(self.folder / "parameters.npz", **self._params)  # type: ignore[arg-type]
            self._draw()

    def _draw(self) -> None:
        # A figure of its own, without pyplot, needs no display and leaves no state behind.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self._ended_at, self.returns, ".", markersize=3, alpha=0.4, label="episode")
        sums = np.concatenate([[0.0], np.cumsum(self.returns)])
        count = np.minimum(np.arange(1, len(sums)), SOLVED_EPISODES)
        means = (sums[1:] - sums[np.arange(1, len(sums)) - count]) / count
        axes.plot(self._ended_at, means, label=f"mean of the last {SOLVED_EPISODES}")
        axes.axhline(self.target, color="grey", linestyle=":", label=f"target {self.target:g}")
        axes.set(title="CartPole-v1", xlabel="environment steps", ylabel="return")
        axes.legend(loc="lower right")
        figure.savefig(self.folder / "curve.png", dpi=120)


def _new_folder(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")
