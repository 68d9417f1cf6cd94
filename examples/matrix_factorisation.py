"""Ratings as products of two tables of factors, whose rows lie on two servers.

Each user and each item is a row of `RANK` numbers, and a rating is the product of two rows. A step
takes the rows of a few hundred users and items, and adds to them what makes their products better:
what travels is these rows, not the tables. Workers step at the same time, each on ratings of its
own, and no addition is lost. The chief looks every now and then at ratings that nobody trains on.

    python examples/matrix_factorisation.py
    python examples/matrix_factorisation.py --workers 4 --epochs 20
    python examples/matrix_factorisation.py --ps 1         # all rows on one server
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import paceline

USERS, ITEMS, RANK = 2000, 500, 8
RATINGS, TESTED, BATCH_SIZE, RATE = 120_000, 10_000, 256, 0.1


def ratings(seed):
    """Users, items and ratings: products of hidden factors, and some noise."""
    draw = np.random.default_rng(seed)
    # A few items have most of the ratings.
    users, items = draw.integers(0, USERS, RATINGS), draw.zipf(1.3, RATINGS) % ITEMS
    hidden = draw.normal(size=(USERS + ITEMS, RANK)) / RANK**0.25
    made = (hidden[users] * hidden[USERS + items]).sum(axis=1)
    return users, items, made + 0.1 * draw.normal(size=RATINGS)


def work(users, items, epoch, args, *, worker):
    """What every worker runs: `epochs` times through its part of the ratings."""
    mine = slice(TESTED + worker.index, None, args.workers)
    who, what, wanted = (column[mine] for column in ratings(args.seed))
    draw = np.random.default_rng(worker.seed)
    for _ in range(args.epochs):
        for batch in np.array_split(draw.permutation(len(who)), -(-len(who) // BATCH_SIZE)):
            u, i = who[batch], what[batch]
            p, q = users.gather(u).tree, items.gather(i).tree
            error = (wanted[batch] - (p * q).sum(axis=1))[:, None]
            # An item that comes often in a batch makes no longer a step than one that comes once.
            often = np.bincount(i, minlength=ITEMS)[i, None]
            users.scatter_add(u, RATE * error * q)
            items.scatter_add(i, RATE * error * p / often)
        epoch.add(1)


def error(users, items, known):
    """The root of the mean square, over ratings that nobody trains on."""
    who, what, wanted = (column[:TESTED] for column in known)
    p, q = users.gather(who).tree, items.gather(what).tree
    return float(np.sqrt(np.square(wanted - (p * q).sum(axis=1)).mean()))


def main(args):
    draw, known = np.random.default_rng(args.seed + 1), ratings(args.seed)
    cluster = paceline.Cluster(args.workers, ps=args.ps, seed=args.seed, progress="quiet")
    with ThreadPoolExecutor(1) as pool, cluster:
        servers = cluster.session.servers()

        def table(name, rows):
            start = draw.normal(scale=0.3, size=(rows, RANK))
            if not servers:
                return cluster.variable(name, start)
            return cluster.session.spread(name, start, placement=lambda leaves: [servers])

        users, items = table("users", USERS), table("items", ITEMS)
        epoch = cluster.counter("epoch")
        errors = [error(users, items, known)]
        running = pool.submit(cluster.run, work, users, items, epoch, args)
        for n in range(1, args.epochs + 1):
            epoch.wait_for(n * args.workers)
            errors.append(error(users, items, known))
            print(f"epoch {n}: error {errors[-1]:.3f} on ratings that nobody trains on")
        running.result()
    how = "solved" if errors[-1] < args.goal else "not solved"
    where = ", ".join(servers) or "one server"
    print(f"{how}: error {errors[0]:.3f} became {errors[-1]:.3f} with rows on {where}")
    return 0 if errors[-1] < args.goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goal", type=float, default=0.3)
    sys.exit(main(parser.parse_args()))
