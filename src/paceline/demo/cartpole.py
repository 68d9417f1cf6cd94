"""CartPole-v1, played with the policy of `policy.py`: the part of the demo that workers run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import final

import numpy as np

from paceline.demo.policy import Array, Params, Rollout, forward, log_prob, network

STEPS = 256
BATCH_SIZE = 4
SOLVED_RETURN = 475.0
SOLVED_EPISODES = 100


@final
class Actor:
    """One CartPole-v1 that goes on, from rollout to rollout, where the last one ended."""

    def __init__(self, seed: int) -> None:
        import gymnasium

        self._env = gymnasium.make("CartPole-v1")
        self._random = random.Random(seed)
        self._obs: Array = self._env.reset(seed=seed)[0]
        self._return = 0.0

    def collect(self, params: Params, steps: int = STEPS) -> tuple[Rollout, list[float]]:
        """Take `steps` steps; return them, and the returns of the episodes that ended in them.

        Leaves are `[steps, ...]`: `obs` and `next_obs` float32 `[4]`, `action` int64, `logp` (of
        the action) and `reward` float64, `terminated` and `truncated` bool. Where an episode
        ended, `next_obs` is its last observation and the `obs` that follows starts a new one.
        """
        net, taken, returns = network(params, "policy"), [], []
        for _ in range(steps):
            obs, logit = self._obs, forward(net, self._obs)[0].item()
            # The sigmoid of the logit, in a form that cannot overflow.
            action = int(self._random.random() < 0.5 + 0.5 * math.tanh(0.5 * logit))
            self._obs, reward, terminated, truncated, _ = self._env.step(action)
            taken.append((obs, self._obs, logit, action, float(reward), terminated, truncated))
            self._return += float(reward)
            if terminated or truncated:
                returns.append(self._return)
                self._obs, self._return = self._env.reset()[0], 0.0
        names = ("obs", "next_obs", "logit", "action", "reward", "terminated", "truncated")
        rollout = dict(zip(names, map(np.array, zip(*taken, strict=True)), strict=True))
        rollout["logp"] = log_prob(rollout.pop("logit"), rollout["action"])
        return rollout, returns


def solved(returns: Sequence[float], target: float = SOLVED_RETURN) -> bool:
    """Say whether the last 100 of `returns` exist and have a mean of `target` or more."""
    last = returns[-SOLVED_EPISODES:]
    return len(last) == SOLVED_EPISODES and sum(last) / SOLVED_EPISODES >= target
