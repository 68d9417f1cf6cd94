"""Rollouts of CartPole collected from workers, beside the same loops left to themselves.

Two workers on two cores leave none to the chief and the server, which the loops alone do not have;
one worker does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from measure import Effort, Figure, figure

import paceline
from paceline.demo import cartpole, policy

ONE_THREAD = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1")

LOOP = """
import sys
from paceline.demo import cartpole, policy
actor, params = cartpole.Actor(int(sys.argv[1])), policy.init(0)
actor.collect(params)
for line in sys.stdin:
    for _ in range(int(line)):
        actor.collect(params)
    print("done", flush=True)
"""


def rollouts(parameters: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    """The loop of `LOOP`, with the newest parameters, and handing in what it makes."""
    actor = cartpole.Actor(worker.seed)
    while True:
        yield actor.collect(parameters.read().tree)[0]


def measure(effort: Effort) -> Iterator[Figure]:
    """Steps per second of two workers and of one; the chief assigns after each batch."""
    for workers in (2, 1):
        what = f"CartPole with {workers} worker{'s' * (workers > 1)}, collected"
        yield figure(what, rounds(workers, effort), "the loops alone", "steps/s", ">= 0.9")


def rounds(workers: int, effort: Effort) -> list[tuple[float, float]]:
    """Steps per second of all workers, and of as many loops alone, in rounds of both."""
    batches = 2 if effort.quick else 60
    steps = batches * cartpole.BATCH_SIZE * cartpole.STEPS
    loops = [alone(seed) for seed in range(workers)]
    pairs = []
    params = policy.init(0)
    try:
        together(loops, 1)
        with paceline.Cluster(workers, progress="quiet") as cluster:
            variable = cluster.variable("policy", params)
            made = cluster.collect(rollouts, variable, batch_size=cartpole.BATCH_SIZE)

            def take(count: int) -> None:
                for _ in range(count):
                    made.next()
                    variable.assign(params)

            for _ in range(effort.rounds):
                # Those that were made ahead do not count, nor those that are at the end.
                take(2)
                began = time.perf_counter()
                take(batches)
                collected = steps / (time.perf_counter() - began)
                while made.stats()["running"]:
                    time.sleep(0.001)
                began = time.perf_counter()
                together(loops, batches * cartpole.BATCH_SIZE // workers)
                pairs.append((collected, steps / (time.perf_counter() - began)))
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()
    return pairs


def alone(seed: int) -> subprocess.Popen[str]:
    """Start a loop of its own; it plays as many rollouts as it is told, once it is ready."""
    return subprocess.Popen(
        [sys.executable, "-c", LOOP, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
    )


def together(loops: list[subprocess.Popen[str]], count: int) -> None:
    """Let each play `count` rollouts; returns when all have."""
    for loop in loops:
        assert loop.stdin is not None
        loop.stdin.write(f"{count}\n")
        loop.stdin.flush()
    for loop in loops:
        assert loop.stdout is not None
        assert loop.stdout.readline() == "done\n"
