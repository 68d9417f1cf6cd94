"""The demo's actor-critic: its gradients, its rollouts, and that it learns whatever the seed."""

from collections import deque

import numpy as np
import pytest

from paceline.demo import policy
from paceline.demo.cartpole import BATCH_SIZE, Actor, solved
from paceline.demo.policy import DISCOUNT, GAE_LAMBDA, Array, Network, Params, Rollout


def balancing() -> Params:
    """Parameters that hold the pole up for 500 steps: a firm push to the side it falls to."""
    params = {key: np.zeros_like(array) for key, array in policy.init(0).items()}
    params["policy_w1"][:, 0] = [0.001, 0.003, 0.02, 0.01]
    params["policy_w2"][0] = 1e6
    return params


def stacked(rollouts: list[Rollout]) -> Rollout:
    return {name: np.stack([rollout[name] for rollout in rollouts]) for name in rollouts[0]}


def rewards(ends: dict[str, int], steps: int) -> Rollout:
    """One rollout with a reward of 1 for each step, and one end of the given kind."""
    flags = {name: np.zeros((1, steps), bool) for name in ("terminated", "truncated")}
    for name, step in ends.items():
        flags[name][0, step] = True
    return {"reward": np.ones((1, steps)), **flags}


def train(seed: int, *, lag: int, most_batches: int) -> int:
    """Train with two actors whose parameters are `lag` updates old; return the batches needed."""
    params, trainer = policy.init(seed), policy.Trainer(seed)
    held = deque([params], maxlen=lag + 1)
    actors = [Actor(1000 * seed + index) for index in range(2)]
    returns: list[float] = []
    for batch in range(most_batches):
        collected = [actors[item % 2].collect(held[0]) for item in range(BATCH_SIZE)]
        for _, ended in collected:
            returns += ended
        if solved(returns):
            return batch + 1
        params, _ = trainer.update(params, stacked([rollout for rollout, _ in collected]))
        held.append(params)
    pytest.fail(f"seed {seed}: last returns {returns[-10:]} after {most_batches} batches")


