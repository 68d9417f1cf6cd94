"""Settings of the environment that change in mid-run: CartPole with gravity that grows.

A second variable holds the settings. Workers read it before each item, as they read the policy; the
chief assigns it whenever the policy is good enough for more. Each item says which gravity it was
made with, so the output shows when a change arrives. Items are stamped with the policy's version
alone: a change of the settings makes nothing stale. The learning is a random search over a linear
policy.

    python examples/settings.py --workers 2
"""

import argparse

import gymnasium
import numpy as np

import paceline

GRAVITY = [9.8, 15.0, 22.0]
DIRECTIONS, NOISE, STEP, BATCH_SIZE = 8, 0.5, 0.5, 2


def explore(policy, settings, worker):
    """What every worker runs: try steps away from the policy, there and back."""
    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(worker.seed)
    env.reset(seed=worker.seed)
    while True:
        weights, gravity = policy.read().tree, settings.read().tree["gravity"]
        env.unwrapped.gravity = gravity
        steps = rng.normal(0, NOISE, (DIRECTIONS, 4))
        there = np.array([episode(env, weights + step) for step in steps])
        back = np.array([episode(env, weights - step) for step in steps])
        worker.log(steps=there.sum() + back.sum(), episode_return=(there.mean() + back.mean()) / 2)
        yield {"steps": steps, "there": there, "back": back, "gravity": gravity}


def episode(env, weights):
    """The return of one episode."""
    obs, _ = env.reset()
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(int(obs @ weights > 0))
        total, done = total + reward, terminated or truncated
    return total


def improved(weights, data):
    """The policy after a step towards where returns were larger."""
    gain = data["there"] - data["back"]
    spread = np.concatenate([data["there"], data["back"]]).std() + 1e-8
    return weights + STEP / NOISE * np.tensordot(gain, data["steps"], 2) / (gain.size * spread)


def main(workers, engine, batches, goal, seed):
    weights, level, seen = np.zeros(4), 0, None
    with paceline.Cluster(workers=workers, engine=engine, seed=seed) as cluster:
        policy = cluster.variable("policy", weights)
        settings = cluster.variable("settings", {"gravity": GRAVITY[level]})
        collection = cluster.collect(
            explore, policy, settings, batch_size=BATCH_SIZE, version_of=policy
        )
        for number, batch in enumerate(collection, 1):
            weights = improved(weights, batch.data)
            policy.assign(weights)
            gravity = batch.data["gravity"]
            if gravity.max() != seen:
                seen = gravity.max()
                print(f"batch {number}: the first item made with gravity {seen}")
            # A batch may have items from before a change and after it.
            rows = gravity == GRAVITY[level]
            mean = (
                np.mean([batch.data["there"][rows], batch.data["back"][rows]]) if any(rows) else 0
            )
            solved = all(rows) and mean >= goal and level == len(GRAVITY) - 1
            if solved or number == batches:
                break
            if all(rows) and mean >= goal:
                level += 1
                settings.assign({"gravity": GRAVITY[level]})
                print(
                    f"batch {number}: mean return {mean:.1f}, so gravity becomes {GRAVITY[level]}"
                )
    how = "solved" if solved else "not solved"
    print(f"{how}: mean return {mean:.1f} with gravity {GRAVITY[level]} after {number} batches")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--goal", type=float, default=450)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
