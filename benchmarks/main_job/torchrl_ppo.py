"""TorchRL: asynchronous collectors in processes of their own, and its losses of PPO.

An update takes the frames of one collector, whichever has them first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from report import Report
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def make(name: str, envs: int) -> Any:
    """The environments of one collector."""
    one = partial(GymEnv, name, categorical_action_encoding=True, device="cpu")
    return TransformedEnv(SerialEnv(envs, one), RewardSum())


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two layers of 64 with tanh, with orthogonal weights."""
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
    report = Report("torchrl")
    job = report.job
    torch.manual_seed(report.seed)
    torch.set_num_threads(1)
    env = GymEnv(report.environment, categorical_action_encoding=True)
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.n
    actor = ProbabilisticActor(
        TensorDictModule(mlp(inputs, actions, 0.01), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        distribution_kwargs={"validate_args": False},
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(inputs, 1, 1.0), in_keys=["observation"])
    advantages = GAE(gamma=job.discount, lmbda=job.trace, value_network=critic)
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=job.clip, entropy_bonus=bool(job.entropy),
        entropy_coeff=job.entropy, critic_coeff=job.value, loss_critic_type="l2",
        normalize_advantage=True,
    )  # fmt: skip
    params = list(loss.parameters())
    optimizer = torch.optim.Adam(params, lr=job.rate, eps=1e-5)
    collector = MultiAsyncCollector(
        [partial(make, report.environment, job.envs // job.workers)] * job.workers,
        actor, frames_per_batch=job.samples, total_frames=-1, device="cpu",
        update_at_each_batch=False, num_threads=1, trust_policy=True,
    )  # fmt: skip
    collector.set_seed(report.seed)
    for data in collector:
        if report.measure != "collect":
            with torch.no_grad():
                advantages(data)
            flat = data.reshape(-1)
            for _ in range(job.epochs):
                for rows in torch.randperm(len(flat)).split(job.minibatch):
                    losses = loss(flat[rows])
                    optimizer.zero_grad()
                    sum(v for k, v in losses.items() if k.startswith("loss_")).backward()
                    nn.utils.clip_grad_norm_(params, job.norm)
                    optimizer.step()
            collector.update_policy_weights_()
        over = data["next", "done"]
        if report.add(data.numel(), data["next", "episode_reward"][over].tolist()):
            break
    collector.shutdown()


if __name__ == "__main__":
    main()
