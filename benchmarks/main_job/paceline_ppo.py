"""paceline: workers play, this process trains; PPO with the hyper-parameters of a peer.

python benchmarks/main_job/paceline_ppo.py --job sb3 --measure solve
"""

from __future__ import annotations

from typing import Any

import torch
from acting import SIZES, Actor
from report import Report
from torch import nn

import paceline


class Net(nn.Module):
    """The policy and the value of a state, each with hidden layers of its own."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.policy, self.value = mlp(inputs, actions, 0.01), mlp(inputs, 1, 1.0)


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two layers of 64 with tanh, with orthogonal weights as the peers begin with."""
    sizes = [(inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, gain)]
    made: list[nn.Module] = []
    for size_in, size_out, scale in sizes:
        linear = nn.Linear(size_in, size_out)
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.zeros_(linear.bias)
        made += [linear, nn.Tanh()]
    return nn.Sequential(*made[:-1])


def main() -> None:
    """Train until there is enough to report."""
    report = Report()
    job, environment = report.job, report.environment
    torch.manual_seed(report.seed)
    torch.set_num_threads(1)  # networks this small are slower on more
    net = Net(*SIZES[environment])
    optimizer = torch.optim.Adam(net.parameters(), lr=job.rate, eps=1e-5, foreach=True)

    def rollouts(policy: paceline.Variable[Any], worker: paceline.Worker) -> Any:
        actor = Actor(environment, job.envs // job.workers, job, worker.seed)
        while True:
            rollout, returns = actor.play(policy.read().tree)
            for value in returns:
                worker.log(episode_return=value)
            yield rollout

    with paceline.Cluster(job.workers, seed=report.seed, progress="quiet") as cluster:
        policy = cluster.variable("policy", net)
        for batch in cluster.collect(
            rollouts, policy, batch_size=job.together or job.workers, max_lag=1
        ):
            if report.measure != "collect":
                data = batch.to("torch").data
                train(net, optimizer, {k: v.flatten(0, 1) for k, v in data.items()}, job)
                policy.assign(net)
            if report.add(job.samples, batch.metrics.get("episode_return", ())):
                break


def train(net: Net, optimizer: torch.optim.Optimizer, data: dict[str, Any], job: Any) -> None:
    """PPO on samples `[n, ...]` (Schulman et al., 2017)."""
    params = list(net.parameters())
    for _ in range(job.epochs):
        for rows in torch.randperm(len(data["obs"])).split(job.minibatch):
            obs, action, logp, advantage, target = (
                data[name][rows] for name in ("obs", "action", "logp", "advantage", "target")
            )
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            logits = torch.log_softmax(net.policy(obs), -1)
            ratio = torch.exp(logits.gather(1, action[:, None])[:, 0] - logp)
            clipped = ratio.clamp(1 - job.clip, 1 + job.clip)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            loss = loss + job.value * (net.value(obs)[:, 0] - target).square().mean()
            if job.entropy:
                loss = loss + job.entropy * (logits.exp() * logits).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(params, job.norm)
            optimizer.step()


if __name__ == "__main__":
    main()