@pytest.mark.parametrize(("seed", "lag"), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_cartpole_is_solved_from_any_seed_with_data_up_to_two_versions_old(
    seed: int, lag: int
) -> None:
    assert train(seed, lag=lag, most_batches=120) >= 100 * 475 // 1024


def test_the_first_policy_is_close_to_even_odds() -> None:
    obs = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    logit, _ = policy.forward(policy.network(policy.init(0), "policy"), obs)
    assert np.abs(logit).max() < 0.1


def test_log_prob_is_that_of_a_coin_with_the_logit_as_its_log_odds() -> None:
    logit = np.array([0.0, np.log(3), np.log(3), 2000.0, 2000.0])
    action = np.array([1, 1, 0, 1, 0])
    expected = [np.log(0.5), np.log(0.75), np.log(0.25), 0, -2000]
    assert policy.log_prob(logit, action) == pytest.approx(expected)


def test_backward_agrees_with_finite_differences() -> None:
    rng = np.random.default_rng(0)
    net = Network(rng.normal(size=(4, 3)), rng.normal(size=3), rng.normal(size=3), np.ones(1))
    obs, slope = rng.normal(size=(5, 4)), rng.normal(size=5)
    gradient = policy.backward(net, obs, policy.forward(net, obs)[1], slope)
    for array, found in zip(net, gradient, strict=True):
        for index in np.ndindex(array.shape):
            change = difference(net, obs, slope, array, index)
            assert found[index] == pytest.approx(change, rel=1e-5, abs=1e-8)


def difference(
    net: Network, obs: Array, slope: Array, array: Array, index: tuple[int, ...]
) -> float:
    """Return how `slope @ output` changes with one weight, which is put back afterwards."""
    kept, step, losses = array[index], 1e-6, []
    for sign in (1, -1):
        array[index] = kept + sign * step
        losses.append(float(slope @ policy.forward(net, obs)[0]))
    array[index] = kept
    return (losses[0] - losses[1]) / (2 * step)


def test_the_policy_gradient_agrees_with_finite_differences_of_the_clipped_loss() -> None:
    rng = np.random.default_rng(0)
    logit, advantage = rng.normal(size=200), rng.normal(size=200)
    action = rng.integers(0, 2, 200)
    logp = policy.log_prob(logit + rng.normal(size=200), action)

    def losses(logit: Array) -> Array:
        ratio = np.exp(policy.log_prob(logit, action) - logp)
        clipped = np.clip(ratio, 1 - policy.CLIP, 1 + policy.CLIP)
        result: Array = -np.minimum(ratio * advantage, clipped * advantage) / len(logit)
        return result

    slope = (losses(logit + 1e-6) - losses(logit - 1e-6)) / 2e-6
    found = policy.policy_gradient(logit, action, logp, advantage)
    assert found == pytest.approx(slope, rel=1e-4, abs=1e-9)
    assert 0 < np.count_nonzero(found) < 200


@pytest.mark.parametrize(
    ("ends", "last_future"),
    [({"terminated": 1}, 0.0), ({"truncated": 1}, 0.5), ({}, 0.5)],
    ids=["terminated has no future", "truncated goes on", "the rollout ends"],
)
def test_what_follows_the_last_step_is_its_next_value_unless_it_terminated(
    ends: dict[str, int], last_future: float
) -> None:
    value, next_value = np.array([[0.3, 0.4]]), np.array([[0.4, 0.5]])
    last = (1 - DISCOUNT) + DISCOUNT * last_future - 0.4
    first = (1 - DISCOUNT) + DISCOUNT * 0.4 - 0.3 + DISCOUNT * GAE_LAMBDA * last
    found = policy.advantages(rewards(ends, 2), value, next_value)
    assert found == pytest.approx(np.array([[first, last]]))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_no_advantage_crosses_the_end_of_an_episode(end: str) -> None:
    zeros = np.zeros((1, 3))
    found = policy.advantages(rewards({end: 0}, 3), zeros, zeros)
    assert found[0, 0] == pytest.approx(1 - DISCOUNT)
    assert found[0, 1] > found[0, 0]


def test_an_update_returns_new_arrays_of_the_same_form_and_leaves_its_arguments() -> None:
    params = policy.init(0)
    batch = stacked([Actor(seed).collect(params)[0] for seed in range(2)])
    for array in (*params.values(), *batch.values()):
        array.flags.writeable = False
    updated, stats = policy.Trainer(0).update(params, batch)
    assert list(updated) == list(params)
    for key, array in updated.items():
        assert (array.shape, array.dtype.name) == (params[key].shape, "float32")
        assert not np.array_equal(array, params[key])
    assert stats["entropy"] == pytest.approx(np.log(2), abs=0.01)
    assert stats["value_error"] > 0


def test_the_same_seed_gives_the_same_rollout_and_update() -> None:
    params = policy.init(7)
    first, second = (Actor(7).collect(params)[0] for _ in range(2))
    for name, leaf in first.items():
        np.testing.assert_array_equal(leaf, second[name])
    one, two = (policy.Trainer(7).update(params, stacked([first]))[0] for _ in range(2))
    for key, array in one.items():
        np.testing.assert_array_equal(array, two[key])


def test_a_rollout_has_the_leaves_it_documents() -> None:
    rollout, _ = Actor(0).collect(policy.init(0), 7)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in rollout.items()} == {
        "obs": ((7, 4), "float32"),
        "next_obs": ((7, 4), "float32"),
        "action": ((7,), "int64"),
        "logp": ((7,), "float64"),
        "reward": ((7,), "float64"),
        "terminated": ((7,), "bool"),
        "truncated": ((7,), "bool"),
    }


def test_an_episode_goes_on_from_one_rollout_to_the_next() -> None:
    params, actor = policy.init(0), Actor(0)
    rollouts = [actor.collect(params, 100) for _ in range(5)]
    joined = {name: np.concatenate([r[name] for r, _ in rollouts]) for name in rollouts[0][0]}
    ended = np.flatnonzero(joined["terminated"])
    lengths = np.diff(ended, prepend=-1)
    assert [value for _, returns in rollouts for value in returns] == lengths.tolist()
    going = ~joined["terminated"][:-1]
    np.testing.assert_array_equal(joined["next_obs"][:-1][going], joined["obs"][1:][going])
    assert (joined["next_obs"][:-1] != joined["obs"][1:]).any(axis=1).sum() == (~going).sum()


def test_an_episode_is_truncated_not_terminated_at_500_steps() -> None:
    rollout, returns = Actor(0).collect(balancing(), 1001)
    assert returns == [500.0, 500.0]
    assert np.flatnonzero(rollout["truncated"]).tolist() == [499, 999]
    assert not rollout["terminated"].any()


def test_the_task_is_solved_at_a_mean_of_475_over_the_last_100_episodes() -> None:
    assert solved([0.0] + [475.0] * 100)
    assert not solved([500.0] + [475.0] * 99 + [474.0])
    assert not solved([500.0] * 99)
    assert not solved([])
