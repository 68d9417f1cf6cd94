"""An actor-critic for two actions in NumPy, trained by PPO (Schulman et al., 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Params: TypeAlias = dict[str, Array]
Rollout: TypeAlias = dict[str, Array]

OBSERVATION = 4
HIDDEN = 32
DISCOUNT = 0.99
GAE_LAMBDA = 0.95
LEARNING_RATE = 3e-3
CLIP = 0.2
EPOCHS = 8
MINIBATCH = 256


class Network(NamedTuple):
    """The weights of one tanh layer and one linear output."""

    w1: Array
    b1: Array
    w2: Array
    b2: Array


def init(seed: int) -> Params:
    """Draw the first parameters: `policy_*` gives a logit, `value_*` a value; all float32."""
    rng = np.random.default_rng(seed)
    params: Params = {}
    # A small last layer starts the policy near even odds, whatever the seed.
    for name, scale in (("policy", 0.01), ("value", 0.1)):
        params[f"{name}_w1"] = rng.normal(0, 1 / math.sqrt(OBSERVATION), (OBSERVATION, HIDDEN))
        params[f"{name}_b1"] = np.zeros(HIDDEN)
        params[f"{name}_w2"] = rng.normal(0, scale / math.sqrt(HIDDEN), HIDDEN)
        params[f"{name}_b2"] = np.zeros(1)
    return {key: array.astype(np.float32) for key, array in params.items()}


def network(params: Params, name: str) -> Network:
    """Return the arrays of network `name`, `policy` or `value`, without a copy."""
    return Network(*(params[f"{name}_{field}"] for field in Network._fields))


def forward(net: Network, obs: Array) -> tuple[Array, Array]:
    """Return outputs `[*n]` and hidden layers `[*n, 32]` of `obs[*n, 4]`; `obs[4]` gives `[1]`."""
    hidden = np.tanh(obs @ net.w1 + net.b1)
    return hidden @ net.w2 + net.b2, hidden


def backward(net: Network, obs: Array, hidden: Array, d_output: Array) -> Network:
    """Return the gradient of a loss whose gradient by the output `[n]` is `d_output[n]`."""
    d_hidden = np.outer(d_output, net.w2) * (1 - hidden**2)
    return Network(
        obs.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_output, d_output.sum(keepdims=True)
    )


def log_prob(logit: Array, action: Array) -> Array:
    """Return the log-probability of each action, 0 or 1, where 1 has odds `exp(logit)`."""
    result: Array = -np.logaddexp(0, np.where(action == 1, -logit, logit))
    return result


def advantages(rollout: Rollout, value: Array, next_value: Array) -> Array:
    """Estimate advantages `[n, T]` by GAE (Schulman et al., 2015).

    Rewards are scaled by `1 - DISCOUNT`, so that values lie between 0 and 1. A terminated step
    has no future; a truncated one, and the last of a rollout, has `next_value` as its future.
    """
    future = DISCOUNT * ~rollout["terminated"] * next_value
    delta = (1 - DISCOUNT) * rollout["reward"] + future - value
    decay = DISCOUNT * GAE_LAMBDA * ~(rollout["terminated"] | rollout["truncated"])
    result, following = np.empty_like(delta), np.zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        result[:, t] = following = delta[:, t] + decay[:, t] * following
    return result


def policy_gradient(logit: Array, action: Array, logp: Array, advantage: Array) -> Array:
    """Return the gradient by `logit[n]` of the mean clipped loss `-min(r A, clip(r) A)`.

    `r` is the probability of `action` now over `exp(logp)`, the one it was drawn with.
    """
    ratio = np.exp(log_prob(logit, action) - logp)
    # Past the clip on the side that the advantage favours, the loss is flat.
    inside = np.where(advantage > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
    probability = np.exp(log_prob(logit, np.ones_like(action)))
    gradient: Array = -advantage * ratio * inside * (action - probability) / len(logit)
    return gradient


@final
class Trainer:
    """PPO on batches of rollouts; it holds the moments of Adam (Kingma and Ba, 2015).

    `state` is all that it needs to go on beside its random numbers, as a tree that may travel.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._mean: Params = {}
        self._square: Params = {}
        self._count = 0

    def state(self, params: Params) -> dict[str, Any]:
        """What `params`, and all before them, have left here."""
        zero = {key: np.zeros(array.shape) for key, array in params.items()}
        return {"count": self._count, "mean": zero | self._mean, "square": zero | self._square}

    def go_on(self, state: dict[str, Any]) -> None:
        """Be as the trainer that had that state."""
        self._count, self._mean, self._square = state["count"], state["mean"], state["square"]

    def update(self, params: Params, batch: Rollout) -> tuple[Params, dict[str, float]]:
        """Return new parameters, and the batch's mean `entropy` and `value_error`.

        The leaves of `batch` are `[n, T, ...]`: `n` rollouts of `cartpole.Actor`. They may have
        been collected with parameters older than `params`. `params` itself is left unchanged.
        """
        value = forward(network(params, "value"), batch["obs"])[0]
        next_value = forward(network(params, "value"), batch["next_obs"])[0]
        advantage = advantages(batch, value, next_value)
        target = (value + advantage).ravel()
        stats = {
            "entropy": float(-batch["logp"].mean()),
            "value_error": float(np.abs(advantage).mean()),
        }
        advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).ravel()
        obs = batch["obs"].reshape(-1, OBSERVATION)
        action, logp = batch["action"].ravel(), batch["logp"].ravel()
        for rows in self._minibatches(len(obs)):
            net, x = network(params, "policy"), obs[rows]
            logit, hidden = forward(net, x)
            slope = policy_gradient(logit, action[rows], logp[rows], advantage[rows])
            policy = backward(net, x, hidden, slope)
            net = network(params, "value")
            value, hidden = forward(net, x)
            critic = backward(net, x, hidden, (value - target[rows]) / len(x))
            params = self._adam(params, {"policy": policy, "value": critic})
        return params, stats

    def _minibatches(self, size: int) -> Iterator[Array]:
        for _ in range(EPOCHS):
            order = self._rng.permutation(size)
            yield from (order[i : i + MINIBATCH] for i in range(0, size, MINIBATCH))

    def _adam(self, params: Params, gradients: dict[str, Network]) -> Params:
        self._count += 1
        rate = LEARNING_RATE * math.sqrt(1 - 0.999**self._count) / (1 - 0.9**self._count)
        result: Params = {}
        for name, gradient in gradients.items():
            for field, slope in gradient._asdict().items():
                key = f"{name}_{field}"
                mean = 0.9 * self._mean.get(key, 0) + 0.1 * slope
                square = 0.999 * self._square.get(key, 0) + 0.001 * slope**2
                self._mean[key], self._square[key] = mean, square
                step = rate * mean / (np.sqrt(square) + 1e-8)
                result[key] = (params[key] - step).astype(np.float32)
        return result
