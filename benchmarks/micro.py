"""Each figure beside the limit measured in the same run, as a ratio: take the ratios.

python benchmarks/micro.py [call] [variable] [items]
"""

from __future__ import annotations

import copy
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import paceline
from paceline.core import messages as m

MB = 1 << 20
ROUNDS = 7


def best(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds of a run."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def say(what: str, figure: str, limit: str, ratio: float, wanted: str) -> None:
    """One line of the report."""
    print(f"{what:<44} {figure:>14}   {limit:<28} ratio {ratio:6.2f}   wanted {wanted}", flush=True)


ECHO = """
import os, select, socket, sys
os.sched_setaffinity(0, {int(sys.argv[2])})
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(1 << 16):
    sock.send(data)
"""


def raw_round_trip(core: int) -> float:
    """Seconds of a round trip of 60 bytes between two processes, in plain Python."""
    mine, other = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(other.fileno()), str(core)], pass_fds=[other.fileno()]
    )
    other.close()
    message = b"x" * 60

    def run() -> None:
        for _ in range(2000):
            mine.send(message)
            mine.recv(1 << 16)

    run()
    seconds = best(run) / 2000
    mine.close()
    child.wait()
    return seconds


SERVER = """
import os, sys
if int(sys.argv[2]) >= 0:
    os.sched_setaffinity(0, {int(sys.argv[2])})
from paceline.server.loop import Server
from paceline.transports.unix import UnixListener
server = Server([UnixListener(sys.argv[1])], b"benchmark")
print("ready", flush=True)
server.serve()
"""


@contextmanager
def served(core: int = -1) -> Iterator[paceline.Session]:
    """A session on a server in a process of its own, bound to a core if it is 0 or more."""
    place = f"@paceline-benchmark-{os.getpid()}"
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER, place, str(core)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with paceline.Session(f"unix:{place}", secret=b"benchmark") as session:
            yield session
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def repeat(call: Callable[[Any], object], request: object) -> None:
    for _ in range(2000):
        call(request)


def calls() -> None:
    """A call that the server answers, beside the raw round trip; and reads of what is unchanged."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    for what, core in (("both ends on one core", cores[0]), ("across cores", cores[-1])):
        raw = raw_round_trip(core)
        with served(core) as session:
            request = m.Read(session.variable("scalar", 1.0).name, m.NO_VERSION, 0.0)
            run = partial(repeat, session.connection.call, request)
            run()
            seconds = best(run) / 2000
            raw = min(raw, raw_round_trip(core))
            say(
                f"call, {what}",
                f"{seconds * 1e6:.1f} us",
                f"raw {raw * 1e6:.1f} us",
                seconds / raw,
                "<= 2",
            )
    os.sched_setaffinity(0, set(cores))
    with served() as session:
        variable = session.variable("scalar", 1.0)
        variable.read()
        seconds = best(lambda: [variable.read() for _ in range(20000)]) / 20000
        say(
            "read of an unchanged version",
            f"{seconds * 1e6:.2f} us",
            "5 us",
            seconds / 5e-6,
            "<= 1",
        )


def variables() -> None:
    """64 MB in and out, beside memcpy between two arrays that are in use already."""
    source = np.random.default_rng(0).random(64 * MB // 8)
    target = np.zeros_like(source)
    with served() as session:
        variable = session.variable("big", source)
        for _ in range(3):
            variable.assign(source)
            variable.read_into(target)
        limit = best(lambda: np.copyto(target, source))
        rate = 64 / 1024 / limit

        def report(what: str, seconds: float, wanted: str) -> None:
            figure = f"{64 / 1024 / seconds:.1f} GB/s"
            say(what, figure, f"memcpy {rate:.1f} GB/s", limit / seconds, wanted)

        report("assign of 64 MB", best(lambda: variable.assign(source)), ">= 0.7")

        def read_into() -> None:
            variable.read_into(target)

        report("read_into of 64 MB", best(read_into), ">= 0.7")
        small = session.variable("scalar", np.float64(1.0))

        def views(of: Any) -> float:
            def run() -> None:
                for _ in range(500):
                    # A new handle has read nothing yet, so it has to ask.
                    copy.copy(of).read()

            run()
            return best(run) / 500

        small, variable = session.variable("scalar"), session.variable("big")
        scalar, view = views(small), views(variable)
        say(
            "a view of 64 MB",
            f"{view * 1e6:.1f} us",
            f"a scalar {scalar * 1e6:.1f} us",
            view / scalar,
            "<= 2",
        )


def items() -> None:
    """256 KB items from 2 producers to one consumer, beside memcpy of 64 MB."""
    size, count = 256 * 1024, 4000
    source, target = np.ones(64 * MB, np.uint8), np.ones(64 * MB, np.uint8)
    np.copyto(target, source)
    limit = 64 * MB / best(lambda: np.copyto(target, source))

    def produce(many: int) -> Any:
        def produced(out: Any) -> Any:
            item = np.ones(size, np.uint8)
            for _ in range(count // 2 // many):
                out.enqueue_many([item] * many)
            yield None

        return produced

    with paceline.Cluster(workers=2, progress="quiet") as cluster:
        for many in (1, 8):
            queue = cluster.queue(f"items-{many}", 64)
            done = cluster.collect(produce(many), queue, batch_size=2, version_of=None)
            queue.dequeue_many(8)
            rates = []
            for _ in range(count // 8 - 1):
                began = time.perf_counter()
                queue.dequeue_many(8)
                rates.append(time.perf_counter() - began)
            done.close()
            rate = len(rates) * 8 * size / sum(rates)
            say(
                f"256 KB items, 2 producers, {many} at a time",
                f"{rate / size:,.0f} items/s",
                f"memcpy {limit / 1e9:.1f} GB/s",
                rate / limit,
                ">= 0.3",
            )

        def yielded() -> Any:
            item = np.ones(size, np.uint8)
            while True:
                yield item

        collected = cluster.collect(yielded, batch_size=16, max_lag=None)
        for _ in range(20):
            collected.next()
        began = time.perf_counter()
        for _ in range(count // 16):
            collected.next()
        rate = count * size / (time.perf_counter() - began)
        say(
            "256 KB items, 2 workers, collected by 16",
            f"{rate / size:,.0f} items/s",
            f"memcpy {limit / 1e9:.1f} GB/s",
            rate / limit,
            ">= 0.3",
        )


if __name__ == "__main__":
    parts = {"call": calls, "variable": variables, "items": items}
    for name in sys.argv[1:] or parts:
        parts[name]()
