"""An evolution strategy with `cluster.map`: a car too weak for its hill learns to take a run-up.

A generation is one map over seeds. A worker draws the step that belongs to its seed, tries it there
and back from the centre, and answers with two returns; the chief draws the same steps again. So
what travels is seeds and returns. The centre is a variable: one copy in shared memory, which all
workers read.

    python examples/es_map.py --workers 2
"""

import argparse
import sys

import gymnasium
import numpy as np

import paceline

PAIRS, NOISE, RATE = 12, 0.25, 0.3
SCALE = np.array([1.0, 20.0])  # of positions and of speeds


def episode(weights, seed):
    """The return of one episode: 100 for the top, less the fuel."""
    env = gymnasium.make("MountainCarContinuous-v0")
    obs, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        push = np.tanh(weights[:2] @ (SCALE * obs) + weights[2])
        obs, reward, terminated, truncated, _ = env.step([push])
        total, done = total + reward, terminated or truncated
    return total


def step_of(seed):
    """The step away from the centre that a seed stands for."""
    return np.random.default_rng(seed).normal(0, NOISE, 3)


def there_and_back(seed, center):
    """What workers are called with: the returns on both sides of the centre."""
    weights, step = center.read().tree, step_of(seed)
    return episode(weights + step, seed), episode(weights - step, seed)


def at_center(seed, center):
    """The same without a step."""
    return episode(center.read().tree, seed)


def ranks(returns):
    """Ranks from -0.5 to 0.5 in place of returns: no single one outweighs the rest."""
    order = returns.argsort(axis=None).argsort()
    return (order / (returns.size - 1) - 0.5).reshape(returns.shape)


def main(workers, engine, generations, goal, seed):
    weights, rng = np.zeros(3), np.random.default_rng(seed)
    with paceline.Cluster(workers=workers, engine=engine, seed=seed) as cluster:
        center = cluster.variable("center", weights)
        for generation in range(1, generations + 1):
            seeds = rng.integers(1 << 32, size=PAIRS).tolist()
            returns = np.array(cluster.map(there_and_back, seeds, center))  # [PAIRS, 2]
            there, back = ranks(returns).T
            steps = np.array([step_of(each) for each in seeds])
            weights = weights + RATE / NOISE * (there - back) @ steps / PAIRS
            center.assign(weights)
            mean = np.mean(cluster.map(at_center, seeds, center))
            print(f"generation {generation}: mean return {mean:.1f}")
            if mean >= goal:
                break
    how = "solved" if mean >= goal else "not solved"
    print(f"{how}: mean return {mean:.1f} after {generation} generations")
    return 0 if mean >= goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--goal", type=float, default=90)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
