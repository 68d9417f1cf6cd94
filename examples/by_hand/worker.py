"""A worker of a cluster by hand: adds its gradients to the weights, and says its loss."""

import numpy as np

import paceline

WANTED = np.array([2.0, -3.0])

with paceline.Session.from_environment() as session:
    weights = session.variable("weights")  # waits until somebody has initialised it
    losses = session.queue("losses")
    rng = np.random.default_rng()
    steps = 0
    try:
        while not session.should_stop():
            x = rng.normal(size=(32, 2))
            error = x @ (weights.read().tree - WANTED)
            weights.assign_add(-0.05 * x.T @ error / 32)
            losses.enqueue({"loss": error @ error / 32})
            steps += 1
    except paceline.Closed:
        pass  # the chief has left while this one waited
    print(f"{session.task} ends after {steps} steps")
