"""Asynchronous training of a Keras model: workers never wait for each other.

Each worker has a model and an optimiser of its own, and draws batches of its own. It pulls the
newest parameters, makes a step of Keras's, and adds what the step has changed to what all share.

    python examples/keras_replica.py --workers 2
    KERAS_BACKEND=jax python examples/keras_replica.py --workers 4
"""

import argparse
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import keras
import numpy as np
from sklearn.datasets import load_digits

import paceline

TESTED, BATCH_SIZE, RATE = 360, 64, 0.1


def digits():
    """Images and labels to train on, and those to test with."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images, labels = (found.images[order] / 16).astype("float32"), found.target[order]
    return (images[TESTED:], labels[TESTED:]), (images[:TESTED], labels[:TESTED])


def make_net():
    net = keras.Sequential(
        [
            keras.layers.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="out"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(RATE, momentum=0.5), loss, metrics=["accuracy"])
    return net


def work(policy, count, steps, *, worker):
    """What every worker runs, until all of them have made that many steps."""
    (images, labels), _ = digits()
    draws = np.random.default_rng(worker.seed)
    replica = worker.session.replica(policy, make_net())
    made = 0
    while count.add() <= steps:
        replica.pull()
        before = replica.leaves()
        batch = draws.integers(len(labels), size=BATCH_SIZE)
        replica.value.train_on_batch(images[batch], labels[batch])
        step = {name: array - before[name] for name, array in replica.leaves().items()}
        replica.push(step, op="add")
        made += 1
    return made


def main(workers, engine, steps, goal, seed):
    keras.utils.set_random_seed(seed)
    _, (images, labels) = digits()
    net = make_net()
    with paceline.Cluster(workers=workers, engine=engine, seed=seed) as cluster:
        replica = cluster.session.replica("model", net)
        made = cluster.run(work, replica.variable, cluster.counter("steps"), steps)
        replica.pull()
    _, accuracy = net.evaluate(images, labels, verbose=0)
    shares = ", ".join(map(str, made))
    print(f"{sum(made)} steps, by worker: {shares}")
    how = "solved" if accuracy >= goal else "not solved"
    print(f"{how}: test accuracy {100 * accuracy:.1f} %")
    return 0 if accuracy >= goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
