"""Has each process a session of its own, or is there one huge session that accumulates all graphs?

Two workers, each with a session on the same server, and each with a private one. They take turns:
a counter says how far they are.

    python examples/between_graph/q1.py
"""

import os

import numpy as np
from together import run, serve, shows

import paceline

START, ADDED = np.array([1.0, 2.0]), np.array([10.0, 20.0])


def worker(index):
    with paceline.Session.from_environment() as session, paceline.Session() as private:
        turn = session.counter("turn")
        [first, second][index](session, private, turn)


def first(session, private, turn):
    turn.wait_for(1)
    members = sorted(session.resources()["members"])
    shows(
        members == ["worker:0", "worker:1"],
        f"the processes have a session each; the server knows {members}",
    )

    weights = session.variable("weights", START)
    print(f"  worker:0 (process {os.getpid()}) initialises weights with {START}", flush=True)
    turn.add()  # 2

    turn.wait_for(3)
    seen = weights.read()
    shows(
        np.array_equal(seen.tree, START + ADDED) and seen.count == 2,
        f"worker:0 reads {seen.tree}, version {seen.count}: the sessions share the variable",
    )

    # What is computed with it is a process's own affair: no graph is sent anywhere.
    total = seen.tree.sum()
    there = session.resources()
    shows(
        "total" not in str(there) and list(there["variables"]) == ["weights"],
        f"worker:0 computes their sum, {total}; on the server is {list(there['variables'])}",
    )

    mine = private.variable("weights", np.zeros(2))
    shows(
        np.array_equal(weights.read().tree, START + ADDED),
        f"its private session has weights {mine.read().tree}, the cluster's stay {seen.tree}",
    )
    with paceline.Session() as another:
        missing = another.uninitialized(["weights"])
        shows(missing == ["weights"], f"another private session in the same process: no {missing}")

    pieces = session.queue("pieces", capacity=3)
    pieces.enqueue_many(["a", "b", "c"])
    turn.add()  # 4

    turn.wait_for(5)
    left = pieces.dequeue_up_to(3).data
    shows(left == ["c"], f"worker:0 takes what is left: {left}; an item goes to one session")
    # worker:1 has not left yet, so the server goes on.
    session.close()
    with paceline.Session.from_environment() as again:
        kept = again.variable("weights").read()
        shows(
            kept.version == seen.version,
            f"worker:0 closes its session and opens another: weights are still {kept.tree}",
        )
        again.counter("turn").add()  # 6


def second(session, private, turn):
    turn.add()  # 1
    turn.wait_for(2)
    weights = session.variable("weights")
    seen = weights.read().tree
    shows(np.array_equal(seen, START), f"worker:1 (process {os.getpid()}) reads {seen}")
    weights.assign_add(ADDED)
    print(f"  worker:1 adds {ADDED}", flush=True)
    turn.add()  # 3

    turn.wait_for(4)
    missing = private.uninitialized(["weights"])
    shows(missing == ["weights"], f"worker:1's private session knows nothing of them: no {missing}")
    taken = session.queue("pieces").dequeue_many(2).data
    shows(taken == ["a", "b"], f"worker:0 has enqueued ['a', 'b', 'c'], worker:1 takes {taken}")
    turn.add()  # 5
    turn.wait_for(6)


if __name__ == "__main__":
    run({"ps": serve, "worker": worker}, ps=1, worker=2)
