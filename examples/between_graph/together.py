"""Starts a process for each task of a cluster, as somebody at several terminals would.

A program of this folder is started once by its user, and once more for each task: then TF_CONFIG
says which task it is, and the part of its job is played.
"""

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import paceline

LIMIT = 100.0
"""Seconds that all of it may take."""


def run(parts, **counts):
    """Play the part of this process's job, or start `counts` of each job and wait for them.

    Args:
        parts: for each job a function of the task's number.

    Exits with a status that is not 0 when one of them did.
    """
    if "TF_CONFIG" in os.environ:
        task = paceline.ClusterSpec.from_environment().task
        threading.Thread(target=_end_with_launcher, daemon=True).start()
        parts[task.job](task.number)
        return
    ports = iter(_free_ports(sum(counts.values())))
    cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in counts.items()}
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_hex(16).encode())
        started = {
            f"{job}:{index}": _start(cluster, job, index, secret)
            for job, n in counts.items()
            for index in range(n)
        }
        try:
            amiss = _wait(started)
        finally:
            for process in started.values():
                process.kill()
                process.communicate()
    if amiss:
        sys.exit(amiss)


def shows(so, sentence):
    """Print what was seen; if it is not `so`, that is said, and this process fails."""
    print(f"  {sentence}" if so else f"  NOT SO: {sentence}", flush=True)
    if not so:
        sys.exit(1)


def serve(_=0):
    """The part of a task that only serves."""
    with paceline.Server(paceline.ClusterSpec.from_environment()) as server:
        server.join()


def _start(cluster, job, index, secret):
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    environment = {name: text for name, text in os.environ.items() if name != "PACELINE_CLUSTER"}
    environment |= {"TF_CONFIG": json.dumps(config), "PACELINE_SECRET_FILE": str(secret)}
    words = [sys.executable, *sys.orig_argv[1:]]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE)


def _wait(processes):
    """Wait until all have ended, one has failed, or the time is up; what is amiss, if anything."""
    deadline = time.monotonic() + LIMIT
    for task, process in processes.items():
        while process.poll() is None:
            failed = [name for name, each in processes.items() if each.poll()]
            if failed:
                return f"failed: {', '.join(failed)}"
            if time.monotonic() > deadline:
                return f"{task} has not ended after {LIMIT} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    failed = [name for name, each in processes.items() if each.returncode]
    return f"failed: {', '.join(failed)}" if failed else ""


def _end_with_launcher():
    """The launcher holds the other end of this process's input."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _free_ports(count):
    """Ports that nobody listens at, and that the kernel gives to nobody who asks for any."""
    found = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)
