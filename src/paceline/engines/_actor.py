"""What runs in the process of a Ray actor: the task's end of its line, and its target."""

from __future__ import annotations

import itertools
import os
import pickle
import platform
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
import ray.util

from paceline._version import __version__
from paceline.core.clock import checked_timeout
from paceline.core.errors import TimedOut
from paceline.engines.base import Exit, Link, readable, run_through

PROTOCOL = 5

# Each kind of call has a thread of its own, so that none waits for another.
GROUPS = {"give": 1, "take": 1, "work": 1, "look": 1}

REMEDY = (
    "install it on every node, or send it there: ray.init(runtime_env={'working_dir': ...}) or"
    " {'py_modules': [...]}"
)


def versions() -> dict[str, str]:
    """What has to be the same at both ends of a line."""
    return {"paceline": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


def host(namespace: str = "pid") -> str:
    """Something that only processes of one host have in common, and of one such namespace.

    These can see each other or, for `net`, reach each other by names.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return platform.node()


class ActorLink(Link):
    """The task's end of the line; several threads may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inbox: deque[bytes] = deque()
        self._outbox: list[bytes] = []
        self._hung_up = False
        self._end: Exit | None = None
        self.host = ray.util.get_node_ip_address()
        self.remedy = f"on the node {self.host}: {REMEDY}"

    def send(self, message: object) -> None:
        body = pickle.dumps(message, PROTOCOL)
        with self._changed:
            self._outbox.append(body)
            self._changed.notify_all()

    def receive(self, timeout: float | None = None) -> object:
        limit = checked_timeout(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: self._inbox or self._hung_up, limit):
                raise TimedOut(f"receive from the launcher after {limit} s: no message")
            if not self._inbox:
                raise EOFError("the launcher closed the line")
            body = self._inbox.popleft()
        return pickle.loads(body)

    def give(self, bodies: list[bytes], hang_up: bool) -> None:
        """Put what the launcher sent where it is received."""
        with self._changed:
            self._inbox.extend(bodies)
            self._hung_up = self._hung_up or hang_up
            self._changed.notify_all()

    def take(self) -> tuple[list[bytes], Exit | None]:
        """Wait for what the task sends, or for its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._end)
            bodies, self._outbox = self._outbox, []
            return bodies, self._end

    def end(self, how: Exit) -> None:
        """The target has ended."""
        with self._changed:
            self._end = how
            self._changed.notify_all()


class Actor:
    """A task. Its methods are for the engine, each on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._link = ActorLink()
        self._thread: int | None = None

    def __repr__(self) -> str:
        # Ray puts it in front of what the task prints.
        return self._name

    def breathe(self) -> dict[str, Any]:
        """Say what this process is, and whether a target has run in it."""
        return {
            "versions": versions(),
            "node": ray.get_runtime_context().get_node_id(),
            "address": self._link.host,
            "host": host(),
            "network": host("net"),
            "pid": os.getpid(),
            "used": self._thread is not None,
        }

    def work(self, target: bytes, path: list[str]) -> None:
        """Run the target; how it ends is told by `take`.

        Modules are looked for in the folders of `path` too, as far as this node has them.
        """
        self._thread = threading.get_ident()
        sys.path += [each for each in path if each not in sys.path and os.path.isdir(each)]
        try:
            run_through(_loaded(target), self._link)
        except BaseException as e:
            self._link.end(Exit.by(e))
        else:
            self._link.end(Exit(status=0))

    def give(self, bodies: list[bytes], hang_up: bool) -> None:
        """Hand over what the launcher sent since the last time."""
        self._link.give(bodies, hang_up)

    def take(self) -> tuple[list[bytes], Exit | None]:
        """Wait for what the task sends."""
        return self._link.take()

    def look(self) -> str:
        """What the target's thread runs in Python, the innermost call first."""
        frame = sys._current_frames().get(self._thread or 0)
        if frame is None:
            return ""
        # What is further out, from `work` on, is Ray's.
        ours = itertools.takewhile(
            lambda call: call[0].f_code.co_filename != __file__, traceback.walk_stack(frame)
        )
        calls = [
            f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
            for each, line in ours
        ]
        return readable("\n".join(["The worker's thread (most recent call first):", *calls]))


def _loaded(target: bytes) -> Callable[[Link], Any]:
    found: Callable[[Link], Any] = pickle.loads(target)
    return found
