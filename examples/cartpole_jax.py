"""CartPole with PPO in JAX and optax: compiled functions act in the workers and train here.

python examples/cartpole_jax.py --workers 2
"""

import argparse
from collections import deque

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import paceline

STEPS, BATCH_SIZE = 128, 8
DISCOUNT, GAE_LAMBDA, CLIP, EPOCHS = 0.99, 0.95, 0.2, 16
OPTIMISER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


def init(seed):
    """Two small networks: `actor` gives a logit for each action, `critic` a value."""
    keys = iter(jax.random.split(jax.random.key(seed), 4))

    def network(outputs, scale):
        return {
            "w1": jax.random.normal(next(keys), (4, 32)) / 2,
            "b1": jnp.zeros(32),
            "w2": jax.random.normal(next(keys), (32, outputs)) * scale,
            "b2": jnp.zeros(outputs),
        }

    return {"actor": network(2, 0.001), "critic": network(1, 0.1)}


def forward(net, obs):
    return jnp.tanh(obs @ net["w1"] + net["b1"]) @ net["w2"] + net["b2"]


@jax.jit
def act(actor, obs, key):
    """An action, its log-probability, and the next key."""
    key, part = jax.random.split(key)
    logp = jax.nn.log_softmax(forward(actor, obs))
    action = jax.random.categorical(part, logp)
    return action, logp[action], key


def rollouts(policy, params, worker):
    """What every worker runs: play on, each time with the newest parameters."""
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    obs, _ = env.reset(seed=worker.seed)
    key = jax.random.key(worker.seed)
    while True:
        params = policy.read(like=params).tree  # a new tree: JAX's arrays never change
        rollout, obs, key = play(env, params["actor"], obs, key, worker)
        yield rollout


def play(env, actor, obs, key, worker):
    """Take `STEPS` steps; leaves are `[STEPS, ...]`."""
    steps = []
    for _ in range(STEPS):
        action, logp, key = act(actor, obs, key)
        next_obs, reward, terminated, truncated, info = env.step(int(action))
        steps.append((obs, next_obs, int(action), float(logp), reward, terminated, truncated))
        obs = next_obs
        if terminated or truncated:
            worker.log(episode_return=info["episode"]["r"])
            obs, _ = env.reset()
    worker.log(steps=STEPS)
    names = "obs next_obs action logp reward terminated truncated".split()
    rollout = dict(zip(names, map(np.array, zip(*steps, strict=True)), strict=True))
    return rollout, obs, key


@jax.jit
def train_step(params, state, data):
    """PPO on a batch of rollouts, `[n, STEPS, ...]`; parameters and optimiser state after it."""
    values = (forward(params["critic"], data[name])[..., 0] for name in ("obs", "next_obs"))
    advantage, target = advantages(data, *values)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def loss(params):
        logp = jax.nn.log_softmax(forward(params["actor"], data["obs"]))
        logp = jnp.take_along_axis(logp, data["action"][..., None], -1)[..., 0]
        ratio = jnp.exp(logp - data["logp"])
        gain = jnp.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage)
        value = forward(params["critic"], data["obs"])[..., 0]
        return -gain.mean() + 0.5 * jnp.square(value - target).mean()

    def epoch(carry, _):
        params, state = carry
        updates, state = OPTIMISER.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(epoch, (params, state), length=EPOCHS)[0]


def advantages(data, value, next_value):
    """Generalised advantages and value targets; rewards are scaled so that values are up to 1."""
    going = ~data["terminated"] * next_value
    delta = (1 - DISCOUNT) * data["reward"] + DISCOUNT * going - value
    decay = DISCOUNT * GAE_LAMBDA * ~(data["terminated"] | data["truncated"])

    def back(following, now):
        following = now[0] + now[1] * following
        return following, following

    _, result = jax.lax.scan(back, jnp.zeros(len(delta)), (delta.T, decay.T), reverse=True)
    return result.T, value + result.T


def main(workers, engine, steps, goal, seed):
    params = init(seed)
    state = OPTIMISER.init(params)
    returns, taken = deque(maxlen=50), 0

    with paceline.Cluster(workers=workers, engine=engine, seed=seed) as cluster:
        policy = cluster.variable("policy", params)
        for batch in cluster.collect(rollouts, policy, params, batch_size=BATCH_SIZE, max_lag=1):
            params, state = train_step(params, state, batch.to("jax").data)
            policy.assign(params)
            returns.extend(batch.metrics.get("episode_return", ()))
            taken += len(batch) * STEPS
            solved = len(returns) == 50 and np.mean(returns) >= goal
            if solved or taken >= steps:
                break

    how = "solved" if solved else "not solved"
    print(f"{how}: mean return {np.mean(returns):.1f} after {taken} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--goal", type=float, default=195)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
