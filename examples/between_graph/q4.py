"""A main program trains, and its data is collected on the cluster: how does the model get there?

As the asker solved it, with one calculation server and further queues:

1. All units are launched: the calculation server, the main program (chief), the workers.
2. The calculation server builds the network and its training step.
3. The workers build networks, linked to the parameters of that one.
4. The main program tells the workers to collect, in parallel: it has a queue to each.
5. It tells the calculation server to train on what has come. 4 and 5 repeat until convergence.

    python examples/between_graph/q4.py --workers 2
"""

import argparse
import importlib
import os

from pole import GOAL, Pole, play
from together import run, shows

import paceline

ITEMS, MOST_STEPS = 4, 200


def calculation(make_policy):
    with paceline.Server(paceline.ClusterSpec.from_environment()) as server:
        mine = make_policy(seed=0)
        with paceline.Session(server.target) as session:
            model = session.replica("policy", mine.parameters)
            data = session.queue("data", capacity=ITEMS)

            @server.operation("train_step")
            def step(items):
                used = model.variable.version
                batch = data.dequeue_many(items, timeout=60)
                mine.train_step(batch.data)
                return {
                    "process": os.getpid(),
                    "return": batch.data["return"].mean(),
                    "newest": bool((batch.version == used).all()),
                    "version": model.push(),
                }

            server.join()


def worker(make_policy, index):
    pole, mine = Pole(index), make_policy(seed=1 + index)
    with paceline.Session.from_environment() as session:
        # Once the calculation server has given the variable its first value.
        model = session.replica(session.variable("policy"), mine.parameters)
        data = session.queue("data")
        told = session.queue(f"collect {index}", capacity=1)
        session.queue("ready", capacity=100).enqueue(f"{session.task} (process {os.getpid()})")
        try:
            while True:
                for _ in range(told.dequeue()):
                    version = model.pull()
                    data.enqueue(play(pole, mine.choose), version=version)
        except paceline.Closed:
            return  # the main program has closed the queue


def chief(workers):
    with paceline.Session.from_environment() as session:
        ready = session.queue("ready", capacity=100)
        linked = sorted(ready.dequeue(timeout=60) for _ in range(workers))
        tell = [session.queue(f"collect {n}", capacity=1) for n in range(workers)]
        steps = []
        while not steps or (steps[-1]["return"] < GOAL and len(steps) < MOST_STEPS):
            for queue in tell:
                queue.enqueue(ITEMS // workers)
            steps.append(session.run("train_step", ITEMS, task="calculation:0"))
        for queue in tell:
            queue.close()

    makers = {step["process"] for step in steps}
    shows(
        len(makers) == 1 and os.getpid() not in makers,
        f"chief:0 (process {os.getpid()}) had {len(steps)} training steps made, all by process"
        f" {', '.join(map(str, makers))}, the calculation server",
    )
    shows(len({*linked}) == workers, f"linked to its parameters: {', '.join(linked)}")
    shows(
        all(step["newest"] for step in steps),
        f"each step was made of {ITEMS} items of the version just before it",
    )
    first, last = steps[0]["return"], steps[-1]["return"]
    shows(last >= GOAL, f"mean return {first:.1f} at first, {last:.1f} after {len(steps)} steps")


def main(framework="torch"):
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, choices=[1, 2, 4], default=2)
    workers = parser.parse_args().workers

    def make_policy(seed):
        return importlib.import_module(f"{framework}_policy").Policy(seed)

    parts = {
        "calculation": lambda _: calculation(make_policy),
        "chief": lambda _: chief(workers),
        "worker": lambda index: worker(make_policy, index),
    }
    run(parts, calculation=1, chief=1, worker=workers)


if __name__ == "__main__":
    main()
