"""What is trained, and how: for each peer and environment the peer's own hyper-parameters.

Imported in the environment of each peer, so it needs the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GOALS = {"CartPole-v1": 475.0, "LunarLander-v3": 200.0}
"""The mean return of the last 100 episodes that counts as solved, for everyone."""


@dataclass(frozen=True)
class Job:
    """PPO, as all peers have it.

    The network is the same everywhere: two hidden layers of 64 with tanh for the policy, and two
    of their own for the value; Adam with `rate`.

    Attributes:
        envs: environments in all, of all processes together.
        steps: steps of each in a rollout;
        epochs, minibatch: passes over these samples, and how many of them make a step of Adam.
        discount, trace: gamma and lambda of generalised advantages.
        clip: of the ratio of probabilities.
        entropy, value: weights of these in the loss.
        norm: the gradient is scaled down to this length.
        workers: processes that collect, each in `envs / workers` environments.
        together: how many rollouts of workers make an update; all workers' where it is 0.
    """

    envs: int
    steps: int
    epochs: int
    minibatch: int
    rate: float
    discount: float
    trace: float
    clip: float
    entropy: float = 0.0
    value: float = 0.5
    norm: float = 0.5
    workers: int = 1
    together: int = 0

    @property
    def samples(self) -> int:
        """Steps that an update is made of."""
        return self.envs // self.workers * self.steps * (self.together or self.workers)


# RL Baselines3 Zoo, hyperparams/ppo.yml, but for the rates, which fall there to 0 in 100,000 steps.
CARTPOLE = Job(8, 32, 20, 256, 1e-3, 0.98, 0.8, 0.2)
LANDER = Job(16, 1024, 4, 64, 3e-4, 0.999, 0.98, 0.2, entropy=0.01)

JOBS: dict[str, dict[str, Job]] = {
    "CartPole-v1": {
        "paceline": CARTPOLE,
        "sb3": CARTPOLE,
        "sb3_subproc": CARTPOLE,
        "torchrl": Job(8, 64, 10, 256, 1e-3, 0.98, 0.8, 0.2, workers=2, together=1),
        "sample_factory": Job(16, 32, 2, 256, 1e-3, 0.98, 0.8, 0.2, workers=2),
        "rllib_ppo": Job(8, 64, 10, 128, 1e-3, 0.98, 0.8, 0.2, workers=2),
        "rllib_impala": Job(8, 64, 1, 512, 1e-3, 0.98, 1.0, 0.2, norm=40.0, workers=2),
        "tensorflow": Job(8, 32, 20, 256, 1e-3, 0.98, 0.8, 0.2, workers=2),
    },
    "LunarLander-v3": {
        **dict.fromkeys(("paceline", "sb3", "sb3_subproc"), LANDER),
        **dict.fromkeys(
            ("torchrl", "sample_factory", "rllib_ppo", "rllib_impala", "tensorflow"),
            replace(LANDER, workers=2),
        ),
    },
}
