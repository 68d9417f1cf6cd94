"""What workers run: environments, and the policy in NumPy; they need no torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from settings import Job

Arrays = dict[str, Any]

SIZES = {"CartPole-v1": (4, 2), "LunarLander-v3": (8, 4)}
"""How many numbers an observation has, and how many actions there are."""


class Actor:
    """Some environments that go on, from rollout to rollout, where the last one ended."""

    def __init__(self, environment: str, envs: int, job: Job, seed: int) -> None:
        self._envs = [gymnasium.make(environment, disable_env_checker=True) for _ in range(envs)]
        self._obs = np.stack([e.reset(seed=seed + n)[0] for n, e in enumerate(self._envs)])
        self._returns = [0.0] * envs
        self._random = np.random.default_rng(seed)
        self._job = job
        self._actions = SIZES[environment][1]

    def play(self, params: Arrays) -> tuple[Arrays, list[float]]:
        """Take `job.steps` steps in each; return what to train on, and the returns of episodes.

        Leaves are `[steps * envs, ...]`. Advantages are made with the values of `params`.
        """
        steps, envs = self._job.steps, len(self._envs)
        obs = np.empty((steps + 1, *self._obs.shape), np.float32)
        logits = np.empty((steps, envs, self._actions), np.float32)
        actions = np.empty((steps, envs), np.int64)
        rewards = np.zeros((steps, envs), np.float32)
        ended = np.zeros((steps, envs), bool)
        noise = self._random.gumbel(size=logits.shape).astype(np.float32)
        policy = layers(params, "policy")
        truncated: list[tuple[int, int, Any]] = []
        returns: list[float] = []
        obs[0] = self._obs
        for t in range(steps):
            logits[t] = forward(policy, obs[t])
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            actions[t] = (logits[t] + noise[t]).argmax(-1)
            for n, (env, action) in enumerate(zip(self._envs, actions[t].tolist(), strict=True)):
                after, reward, terminal, cut, _ = env.step(action)
                rewards[t, n] = reward
                self._returns[n] += float(reward)
                if terminal or cut:
                    if not terminal:
                        truncated.append((t, n, after))
                    ended[t, n] = True
                    returns.append(self._returns[n])
                    self._returns[n] = 0.0
                    after = env.reset()[0]
                obs[t + 1, n] = after
        self._obs = obs[-1]
        value = layers(params, "value")
        values = forward(value, obs)[..., 0]
        if truncated:
            t, n, last = zip(*truncated, strict=True)
            rewards[t, n] += self._job.discount * forward(value, np.stack(last))[:, 0]
        advantages = generalised(rewards, values, ended, self._job.discount, self._job.trace)
        chosen = np.take_along_axis(logits, actions[..., None], -1)[..., 0]
        made = {
            "obs": obs[:-1],
            "action": actions,
            "logp": chosen - np.logaddexp.reduce(logits, -1),
            "advantage": advantages,
            "target": advantages + values[:-1],
        }
        return {name: array.reshape(-1, *array.shape[2:]) for name, array in made.items()}, returns


def layers(params: Arrays, name: str) -> list[tuple[Any, Any]]:
    """The weights, for inputs on their left, and biases of a `torch.nn.Sequential`."""
    return [(params[f"{name}.{n}.weight"].T, params[f"{name}.{n}.bias"]) for n in (0, 2, 4)]


def forward(net: list[tuple[Any, Any]], x: Any) -> Any:
    """What torch computes: linear layers, and tanh between them."""
    for weight, bias in net[:-1]:
        x = np.tanh(x @ weight + bias)
    weight, bias = net[-1]
    return x @ weight + bias


def generalised(rewards: Any, values: Any, ended: Any, discount: float, trace: float) -> Any:
    """Generalised advantages (Schulman et al., 2015); leaves are `[steps, envs]`."""
    going = discount * ~ended
    delta = rewards + going * values[1:] - values[:-1]
    result, following = np.empty_like(delta), np.zeros(delta.shape[1], np.float32)
    for t in reversed(range(len(delta))):
        result[t] = following = delta[t] + trace * going[t] * following
    return result
