"""A server in a process of its own, where one wants it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import paceline

SECRET = b"benchmark"

SERVER = """
import os, sys, threading
if int(sys.argv[2]) >= 0:
    os.sched_setaffinity(0, {int(sys.argv[2])})
from paceline.operations import Offer
from paceline.server.loop import Server
from paceline.transports.unix import UnixListener
server = Server([UnixListener(sys.argv[1])], sys.argv[3].encode())
registered = threading.Thread(
    target=Offer(server, "the benchmark's server", None).operation("empty"), args=(lambda: None,)
)
registered.start()
print("ready", flush=True)
server.serve()
"""


@contextmanager
def served(core: int = -1, name: str = "") -> Iterator[paceline.Session]:
    """A session on a fresh server, bound to a core if that is 0 or more; several have a `name`."""
    place = f"@paceline-benchmark-{os.getpid()}{name}"
    command = [sys.executable, "-c", SERVER, place, str(core), SECRET.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            with paceline.Session(f"unix:{place}", secret=SECRET) as session:
                yield session
        finally:
            child.kill()
