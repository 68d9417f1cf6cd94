"""The processes of a campaign, each a program of its own: `python -m fuzz.parts ROLE SPEC ...`.

A program ends when its standard input does, and what it has to say last is a line of JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from fuzz.attack import Attacker, again
from fuzz.honest import give, take
from fuzz.sealed import SealedAttacker

from paceline import Server, Session, Tls
from paceline.spec import ClusterSpec

SECRET = b"the secret of a fuzzed cluster"
PAUSE = 0.005
"""Seconds of rest between an honest client's steps."""


def told(content: Any) -> None:
    """Say it to whoever started this."""
    print(json.dumps(content), flush=True)


def told_to_stop() -> threading.Event:
    """Set when whoever started this says that it is enough."""
    stop = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    return stop


def serve(spec: ClusterSpec, index: int) -> None:
    """A server, with an operation."""
    with Server(spec, job_name="ps", task_index=index, secret=SECRET) as server:
        server.operation("a")(lambda tree: tree)
        told("serves")
        sys.stdin.read()


def honest(spec: ClusterSpec, role: str) -> None:
    """An honest client."""
    index = ["give", "take"].index(role)
    with Session(spec, secret=SECRET, job="worker", index=index) as session:
        if role == "take":
            told(take(session, spread=True))
            return
        told(give(session, told_to_stop(), spread=True, pause=PAUSE))


def attack(spec: ClusterSpec, seed: int, index: int, frames: int) -> None:
    """An attacker, which tells from time to time how far it is."""
    targets = [spec.target(*task) for task in spec.servers()]
    if spec.tls:
        context = Tls(**spec.tls).client()
        made: Attacker = SealedAttacker(targets, SECRET, seed, index, context)
    else:
        made = Attacker(targets, SECRET, seed, index)

    def tell() -> None:
        while not done.wait(1.0):
            told(dict(made.told))

    done = threading.Event()
    teller = threading.Thread(target=tell)
    teller.start()
    stop = told_to_stop()
    try:
        made.run(frames, stop)
    finally:
        done.set()
        teller.join()
    told({**made.told, "failures": made.failures, "recent": made.recent if stop.is_set() else {}})


def repeat(spec: ClusterSpec, path: str) -> None:
    """What one connection said, once more."""
    targets = [spec.target(*task) for task in spec.servers()]
    told({"heard": again(Path(path).read_text(), targets, SECRET), "failures": []})


def main(role: str, path: str, *words: str) -> None:
    """What the command line says."""
    spec = ClusterSpec.from_file(Path(path))
    if role == "serve":
        serve(spec, int(words[0]))
    elif role == "attack":
        attack(spec, *map(int, words))
    elif role == "again":
        repeat(spec, words[0])
    else:
        honest(spec, role)


if __name__ == "__main__":
    main(*sys.argv[1:])
