"""One program for the chief and the workers of a cluster by hand: fits weights with gradients.

In a terminal each: `paceline run train.py --cluster cluster.toml --job chief`, the same for each
`--job worker --task N`, and the servers, `paceline serve --cluster cluster.toml --job ps --task N`.
"""

import numpy as np

import paceline

WANTED = np.array([2.0, -3.0])


def gradients(weights, worker):
    """What each worker makes: gradients on data of its own."""
    rng = np.random.default_rng(worker.seed)
    while True:
        x = rng.normal(size=(32, 2))
        error = x @ (weights.read().tree - WANTED)
        worker.log(loss=error @ error / 32)
        yield x.T @ error / 32


def judged(weights, worker):
    """What each worker does once, after the training: the loss on fresh data."""
    x = np.random.default_rng(worker.seed).normal(size=(1000, 2))
    return float(np.mean((x @ (weights.read().tree - WANTED)) ** 2))


with paceline.Cluster.from_environment(progress="quiet") as cluster:
    weights = cluster.variable("weights", np.zeros(2))  # the chief's value
    for batch in cluster.collect(gradients, weights, batch_size=6):  # no batches in a worker
        weights.assign_add(-0.1 * batch.data.mean(axis=0))
        if batch.metrics["loss"].mean() < 1e-6:
            break
    losses = cluster.run(judged, weights)
    if cluster.is_chief:
        print(f"weights {weights.read().tree.round(2)}, loss of each {np.round(losses, 4)}")
    print(f"{cluster.session.task} is done")
