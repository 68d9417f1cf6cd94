"""The same bits on every engine: a policy trained in lockstep, and the digest of what came out.

REINFORCE with a linear policy for CartPole. Each batch is a round: it begins when the chief asks
for it, worker after worker makes its items in turn, and all of them act with the parameters of that
moment. The functions draw from `worker.seed` only, and linear algebra uses one thread, so a seed
gives the same parameters to the last bit, with workers in this thread, in threads or in processes.

    python examples/lockstep.py --workers 3 --batches 20
"""

import argparse
import hashlib
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported

import gymnasium
import numpy as np

import paceline

EPISODES, STEP, DISCOUNT = 8, 0.05, 0.99


def play(policy, worker):
    """Episodes, of any length."""
    env, rng = gymnasium.make("CartPole-v1"), np.random.default_rng(worker.seed)
    obs, _ = env.reset(seed=worker.seed)
    while True:
        weights = policy.read().tree
        seen, taken, done = [], [], False
        while not done:
            seen.append(obs)
            taken.append(int(rng.random() < 1 / (1 + np.exp(-obs @ weights))))
            obs, _, terminated, truncated, _ = env.step(taken[-1])
            done = terminated or truncated
        obs, _ = env.reset()
        yield {"obs": np.array(seen, np.float64), "action": np.array(taken)}


def improved(weights, episodes):
    """The parameters after one step along the policy gradient."""
    to_go = []
    for episode in episodes:
        left = np.arange(len(episode["action"]), 0, -1)
        to_go.append((1 - DISCOUNT**left) / (1 - DISCOUNT))
    obs = np.concatenate([episode["obs"] for episode in episodes])
    action = np.concatenate([episode["action"] for episode in episodes])
    gain = np.concatenate(to_go)
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    return weights + STEP * obs.T @ (gain * (action - 1 / (1 + np.exp(-obs @ weights))))


def train(engine, args):
    """The mean return of the last batch, and the digest of the parameters after it."""
    weights = np.zeros(4)
    cluster = paceline.Cluster(args.workers, engine=engine, seed=args.seed, progress="quiet")
    with cluster:
        policy = cluster.variable("policy", weights)
        batches = cluster.collect(play, policy, batch_size=EPISODES, schedule="lockstep")
        for number, batch in enumerate(batches, 1):
            episodes = batch.items()
            weights = improved(weights, episodes)
            policy.assign(weights)
            if number == args.batches:
                break
    mean = np.mean([len(episode["action"]) for episode in episodes])
    return mean, hashlib.sha256(weights.tobytes()).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--engine",
        action="append",
        help="one of serial, threads, processes; may be repeated; all three if left out",
    )
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engines = args.engine or ["serial", "threads", "processes"]
    digests = {}
    for engine in engines:
        mean, digests[engine] = train(engine, args)
        print(f"{engine:<10} {digests[engine][:32]}  mean return {mean:.1f}")
    same = len(set(digests.values())) == 1
    print(f"{'the same' if same else 'other'} bits on {', '.join(digests)}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
