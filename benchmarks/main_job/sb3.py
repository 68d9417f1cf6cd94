"""Stable-Baselines3: its PPO, with environments in this process or each in its own.

The network is `MlpPolicy` as it is; one thread of torch, which it is faster with when networks are
small.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from report import Report
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv


class Count(BaseCallback):
    """Tells the report of each step; returning False ends the training."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def _on_step(self) -> bool:
        infos: list[Any] = self.locals["infos"]
        returns = [info["episode"]["r"] for info in infos if "episode" in info]
        return not self._report.add(len(infos), returns)


class Collecting(PPO):
    """Collects and does not train."""

    def train(self) -> None:
        """Nothing."""


def main() -> None:
    """Train until there is enough to report."""
    report = Report("sb3")
    job = report.job
    torch.set_num_threads(1)
    envs = make_vec_env(
        report.environment,
        job.envs,
        report.seed,
        env_kwargs={"disable_env_checker": True},
        vec_env_cls=SubprocVecEnv if report.name == "sb3_subproc" else DummyVecEnv,
    )
    model = (Collecting if report.measure == "collect" else PPO)(
        "MlpPolicy",
        envs,
        learning_rate=job.rate,
        n_steps=job.steps,
        batch_size=job.minibatch,
        n_epochs=job.epochs,
        gamma=job.discount,
        gae_lambda=job.trace,
        clip_range=job.clip,
        ent_coef=job.entropy,
        vf_coef=job.value,
        max_grad_norm=job.norm,
        seed=report.seed,
        device="cpu",
    )
    model.learn(sys.maxsize, callback=Count(report))
    envs.close()


if __name__ == "__main__":
    main()
