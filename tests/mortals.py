"""Processes that die at an exact moment, by SIGKILL.

`python tests/mortals.py` forks one for each line that it is told: to import the library once for
all of them takes a tenth of the time. Some die by themselves, with half of a frame sent, or with a
request in hand; others are there to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.core.queue_state import QueueState
from paceline.core.variable_state import VariableState
from paceline.server.cut_desk import CutDesk
from paceline.server.service import Service

WIDE = 20_000
SECRET = b"what mortals know"


def say(word: str) -> None:
    """Tell whoever started this process."""
    os.write(1, f"{word}\n".encode())


def die(*what: object) -> None:
    """Now."""
    say("dies")
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_next_frame() -> None:
    """Die when half of the next frame has been sent."""
    send = socket.socket.send

    def half(sock: socket.socket, data: Any, *more: Any) -> int:
        if len(data) < 8:
            # One thread of this process wakes another.
            return send(sock, data)
        send(sock, bytes(data)[: len(data) // 2])
        die()
        return 0

    def half_of_all(sock: socket.socket, buffers: Any, *more: Any) -> int:
        return half(sock, b"".join(buffers))

    names: Any = socket.socket
    names.send, names.sendmsg = half, half_of_all


def opened(told: dict[str, Any]) -> paceline.Session:
    """The session of a task."""
    return paceline.Session(
        told["target"], secret=bytes.fromhex(told["secret"]), job=told["job"], index=0
    )


def starting(told: dict[str, Any]) -> None:
    in_the_next_frame()
    opened(told)


def idle(told: dict[str, Any]) -> None:
    session = opened(told)
    session.variable("v").assign(np.full(WIDE, 7.0))
    session.queue("q").enqueue(7)
    say("idle")
    signal.pause()


def assigning(told: dict[str, Any]) -> None:
    variable = opened(told).variable("v")
    in_the_next_frame()
    variable.assign(np.ones(WIDE))


def enqueueing(told: dict[str, Any]) -> None:
    queue = opened(told).queue("q")
    in_the_next_frame()
    queue.enqueue(np.ones(WIDE))


def waiting(told: dict[str, Any]) -> None:
    queue = opened(told).queue("q")
    say("waits")
    queue.dequeue_many(2, timeout=None)


def stopping(told: dict[str, Any]) -> None:
    session = opened(told)
    in_the_next_frame()
    session.close()


TASKS = {each.__name__: each for each in (starting, idle, assigning, enqueueing, waiting, stopping)}

HANDS: dict[str, tuple[type, str, int]] = {
    "starting": (Service, "_join", 1),
    "assigning": (VariableState, "_commit", 1),
    "enqueueing": (QueueState, "accept", 1),
    "checkpointing": (CutDesk, "_fetch", 2),
    "stopping": (Service, "_leave", 1),
}
"""What a server has in hand when it dies at that moment, and for which time."""


def serving(told: dict[str, Any]) -> None:
    """A server that dies at the moment it was told, once it was sent SIGUSR1."""
    armed: list[object] = []
    if told["moment"] in HANDS:
        owner, name, at = HANDS[told["moment"]]
        _watch(owner, name, at, armed)

    def arm(*what: object) -> None:
        armed.append(what)
        say("armed")

    signal.signal(signal.SIGUSR1, arm)
    server = paceline.Server(
        told["cluster"], job_name="ps", secret=SECRET, on_news=lambda line: None
    )
    say("serves")
    server.join()


def _watch(owner: Any, name: str, at: int, armed: list[object]) -> None:
    """Die at such a call of it, once armed."""
    before, calls = getattr(owner, name), list[object]()

    def watched(*arguments: Any) -> Any:
        if armed:
            calls.append(None)
        return die() if len(calls) == at else before(*arguments)

    setattr(owner, name, watched)


class Mortal:
    """One of them, as who started it sees it."""

    def __init__(self, maker: Mortals, pid: int) -> None:
        self._maker = maker
        self.pid = pid

    def says(self, word: str) -> None:
        """Wait until it does."""
        found = self._maker.line()
        assert found == word, found

    def arm(self) -> None:
        """From now on it dies when its moment comes."""
        os.kill(self.pid, signal.SIGUSR1)
        self.says("armed")

    def kill(self) -> None:
        """End it, as a server in good health."""
        os.kill(self.pid, signal.SIGKILL)
        self.ended()

    def ended(self) -> None:
        """Wait until it has, and by what."""
        self._maker.tell({"wait": self.pid})
        self.says(f"{-signal.SIGKILL}")


class Mortals:
    """Whoever forks them."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, moment: str, **told: Any) -> Mortal:
        """One that dies at that moment; it has begun."""
        self.tell({"moment": moment, **told})
        return Mortal(self, int(self.line()))

    def tell(self, words: dict[str, Any]) -> None:
        """Ask whoever forks."""
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(words) + "\n")
        self._program.stdin.flush()

    def line(self) -> str:
        """The next thing that anybody said."""
        assert self._program.stdout is not None
        return self._program.stdout.readline().rstrip()

    def close(self) -> None:
        """End all of them."""
        self._program.communicate()


def main() -> None:
    """Fork, and wait, as told; at the end kill whoever is left."""
    left = set[int]()
    for line in sys.stdin:
        told = json.loads(line)
        if "wait" in told:
            left.discard(told["wait"])
            say(str(os.waitstatus_to_exitcode(os.waitpid(told["wait"], 0)[1])))
            continue
        # The child says its first word only when its number has been told.
        begins, begin = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(begin)
            os.read(begins, 1)
            _live(serving if "cluster" in told else TASKS[told["moment"]], told)
        left.add(pid)
        say(str(pid))
        os.close(begin)
        os.close(begins)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _live(life: Callable[[dict[str, Any]], None], told: dict[str, Any]) -> None:
    try:
        sys.stdin = open(os.devnull)  # noqa: SIM115
        life(told)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
