"""The demo's two loops: what every worker runs, and what the chief does with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline import Cluster, Variable, Worker
from paceline.demo.cartpole import BATCH_SIZE, STEPS, Actor
from paceline.demo.policy import Params, Rollout, Trainer, init
from paceline.demo.record import Record
from paceline.progress import Mode

SAVE_EVERY = 0.5
"""Seconds from one checkpoint to the next: it is solved within a few."""


def rollouts(policy: Variable[Params], worker: Worker) -> Iterator[Rollout]:
    """Play on, each time with the newest parameters; runs in every worker."""
    actor = Actor(worker.seed)
    while True:
        rollout, returns = actor.collect(policy.read().tree)
        worker.log(steps=STEPS)
        for episode_return in returns:
            worker.log(episode_return=episode_return)
        yield rollout


def train(
    record: Record,
    *,
    workers: int,
    seed: int,
    engine: str,
    progress: Mode,
    budget_steps: int,
    checkpoint: Path | None = None,
) -> None:
    """Train until the task is solved or `budget_steps` steps were taken; `record` has the rest.

    With a `checkpoint` it goes on from what was saved there, and saves there.
    """
    params, trainer = init(seed), Trainer(seed)
    with Cluster(
        workers,
        engine=engine,
        seed=seed,
        progress=progress,
        checkpoint=checkpoint,
        save_every=SAVE_EVERY,
    ) as cluster:
        # All that belongs together is in one variable, and so in one version of it.
        learner = cluster.variable("learner", {"params": params, **trainer.state(params)})
        steps = cluster.counter("steps")
        saved = learner.read().tree
        params, record.steps = saved["params"], steps.value
        trainer.go_on(saved)
        policy = cluster.variable("policy", params, overwrite=True)
        for batch in cluster.collect(rollouts, policy, batch_size=BATCH_SIZE):
            params, stats = trainer.update(params, batch.data)
            policy.assign(params)
            record.add(batch, params, stats)
            if checkpoint is not None:
                learner.assign({"params": params, **trainer.state(params)})
                steps.add(batch.data["reward"].size)
            if record.solved or record.steps >= budget_steps:
                break
