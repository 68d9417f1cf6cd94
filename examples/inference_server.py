"""One process acts for many workers: their observations wait a moment, and go through in batches.

python examples/inference_server.py [WORKERS]
"""

import sys
import threading

import numpy as np
import torch

import paceline

SECRET = b"not one to keep: for this example only"
STEPS = 200


def work(target, index, returns):
    """A worker without a model: it asks the server what to do."""
    draw = np.random.default_rng(index)
    with paceline.Session(target, secret=SECRET, job="worker", index=index) as session:
        position, total = np.float32(draw.normal()), 0.0
        for _ in range(STEPS):
            action = session.run("act", np.array([position]), timeout=60)
            position += np.float32(0.1 * action + 0.01 * draw.normal())
            total -= abs(position)
        returns[index] = total / STEPS


def main(workers=2):
    addresses = [f"worker{n}:1" for n in range(workers)]
    spec = paceline.ClusterSpec({"inference": ["127.0.0.1:0"], "worker": addresses})
    returns = {}
    with paceline.Server(spec, job_name="inference", secret=SECRET) as server:
        net = torch.nn.Linear(1, 3)
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
            net.bias.zero_()
        batches = []

        @server.operation("act", batch=workers)
        def act(observations):
            batches.append(len(observations))
            with torch.no_grad():
                return net(torch.from_numpy(observations)).argmax(dim=1) - 1

        threads = [
            threading.Thread(target=work, args=(server.target, n, returns)) for n in range(workers)
        ]
        for thread in threads:
            thread.start()
        server.join()
        for thread in threads:
            thread.join()
    print(f"{sum(batches)} observations of {workers} workers in batches of up to {max(batches)}")
    return returns


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:]))
    assert min(found.values()) > -0.5, found
