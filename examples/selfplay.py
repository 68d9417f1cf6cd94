"""Self-play against a league: a policy for Nim learns from games with its own older versions.

The chief tags a version as a new generation now and then. For each item a worker draws an opponent
among the tags and reads it by its name, which never stamps the item. The league has five members;
when a sixth joins, the oldest leaves, but for gen-0, the yardstick. A worker of a second job
evaluates, called with `map` while the others play.

    python examples/selfplay.py --workers 2
"""

import argparse
import sys

import numpy as np

import paceline

HEAP, MOST = 20, 3  # whoever takes the last of the heap wins; one to three may be taken
LEAGUE, GAMES, BATCH_SIZE, RATE = 5, 32, 4, 20.0


def chances(logits):
    """The policy: for each heap, how likely it takes one, two or three; `[HEAP + 1, MOST]`."""
    allowed = np.arange(MOST) < np.arange(HEAP + 1)[:, None]
    weights = np.where(allowed, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-8)


def play(ours, theirs, rng):
    """One game from a random heap; our moves, as (heap, taken - 1), and whether we won."""
    heap, turn, moves = rng.integers(1, HEAP + 1), rng.integers(2), []
    while heap:
        move = np.searchsorted(np.cumsum((ours, theirs)[turn][heap]), rng.random())
        move = min(move, MOST - 1, heap - 1)
        if turn == 0:
            moves.append((heap, move))
        heap, turn = heap - move - 1, 1 - turn
    return moves, turn == 1  # the loser would be next


def games(policy, worker):
    """What every worker runs. Where a game had fewer moves than others, rows have heap 0."""
    rng = np.random.default_rng(worker.seed)
    while True:
        ours = chances(policy.read().tree)
        name = str(rng.choice(list(policy.tags())))
        try:
            theirs = chances(policy.read(tag=name).tree)
        except paceline.UnknownName:
            continue  # it has just left the league
        moves, won = np.zeros((GAMES, HEAP, 2), int), np.zeros(GAMES, bool)
        for game in range(GAMES):
            made, won[game] = play(ours, theirs, rng)
            moves[game, : len(made)] = np.reshape(made, (-1, 2))
        worker.log(steps=GAMES, won=won.mean())
        yield {"moves": moves, "won": won}


def improved(logits, data):
    """The policy after a step of REINFORCE: moves of games that were won become more likely."""
    heap, move = data["moves"][..., 0], data["moves"][..., 1]  # each [n, GAMES, HEAP]
    gain = (data["won"] - data["won"].mean())[..., None, None]
    away = np.where(heap[..., None] > 0, np.eye(MOST)[move] - chances(logits)[heap], 0)
    step = np.zeros_like(logits)
    np.add.at(step, heap, gain * away)
    return logits + RATE * step / data["won"].size


def win_rate(name, policy, count, seed):
    """What the evaluator is called with: how often the newest wins against a member."""
    rng = np.random.default_rng(seed)
    ours, theirs = chances(policy.read().tree), chances(policy.read(tag=name).tree)
    return np.mean([play(ours, theirs, rng)[1] for _ in range(count)])


def main(workers, engine, generations, batches, goal, seed):
    logits = np.zeros((HEAP + 1, MOST))
    with paceline.Cluster({"actor": workers, "eval": 1}, engine=engine, seed=seed) as cluster:
        policy = cluster.variable("policy", logits)
        policy.tag("gen-0")
        collection = cluster.collect(games, policy, batch_size=BATCH_SIZE, job="actor")
        for number, batch in enumerate(collection, 1):
            logits = improved(logits, batch.data)
            policy.assign(logits)
            if number % batches:
                continue
            members = list(policy.tags())
            rates = cluster.map(win_rate, members, policy, 500, seed, job="eval")
            shown = "  ".join(f"{m} {r:.2f}" for m, r in zip(members, rates, strict=True))
            print(f"generation {number // batches} wins against  {shown}")
            if number == generations * batches:
                break
            policy.tag(f"gen-{number // batches}")
            if len(members) == LEAGUE:
                policy.untag(members[1])
    how = "solved" if rates[0] >= goal else "not solved"
    print(f"{how}: win rate {rates[0]:.2f} against gen-0 after {generations} generations")
    return 0 if rates[0] >= goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--batches", type=int, default=15, help="in each generation")
    parser.add_argument("--goal", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
