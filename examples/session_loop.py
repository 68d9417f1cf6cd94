"""The bare session loop: a variable and a queue, and nothing that collects for you.

Workers wait for each new version of the policy, play with it and enqueue what happened; the chief
takes as many items as there are workers and assigns the next version. The learning is a random
search over a linear policy for CartPole. The workers are threads that share a private session; with
a session on a cluster, the two loops are the same.

    python examples/session_loop.py --workers 2
"""

import argparse
import threading

import gymnasium
import numpy as np

import paceline

DIRECTIONS, NOISE, STEP = 8, 0.5, 0.5


def work(session, seed):
    """A worker's loop."""
    policy, experience = session.variable("policy"), session.queue("experience")
    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(seed)
    env.reset(seed=seed)
    version = None
    try:
        while True:
            snapshot = policy.read(newer_than=version, timeout=60)
            version = snapshot.version
            item = explore(env, rng, snapshot.tree)
            experience.enqueue(item, version=version, timeout=60)
    except paceline.Closed:
        return  # the chief has closed the session


def explore(env, rng, weights):
    """Try steps away from the policy, there and back; leaves are `[DIRECTIONS, ...]`."""
    steps = rng.normal(0, NOISE, (DIRECTIONS, 4))
    there = np.array([episode(env, weights + step) for step in steps])
    back = np.array([episode(env, weights - step) for step in steps])
    return {"steps": steps, "there": there, "back": back}


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


def main(workers, steps, seed):
    weights, taken = np.zeros(4), 0
    with paceline.Session() as session:
        policy = session.variable("policy", weights)
        experience = session.queue("experience", capacity=workers)
        seeds = np.random.SeedSequence(seed).generate_state(workers).tolist()
        threads = [threading.Thread(target=work, args=(session, each)) for each in seeds]
        for thread in threads:
            thread.start()
        while taken < steps:
            batch = experience.dequeue_many(workers, timeout=60)
            weights = improved(weights, batch.data)
            policy.assign(weights)
            returns = np.concatenate([batch.data["there"], batch.data["back"]])
            taken += int(returns.sum())  # CartPole gives a reward of 1 for each step
            if returns.mean() >= 475:
                break
    for thread in threads:
        thread.join()
    how = "solved" if returns.mean() >= 475 else "not solved"
    print(f"{how}: mean return {returns.mean():.1f} after {taken} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
