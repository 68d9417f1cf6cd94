"""Calls that wait, made in threads of their own."""

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline import Session
from paceline.core import messages as m

DEADLINE_SECONDS = 30.0


class Call(threading.Thread):
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._arguments = arguments
        self._value: object = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call(*self._arguments)
        except BaseException as e:
            self._error = e

    def outcome(self) -> Any:
        """What it returned, once it has; what it raised is raised."""
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive(), "the call goes on"
        if self._error is not None:
            raise self._error
        return self._value


def until(condition: Callable[[], object]) -> None:
    """Ask again and again until `condition()` is true."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"


def waits(session: Session, kind: str) -> int:
    """How many calls wait on the server for that."""
    members = session.connection.call(m.Stats()).content["members"].values()
    return sum(key[0] == kind for member in members for key, _ in member["waits"])
