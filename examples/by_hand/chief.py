"""The chief of a cluster by hand: initialises the weights, and ends when they are good."""

import numpy as np

import paceline

with paceline.Session.from_environment() as session:
    with session.device("ps:1"):
        weights = session.variable("weights", np.zeros(2))  # the workers wait for it
    losses = session.queue("losses", capacity=48)
    workers, loss = set(), np.inf
    while loss > 1e-6 or len(workers) < 3:
        batch = losses.dequeue_many(24, timeout=120)
        loss = batch.data["loss"].mean()
        workers |= set(batch.worker)
        print(f"loss {loss:.7f} of {', '.join(sorted(workers))}", flush=True)
    print(f"weights {weights.read().tree.round(2)}")
