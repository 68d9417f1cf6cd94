"""Sample Factory: its APPO, asynchronous, as its `sf_examples/train_gym_env.py` runs CartPole.

Both halves of the network have layers of their own, as everywhere here. Inputs and returns are not
normalised, which nobody else does. What it writes for TensorBoard goes to a folder that is removed.
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium
from report import Report
from sample_factory.algo.utils.misc import EPISODIC, LEARNER_ENV_STEPS
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

# Gymnasium 0.29, which it is pinned to, has the one before, which differs by how wind is drawn.
NAMES = {"LunarLander-v3": "LunarLander-v2"}


def make(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    """An environment, of any process."""
    return gymnasium.make(NAMES.get(name, name), disable_env_checker=True)


def main() -> None:
    """Train until there is enough to report."""
    report = Report("sample_factory")
    job = report.job
    register_env(report.environment, make)
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "algo": "APPO", "env": report.environment, "experiment": "main_job",
            "train_dir": folder, "seed": report.seed, "device": "cpu", "use_rnn": False,
            "num_workers": job.workers, "num_envs_per_worker": job.envs // job.workers,
            "rollout": job.steps, "recurrence": 1, "batch_size": job.minibatch,
            "num_batches_per_epoch": job.samples // job.minibatch, "num_epochs": job.epochs,
            "learning_rate": job.rate, "gamma": job.discount, "gae_lambda": job.trace,
            "ppo_clip_ratio": job.clip, "ppo_clip_value": 1000.0, "max_grad_norm": job.norm,
            "exploration_loss_coeff": job.entropy, "value_loss_coeff": job.value,
            "adam_eps": 1e-5, "with_vtrace": False, "normalize_input": False,
            "normalize_returns": False, "reward_scale": 1.0, "encoder_mlp_layers": "64 64",
            "nonlinearity": "tanh", "actor_critic_share_weights": False,
            "force_envs_single_thread": True, "experiment_summaries_interval": 60,
            "save_every_sec": 10000, "save_best_every_sec": 10000, "with_wandb": False,
        }  # fmt: skip
        words = [w for name, value in wanted.items() for w in (f"--{name}", *str(value).split())]
        parser, _ = parse_sf_args(argv=words)
        _, runner = make_runner(parse_full_cfg(parser, words))
        returns: list[float] = []
        had = [0]

        def episodes(runner: Any, message: dict[str, Any], policy: int) -> None:
            returns.append(message[EPISODIC]["reward"])

        def trained(runner: Any, message: dict[str, Any], policy: int) -> None:
            steps, had[0] = message[LEARNER_ENV_STEPS] - had[0], message[LEARNER_ENV_STEPS]
            if report.add(steps, returns):
                runner.cfg.train_for_env_steps = 0
            returns.clear()

        runner.policy_msg_handlers[EPISODIC].append(episodes)
        runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(trained)
        runner.init()
        runner.run()


if __name__ == "__main__":
    main()
