"""A call that the server answers, beside a raw round trip between two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from measure import Effort, Figure, compare, seconds
from served import served

from paceline.core import messages as m

ECHO = """
import os, socket, sys
os.sched_setaffinity(0, {int(sys.argv[2])})
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(1 << 16):
    sock.send(data)
"""


def measure(effort: Effort) -> Iterator[Figure]:
    """On one core, and across cores."""
    cores = sorted(os.sched_getaffinity(0))
    times = effort.times(2000)
    os.sched_setaffinity(0, {cores[0]})
    try:
        for where, core in (("both ends on one core", cores[0]), ("across cores", cores[-1])):
            with echo(core) as raw, served(core) as session:
                connection = session.connection
                request = m.Read(session.variable("scalar", 1.0).name, m.NO_VERSION, 0.0)

                def call() -> float:
                    return 1e6 * seconds(lambda: connection.call(request), times)  # noqa: B023

                def operation() -> float:
                    return 1e6 * seconds(lambda: session.run("empty"), times)

                operation()
                call()
                yield compare(
                    f"call, {where}", call, "raw round trip",
                    lambda: 1e6 * seconds(raw, times), "us", "<= 2", effort,
                )  # fmt: skip
                yield compare(
                    f"empty operation, {where}", operation, "raw round trip",
                    lambda: 1e6 * seconds(raw, times), "us", "<= 20", effort,
                )  # fmt: skip
    finally:
        os.sched_setaffinity(0, set(cores))


@contextmanager
def echo(core: int) -> Iterator[Callable[[], object]]:
    """A round trip of 60 bytes to a process that sends back what it gets, in plain Python."""
    mine, other = socket.socketpair()
    command = [sys.executable, "-c", ECHO, str(other.fileno()), str(core)]
    with mine, subprocess.Popen(command, pass_fds=[other.fileno()]):
        other.close()
        message = b"x" * 60

        def trip() -> None:
            mine.send(message)
            mine.recv(1 << 16)

        for _ in range(100):
            trip()
        yield trip
        mine.shutdown(socket.SHUT_RDWR)
