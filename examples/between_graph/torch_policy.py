"""A policy in PyTorch, trained by REINFORCE."""

import torch
from torch import nn


class Policy:
    """A network and its optimiser; `parameters` is what has the network's parameters."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.parameters = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self._optimizer = torch.optim.Adam(self.parameters.parameters(), lr=1e-2)

    @torch.no_grad()
    def choose(self, obs):
        """An action, drawn as the network says."""
        return self._choice(obs).sample()

    def train_step(self, data):
        """Raise the probability of actions that more reward than usual came after.

        The leaves of `data` are arrays `[items, STEPS, ...]`.
        """
        to_go = torch.from_numpy(data["to_go"])
        gain = (to_go - to_go.mean()) / (to_go.std() + 1e-8)
        likely = self._choice(data["obs"]).log_prob(torch.from_numpy(data["action"]))
        self._optimizer.zero_grad()
        (-likely * gain).mean().backward()
        self._optimizer.step()

    def _choice(self, obs):
        return torch.distributions.Categorical(logits=self.parameters(torch.from_numpy(obs)))
