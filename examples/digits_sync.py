"""Synchronous training by hand: workers make gradients, the chief steps with the mean of n.

Each worker has a copy of the network and draws batches of its own. It makes one gradient for each
version of the parameters and hands it in; the chief takes the mean of as many as there are workers,
less those it has as backup, lets torch's Adam make its step, and assigns the next version. What
comes too late for its version is dropped and counted. A worker that dies is not waited for until
its successor joins.

    python examples/digits_sync.py --workers 3
    python examples/digits_sync.py --workers 3 --slow 20               # one is 20 times slower
    python examples/digits_sync.py --workers 3 --slow 20 --backup 1    # and is not waited for
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

TESTED, BATCH_SIZE, RATE = 360, 64, 3e-3


def digits():
    """Images and labels to train on, and those to test with."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images / 16, dtype=torch.float32)[order, None]
    labels = torch.tensor(found.target, dtype=torch.int64)[order]
    return (images[TESTED:], labels[TESTED:]), (images[:TESTED], labels[:TESTED])


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def work(policy, gradients, steps, slow, *, worker):
    """What every worker runs: one gradient for each version, until `steps` are done."""
    (images, labels), _ = digits()
    draws = torch.Generator().manual_seed(worker.seed % (1 << 63))
    net, version = make_net(), None
    with gradients:
        while policy.read(newer_than=version, timeout=60).count <= steps:
            version = policy.read_into(net)
            began = time.monotonic()
            batch = torch.randint(len(labels), (BATCH_SIZE,), generator=draws)
            net.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            if worker.index == 0:
                time.sleep((slow - 1) * (time.monotonic() - began))
            grads = {name: p.grad for name, p in net.named_parameters()}
            gradients.apply(grads, version)


def main(workers, backup, slow, engine, steps, goal, seed):
    torch.manual_seed(seed)
    _, (images, labels) = digits()
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    cluster = paceline.Cluster(workers=workers, engine=engine, seed=seed)
    with ThreadPoolExecutor(1) as pool, cluster:
        policy = cluster.variable("policy", net)
        gradients = cluster.accumulator("gradients", variable=policy)
        running = pool.submit(cluster.run, work, policy, gradients, steps, slow)
        for step in range(steps):
            mean = gradients.take(workers - backup, on_leave="lower", timeout=60)
            if step == 0:
                began = time.monotonic()  # all are there
            for name, p in net.named_parameters():
                p.grad = torch.from_numpy(mean.tree[name])
            optimizer.step()
            policy.assign(net)
        took = time.monotonic() - began
        running.result()
        stats = gradients.stats()
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
    dropped = ", ".join(f"{n} {reason}" for reason, n in stats["dropped"].items()) or "none"
    print(f"{steps} steps in {took:.1f} s; gradients: {stats['taken']} taken, dropped: {dropped}")
    how = "solved" if accuracy >= goal else "not solved"
    print(f"{how}: test accuracy {100 * accuracy:.1f} %")
    return 0 if accuracy >= goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--backup", type=int, default=0)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--goal", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
