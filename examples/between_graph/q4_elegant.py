"""The fourth question once more, as `collect` answers it: no server, no queue, no coordination.

The main program trains. The current model goes to the workers, what they collect comes back.

    python examples/between_graph/q4_elegant.py --workers 2
"""

import argparse
import os

from pole import GOAL, Pole, play
from together import shows
from torch_policy import Policy

import paceline

MOST_STEPS = 200


def rollouts(policy, worker):
    pole, mine = Pole(worker.seed), Policy(worker.seed)
    while True:
        policy.read_into(mine.parameters)
        yield {**play(pole, mine.choose), "process": os.getpid()}


def main(workers, seed):
    mine = Policy(seed)
    returns, makers, lag = [], {}, 0
    with paceline.Cluster(workers=workers, seed=seed, progress="quiet") as cluster:
        policy = cluster.variable("policy", mine.parameters)
        for batch in cluster.collect(rollouts, policy, batch_size=4, max_lag=1):
            mine.train_step(batch.data)
            policy.assign(mine.parameters)
            returns.append(batch.data["return"].mean())
            makers.update(zip(batch.worker, batch.data["process"].tolist(), strict=True))
            lag = max(lag, batch.lag.max())
            if returns[-1] >= GOAL or len(returns) == MOST_STEPS:
                break

    told = ", ".join(f"{worker} (process {makers[worker]})" for worker in sorted(makers))
    shows(
        os.getpid() not in makers.values(),
        f"the main program (process {os.getpid()}) has trained, collected have: {told}",
    )
    shows(lag <= 1, f"between making an item and training on it at most {lag} version was assigned")
    first, last = returns[0], returns[-1]
    shows(last >= GOAL, f"mean return {first:.1f} at first, {last:.1f} after {len(returns)} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
