"""What is learned in the fourth question: CartPole, by REINFORCE, in PyTorch."""

import gymnasium
import numpy as np
import torch
from torch import nn

STEPS, GOAL = 256, 100.0
"""Steps in an item, and the mean return that counts as learned; random play has about 20."""


def make_env(seed):
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    return env


def make_net():
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


def make_optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-2)


def play(env, choose):
    """Take `STEPS` steps, the action of each chosen by `choose(obs)`; leaves are `[STEPS, ...]`.

    `return` is the mean return of the episodes that ended on the way.
    """
    obs, action, to_go, reward, returns = [], [], [], 0, []
    now, _ = env.reset()
    while len(obs) < STEPS:
        obs.append(now)
        action.append(int(choose(now)))
        now, _, terminated, truncated, _ = env.step(action[-1])
        reward += 1  # CartPole gives a reward of 1 for each step
        if terminated or truncated or len(obs) == STEPS:
            to_go += range(reward, 0, -1)
            returns.append(reward)
            now, reward = env.reset()[0], 0
    gain = np.array(to_go, np.float32)
    return {
        "obs": np.array(obs),
        "action": np.array(action),
        "to_go": gain,
        # The last episode was cut off, unless it is the only one.
        "return": float(np.mean(returns[:-1] or returns)),
    }


def sampled(net):
    """Actions drawn as the network says."""

    @torch.no_grad()
    def choose(obs):
        return torch.distributions.Categorical(logits=net(torch.from_numpy(obs))).sample()

    return choose


def train_step(net, optimizer, data):
    """Raise the probability of actions that more reward than usual came after.

    The leaves of `data` are arrays `[items, STEPS, ...]`.
    """
    to_go = torch.from_numpy(data["to_go"])
    gain = (to_go - to_go.mean()) / (to_go.std() + 1e-8)
    choice = torch.distributions.Categorical(logits=net(torch.from_numpy(data["obs"])))
    loss = -(choice.log_prob(torch.from_numpy(data["action"])) * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
