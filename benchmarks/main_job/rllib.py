"""RLlib: its PPO and its IMPALA, on the API that it makes by default.

The learner is in this process, which it is faster with where there is no GPU; `train()` returns
after each update of PPO, and every half second of IMPALA, whose updates overlap.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from report import Report


def configured(report: Report) -> Any:
    """The configuration of either."""
    job = report.job
    impala = report.name == "rllib_impala"
    config = (IMPALAConfig() if impala else PPOConfig()).environment(report.environment)
    config = config.env_runners(
        num_env_runners=job.workers,
        num_envs_per_env_runner=job.envs // job.workers,
        rollout_fragment_length=job.steps,
    )
    config = config.learners(num_learners=0)
    config = config.debugging(seed=report.seed, log_level="ERROR")
    config = config.reporting(
        min_time_s_per_iteration=0.5 if impala else 0,
        min_sample_timesteps_per_iteration=0,
        min_train_timesteps_per_iteration=0,
        metrics_num_episodes_for_smoothing=100,
    )
    config = config.rl_module(
        model_config=DefaultModelConfig(
            fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False
        )
    )
    training = {
        "lr": job.rate, "gamma": job.discount, "vf_loss_coeff": job.value,
        "entropy_coeff": job.entropy, "grad_clip": job.norm, "grad_clip_by": "global_norm",
        "train_batch_size_per_learner": job.samples,
    }  # fmt: skip
    if not impala:
        training |= {
            "lambda_": job.trace, "clip_param": job.clip, "num_epochs": job.epochs,
            "minibatch_size": job.minibatch, "use_kl_loss": False, "vf_clip_param": 1e6,
        }  # fmt: skip
    return config.training(**training)


def main() -> None:
    """Train until there is enough to report."""
    report = Report("rllib_ppo")
    ray.init(
        "local", num_cpus=report.job.workers + 2, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    algorithm = configured(report).build_algo()
    before, done = 0, False
    while not done:
        seen = algorithm.train()["env_runners"]
        steps = int(seen.get("num_env_steps_sampled_lifetime", 0))
        done = report.add(steps - before)
        before = steps
        episodes = int(seen.get("num_episodes_lifetime", 0))
        done = done or report.solved(float(seen.get("episode_return_mean", 0)), episodes)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    main()
