"""Servers that say where they are, and are reached in the nearest way that there is."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paceline import Refused, Session, ps
from paceline.core import messages as m
from paceline.engines.base import Exit, Listener, Stream, Task, TaskSpec, engine
from paceline.transports.base import Address, ways

SECRET = b"s" * 32
LIMIT = 30.0


class Heard(Listener):
    """Keeps what a server says."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def received(self, task: Task, message: object, /) -> None:
        self.said.put(message)

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        pass

    def ended(self, task: Task, how: Exit, /) -> None:
        self.said.put(how)


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """What opens a session on a server in a process of its own."""
    with engine("processes") as started:
        heard = Heard()
        task = started.start(TaskSpec("ps:0", ps.run), heard)
        task.send(ps.ServeAt("", SECRET))
        place = heard.said.get(timeout=LIMIT)
        assert isinstance(place, ps.Place), place
        task.send(ps.Servers((place.target,)))
        assert heard.said.get(timeout=LIMIT) == ps.UP
        yield place.target


def test_an_address_that_is_near_is_reached_by_name_first() -> None:
    near = Address.parse("near:10.0.0.1:4032")
    assert [*map(str, ways(near))] == ["unix:@paceline-10.0.0.1:4032", "tcp:10.0.0.1:4032"]
    for text in ("tcp:10.0.0.1:4032", "unix:/place"):
        assert [*map(str, ways(Address.parse(text)))] == [text]


def test_processes_of_its_host_share_memory_with_a_near_server(target: str) -> None:
    assert target.startswith("near:127.0.0.1:")
    with (
        Session(target, secret=SECRET) as session,
        Session(target.replace("near:", "tcp:"), secret=SECRET) as other,
    ):
        policy = session.variable("policy", np.arange(1 << 16))
        assert other.variable("policy").read().version == policy.version
        assert session.connection.shares_memory
        assert not other.connection.shares_memory


def test_who_knows_of_a_death_ends_what_a_session_would_be_waited_for(target: str) -> None:
    far = target.replace("near:", "tcp:")
    said = r"^open a session.* as worker:0|worker:0"
    with (
        Session(target, secret=SECRET, job="chief", index=0) as chief,
        Session(far, secret=SECRET, job="worker", index=0),
    ):
        with pytest.raises(Refused, match=said):
            Session(far, secret=SECRET, job="worker", index=0, timeout=0.5)
        with Session(far, secret=SECRET, job="worker", index=1) as other:
            other.connection.call(m.Dead("worker", 0))  # who is no chief has no say in it
            with pytest.raises(Refused, match=said):
                Session(far, secret=SECRET, job="worker", index=0, timeout=0.5)
        chief.connection.call(m.Dead("worker", 0))
        with Session(far, secret=SECRET, job="worker", index=0) as successor:
            assert successor.variable("x", 1.0).read().tree == 1.0
