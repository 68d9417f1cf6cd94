"""Can the process of the parameter server initialise variables, so that all workers see them?

And the question that follows: which sessions share, and which do not?

    python examples/between_graph/q3.py
"""

import os

import numpy as np
from together import run, shows

import paceline

ANOTHER = {"ps": ["127.0.0.1:0"]}


def ps(_):
    with paceline.Server(paceline.ClusterSpec.from_environment()) as server:
        # A session like any other, on the server of its own process.
        with paceline.Session(server.target, job="ps", index=0) as session:
            weights = session.variable("weights", np.array([3.0, 4.0]))
            session.variable("made by", {"process": os.getpid()})
            print(f"  ps:0 (process {os.getpid()}) gives weights {weights.read().tree}", flush=True)
            sharing(server, session)
        server.join()


def sharing(server, session):
    """Sessions in the process of the server: being near it is not what counts."""
    with paceline.Session(server.target) as other:
        shows(has(other), "shares: another session on the server, in the same process")
    with paceline.Session(server.target, container="trial") as apart:
        shows(not has(apart), "does not: a session in another container of that server")
    with paceline.Session() as private:
        shows(not has(private), "does not: a private session, though in the server's own process")
    with paceline.Server(ANOTHER, job_name="ps", secret=b"of another cluster") as neighbour:
        with paceline.Session(neighbour.target, secret=b"of another cluster") as stranger:
            shows(not has(stranger), "does not: a session on another server in the same process")
    session.counter("shown").add()


def worker(index):
    spec = paceline.ClusterSpec.from_environment()
    with paceline.Session(spec) as session:
        session.wait_until_initialized(["weights"])
        weights, maker = session.variable("weights").read(), session.variable("made by").read()
        process = maker.tree["process"]
        (by,) = [made["by"] for made in session.resources()["shared"] if made["name"] == "weights"]
        session.counter("shown").wait_for(1 + index)
        shows(
            weights.count == 1 and by == "ps:0" and process != os.getpid(),
            f"{session.task} (process {os.getpid()}) finds weights {weights.tree}, initialised by"
            f" {by}, process {process}",
        )
        if index == 0:
            with paceline.Session(spec.target("ps", 0)) as other:
                shows(has(other), "shares: a session on the server's address, whatever its task")
            with paceline.Session() as private:
                shows(not has(private), "does not: a private session in the worker")
        session.counter("shown").add()


def has(session):
    return session.uninitialized(["weights"]) == []


if __name__ == "__main__":
    run({"ps": ps, "worker": worker}, ps=1, worker=3)
