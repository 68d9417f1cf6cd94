"""Servers that are started again, as far as it does not matter what they are."""

from __future__ import annotations

import queue
import threading

import pytest

from paceline.core.errors import Disconnected
from paceline.revival import Revival

LIMIT = 30.0


class Fakes:
    """What a revival is given, and what it has done with it."""

    def __init__(self, restarts: int = 3) -> None:
        self.heard: queue.Queue[tuple[str, str]] = queue.Queue()
        self.wrong: list[BaseException] = []
        self.revival = Revival(self._start, self._restore, self._give_up, restarts)

    def _start(self, task: str) -> None:
        self.heard.put(("start", task))

    def _restore(self) -> None:
        if self.wrong:
            raise self.wrong.pop()
        self.heard.put(("restore", ""))

    def _give_up(self, why: str) -> None:
        self.heard.put(("give up", why))

    def next(self) -> tuple[str, str]:
        return self.heard.get(timeout=LIMIT)


def test_a_server_is_started_and_then_what_it_held_is_brought_back() -> None:
    fakes = Fakes()
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    assert [fakes.next(), fakes.next()] == [("start", "ps:0"), ("restore", "")]
    fakes.revival.ended("ps:1", "was killed by SIGKILL")
    assert [fakes.next(), fakes.next()] == [("start", "ps:1"), ("restore", "")]
    assert fakes.revival.counts == {"ps:0": 1, "ps:1": 1}
    fakes.revival.close()


def test_beyond_its_budget_it_is_given_up_and_that_says_how_it_ended() -> None:
    fakes = Fakes(restarts=1)
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    assert [fakes.next()[0], fakes.next()[0]] == ["start", "restore"]
    fakes.revival.ended("ps:0", "ended with exit status 3")
    why = "the server, ps:0, ended with exit status 3: it ended 2 times within 60 s, its budget is"
    assert fakes.next() == ("give up", f"{why} restarts=1")
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    fakes.revival.close()
    assert fakes.heard.empty()


def test_one_that_ends_while_it_is_brought_back_is_started_once_more() -> None:
    fakes = Fakes()
    fakes.wrong.append(Disconnected("gone"))
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    assert fakes.next() == ("start", "ps:0")
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    assert [fakes.next(), fakes.next()] == [("start", "ps:0"), ("restore", "")]
    fakes.revival.close()


@pytest.mark.parametrize("error", [Disconnected("no checkpoint"), ArithmeticError("a mistake")])
def test_what_cannot_be_brought_back_is_given_up(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.revival.NOTICE", 0.01)
    fakes = Fakes()
    fakes.wrong.append(error)
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    assert fakes.next() == ("start", "ps:0")
    what, why = fakes.next()
    assert what == "give up"
    assert str(error) in why
    fakes.revival.close()


def test_one_that_was_closed_starts_nothing() -> None:
    fakes = Fakes()
    fakes.revival.close()
    fakes.revival.close()
    fakes.revival.ended("ps:0", "was killed by SIGKILL")
    assert fakes.heard.empty()
    assert "paceline-revival" not in [thread.name for thread in threading.enumerate()]
