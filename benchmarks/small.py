"""Many small items: dicts of a small array and two numbers, a thousand at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from measure import Effort, Figure, compare, seconds
from served import SECRET, served

MANY = 1000
TARGET = 200_000.0

PRODUCER = """
import sys
import numpy as np
import paceline
many = int(sys.argv[2])
with paceline.Session(sys.argv[1], secret=sys.argv[3].encode()) as session:
    queue = session.queue("small")
    obs = np.zeros((many, 4), np.float32)
    items = [{"obs": row, "action": n % 2, "reward": 1.0} for n, row in enumerate(obs)]
    try:
        while True:
            queue.enqueue_many(items, timeout=None)
    except paceline.Closed:
        pass
"""


def measure(effort: Effort) -> Iterator[Figure]:
    """From one producer process to this one: accepted and delivered."""
    times = effort.times(200)
    with served() as session:
        queue = session.queue("small", 8 * MANY)
        target = session.connection.address
        command = [sys.executable, "-c", PRODUCER, target, str(MANY), SECRET.decode()]
        with subprocess.Popen(command) as producer:
            try:
                for _ in range(8):
                    queue.dequeue_many(MANY)
                yield compare(
                    "small items, 1000 at a time",
                    lambda: MANY / seconds(lambda: queue.dequeue_many(MANY), times),
                    "what is wanted", lambda: TARGET, "items/s", ">= 1", effort,
                )  # fmt: skip
            finally:
                queue.close(cancel_pending_enqueues=True)
                producer.wait(timeout=30)
