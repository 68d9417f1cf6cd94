"""The fourth question once more, as `collect` answers it: no server, no queue, no coordination.

The main program trains. The current model goes to the workers, what they collect comes back.

    python examples/between_graph/q4_elegant.py
"""

import argparse
import os

import torch
from pole import GOAL, make_env, make_net, make_optimizer, play, sampled, train_step
from together import shows

import paceline


def rollouts(policy, worker):
    env, net = make_env(worker.seed % 2**31), make_net()
    while True:
        policy.read_into(net)
        yield {**play(env, sampled(net)), "process": os.getpid()}


def main(workers, seed):
    torch.manual_seed(seed)
    net = make_net()
    optimizer = make_optimizer(net)
    returns, makers, lag = [], {}, 0
    with paceline.Cluster(workers=workers, seed=seed, progress="quiet") as cluster:
        policy = cluster.variable("policy", net)
        for batch in cluster.collect(rollouts, policy, batch_size=4, max_lag=1):
            train_step(net, optimizer, batch.data)
            policy.assign(net)
            returns.append(batch.data["return"].mean())
            makers.update(zip(batch.worker, batch.data["process"].tolist(), strict=True))
            lag = max(lag, batch.lag.max())
            if returns[-1] >= GOAL or len(returns) == 200:
                break
    told = ", ".join(f"{worker} (process {makers[worker]})" for worker in sorted(makers))
    shows(
        os.getpid() not in makers.values(),
        f"process {os.getpid()} has trained; {told} have collected",
    )
    shows(lag <= 1, f"between making an item and training on it at most {lag} version was assigned")
    shows(
        returns[-1] >= GOAL,
        f"mean return {returns[0]:.1f} at first, {returns[-1]:.1f} after {len(returns)} steps",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
