"""Reverb: a table that is a queue; trajectory writers, and a sampler, over gRPC on loopback.

github.com/google-deepmind/reverb, "Reverb Examples": `Table.queue`, `trajectory_writer`, `sample`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

import reverb
from peer import PRODUCERS, Round, crew, free_ports, items, serve, taken

ROOM = 1000


def hosted(port: int) -> None:
    """A server, until standard input ends."""
    server = reverb.Server([reverb.Table.queue("items", max_size=ROOM)], port=port)
    sys.stdin.read()
    server.stop()


def producer(index: int, port: int) -> Callable[..., None]:
    """Appends items and makes each one of the table's."""
    client = reverb.Client(f"127.0.0.1:{port}")

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        several = items(nbytes, at_once, kind)
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for _ in range(turns):
                for each in several:
                    writer.append(each)
                    writer.create_item(
                        "items", 1.0, {"observation": writer.history["observation"][-1:]}
                    )
                writer.flush()

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """Each item is sampled once, in order."""
    (port,) = free_ports(1)
    command = [sys.executable, __file__, "server", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        client = reverb.Client(f"127.0.0.1:{port}")
        client.server_info(timeout=60)
        with crew(PRODUCERS, producer, port) as producers:

            def take(nbytes: int, at_once: int, kind: str, rest: int) -> int:
                several = min(100, rest)
                return sum(1 for _ in client.sample("items", several, emit_timesteps=False))

            yield taken(producers, take)
        process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        hosted(int(sys.argv[2]))
    else:
        serve(queue=queue)
