"""How can a master initialise variables on the parameter servers, and why do all then see them?

Two servers, a master and two workers, each process with a session of its own. What lives on a
server has a name there, and the sessions only point to it: so it is initialised for all or none.

    python examples/between_graph/q2.py
"""

import os

import numpy as np
from together import run, serve, shows

import paceline

SHAPES = {"hidden/kernel": (4, 8), "hidden/bias": (8,), "out/kernel": (8, 2), "out/bias": (2,)}


def master(_):
    spec = paceline.ClusterSpec.from_environment()
    with paceline.Session(spec) as session:
        turn = session.counter("turn")
        turn.wait_for(2)
        with session.device(paceline.replica_device_setter(spec)):
            made = [session.variable(name, np.ones(shape)) for name, shape in SHAPES.items()]
        print(f"  master:0 (process {os.getpid()}) initialises {len(made)} variables", flush=True)
        homes = session.resources()["homes"]
        where = {name: homes[f"variable {name}"] for name in SHAPES}
        shows(
            [*where.values()] == ["ps:0", "ps:1", "ps:0", "ps:1"],
            "they live at " + ", ".join(f"{task} ({name})" for name, task in where.items()),
        )
        turn.add()
        # Until both workers have looked.
        turn.wait_for(5)


def worker(index):
    spec = paceline.ClusterSpec.from_environment()
    with paceline.Session(spec) as session:
        turn = session.counter("turn")
        turn.wait_for(index)
        missing = session.uninitialized(SHAPES)
        me = f"{session.task} (process {os.getpid()})"
        shows(missing == [*SHAPES], f"{me} has its own session; uninitialized: {missing}")
        turn.add()

        session.wait_until_initialized(SHAPES)
        turn.wait_for(3 + index)
        total = sum(session.variable(name).read().tree.sum() for name in SHAPES)
        wanted = sum(np.prod(shape) for shape in SHAPES.values())
        missing = session.uninitialized(SHAPES)
        shows(
            (missing, total) == ([], wanted),
            f"{session.task}: uninitialized: {missing}; it reads {total:.0f} ones",
        )
        # The same program with another value: what is there stays, wherever this one would put it.
        with session.device("ps:1"):
            again = session.variable("hidden/kernel", np.zeros((4, 8))).read()
        shows(
            again.count == 1 and again.tree.all(),
            f"{session.task} would initialise hidden/kernel with zeros, at ps:1; what is there"
            f" stays: {again.tree[0, :3]}..., version {again.count}, at"
            f" {session.resources()['homes']['variable hidden/kernel']}",
        )
        turn.add()


if __name__ == "__main__":
    run({"ps": serve, "master": master, "worker": worker}, ps=2, master=1, worker=2)
