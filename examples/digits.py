"""Training scikit-learn's digits, in step or asynchronously, with parameters on two servers.

Each worker has a copy of the network and draws batches of its own. It pulls the parameters, which
are spread over the servers and have one version, makes a gradient, and hands it in. The chief lets
torch's Adam make its steps, and assigns each next version.

In step (`sync`), a step is made with the mean of one gradient from each worker, less those there
are as backup. Asynchronously (`async`), each gradient is a step, unless it is more than `--max-lag`
versions old. What comes too late is dropped and counted. It makes three times the steps, for each
has a third of the gradients. A worker that dies is not waited for until its successor joins.

    python examples/digits.py --mode sync
    python examples/digits.py --mode async
    python examples/digits.py --mode sync --slow 20               # one is 20 times slower
    python examples/digits.py --mode sync --slow 20 --backup 1    # and is not waited for
    python examples/digits.py --mode async --kill-every 2         # one is killed every 2 seconds
"""

import argparse
import os
import random
import signal
import sys
import threading
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


def work(policy, gradients, pids, args, *, worker):
    """What every worker runs: gradients of the newest version, until all steps are done."""
    (images, labels), _ = digits()
    draws = torch.Generator().manual_seed(worker.seed % (1 << 63))
    net, version = make_net(), None
    pids.enqueue((worker.index, os.getpid()))
    with gradients:
        while True:
            if args.mode == "sync":  # one gradient for each version; else a worker never waits
                policy.read(newer_than=version)
            version = policy.read_into(net)
            if policy.read().count > args.steps:
                return
            began = time.monotonic()
            batch = torch.randint(len(labels), (BATCH_SIZE,), generator=draws)
            net.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            if worker.index == 0:
                time.sleep((args.slow - 1) * (time.monotonic() - began))
            gradients.apply({name: p.grad for name, p in net.named_parameters()}, version)


def kill(pids, seconds, done):
    """SIGKILL a worker every so many seconds, any that is there; how many it were."""
    there, killed = {}, 0
    while not done.wait(seconds):
        for _ in range(pids.size):
            index, pid = pids.dequeue()
            there[index] = pid  # in place of one that was killed
        if there:
            os.kill(there.pop(random.choice([*there])), signal.SIGKILL)
            killed += 1
    return killed


def next_mean(gradients, args):
    if args.mode == "async":
        return gradients.take(1, on_leave="wait")
    try:
        return gradients.take(args.workers - args.backup, on_leave="lower")
    except paceline.WorkerLeft:  # all are gone
        return gradients.take(1, on_leave="wait")


def train(net, policy, gradients, args):
    """Make the steps of the chief; seconds from the first on, and the oldest gradient's lag."""
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)
    began, lag = None, 0
    for _ in range(args.steps):
        mean = next_mean(gradients, args)
        began = began or time.monotonic()  # in step, all are there
        lag = max(lag, *mean.lags)
        for name, p in net.named_parameters():
            p.grad = torch.from_numpy(mean.tree[name])
        optimizer.step()
        rate.step()
        policy.assign(net)
    return time.monotonic() - began, lag


def main(args):
    torch.manual_seed(args.seed)
    _, (images, labels) = digits()
    net, done = make_net(), threading.Event()
    cluster = paceline.Cluster(args.workers, ps=args.ps, seed=args.seed, restarts=100)
    with ThreadPoolExecutor(2) as pool, cluster:
        policy = cluster.session.spread("policy", net)
        max_lag = args.max_lag if args.mode == "async" else 0
        gradients = cluster.accumulator("gradients", variable=policy, max_lag=max_lag)
        pids = cluster.queue("pids", 100)
        running = pool.submit(cluster.run, work, policy, gradients, pids, args)
        killing = pool.submit(kill, pids, args.kill_every, done)
        try:
            took, lag = train(net, policy, gradients, args)
        finally:
            done.set()
        killed = killing.result()
        running.result()
        stats = gradients.stats()
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
    dropped = ", ".join(f"{n} {reason}" for reason, n in stats["dropped"].items()) or "none"
    print(
        f"{args.steps} steps in {took:.1f} s; gradients: {stats['taken']} taken, dropped: {dropped}"
    )
    print(f"the oldest gradient: {lag} versions; workers killed: {killed}")
    how = "solved" if accuracy >= args.goal else "not solved"
    print(f"{how}: test accuracy {100 * accuracy:.1f} %")
    return 0 if accuracy >= args.goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--backup", type=int, default=0)
    parser.add_argument("--max-lag", type=int, default=4)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--kill-every", type=float, default=None)
    parser.add_argument("--steps", type=int, help="300 in step, 900 asynchronously")
    parser.add_argument("--goal", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.steps = given.steps or {"sync": 300, "async": 900}[given.mode]
    sys.exit(main(given))
