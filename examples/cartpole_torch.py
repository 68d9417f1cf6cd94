"""CartPole with PPO in torch: workers collect with the newest parameters, this process trains.

python examples/cartpole_torch.py --workers 2
"""

import argparse
from collections import deque

import gymnasium
import numpy as np
import torch
from torch import nn

import paceline

STEPS, BATCH_SIZE = 256, 4
DISCOUNT, GAE_LAMBDA, CLIP, EPOCHS, MINIBATCH = 0.99, 0.95, 0.2, 8, 256


class Net(nn.Module):
    """Two small networks: a logit for each action, and the value of a state."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)  # the first policy is close to even odds

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.actor(obs)), self.critic(obs)[..., 0]


def rollouts(policy, worker):
    """What every worker runs: play on, each time with the newest parameters."""
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))
    net = Net()
    obs, _ = env.reset(seed=worker.seed)
    while True:
        policy.read_into(net)
        rollout, obs = play(env, net, obs, worker)
        yield rollout


@torch.no_grad()
def play(env, net, obs, worker):
    """Take `STEPS` steps; leaves are `[STEPS, ...]`."""
    steps = []
    for _ in range(STEPS):
        choice, _ = net(torch.from_numpy(obs))
        action = choice.sample()
        next_obs, reward, terminated, truncated, info = env.step(action.item())
        logp = choice.log_prob(action).item()
        steps.append((obs, next_obs, action.item(), logp, reward, terminated, truncated))
        obs = next_obs
        if terminated or truncated:
            worker.log(episode_return=info["episode"]["r"])
            obs, _ = env.reset()
    worker.log(steps=STEPS)
    names = "obs next_obs action logp reward terminated truncated".split()
    return dict(zip(names, map(np.array, zip(*steps, strict=True)), strict=True)), obs


def train_step(net, optimizer, data):
    """PPO on a batch of rollouts, `[n, STEPS, ...]`."""
    with torch.no_grad():
        value, next_value = net.critic(data["obs"])[..., 0], net.critic(data["next_obs"])[..., 0]
    advantage = advantages(data, value, next_value)
    target = (value + advantage).flatten()
    advantage = (advantage.flatten() - advantage.mean()) / (advantage.std() + 1e-8)
    obs, action, logp = (data[name].flatten(0, 1) for name in ("obs", "action", "logp"))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(obs)).split(MINIBATCH):
            choice, value = net(obs[rows])
            ratio = torch.exp(choice.log_prob(action[rows]) - logp[rows])
            gain = torch.minimum(
                ratio * advantage[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantage[rows]
            )
            loss = -gain.mean() + 0.5 * (value - target[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def advantages(data, value, next_value):
    """Generalised advantages; rewards are scaled so that values lie between 0 and 1."""
    going = ~data["terminated"] * next_value
    delta = (1 - DISCOUNT) * data["reward"].float() + DISCOUNT * going - value
    decay = DISCOUNT * GAE_LAMBDA * ~(data["terminated"] | data["truncated"])
    result, following = torch.empty_like(delta), torch.zeros(len(delta))
    for t in reversed(range(STEPS)):
        result[:, t] = following = delta[:, t] + decay[:, t] * following
    return result


def main(workers, engine, steps, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are slower on more
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    returns, taken = deque(maxlen=100), 0

    with paceline.Cluster(workers=workers, engine=engine, seed=seed) as cluster:
        policy = cluster.variable("policy", net)
        for batch in cluster.collect(rollouts, policy, batch_size=BATCH_SIZE, max_lag=1):
            train_step(net, optimizer, batch.to("torch").data)
            policy.assign(net)
            returns.extend(batch.metrics.get("episode_return", ()))
            taken += len(batch) * STEPS
            solved = len(returns) == 100 and np.mean(returns) >= 475
            if solved or taken >= steps:
                break

    how = "solved" if solved else "not solved"
    print(f"{how}: mean return {np.mean(returns):.1f} after {taken} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
