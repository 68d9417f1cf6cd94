"""How long a reply is waited for: until its caller's time is over, and the server is silent."""

from __future__ import annotations

import math
import random
import signal
import time
from typing import Any, cast

import numpy as np
import pytest
from calls import Call

from paceline import pending
from paceline.core import messages as m
from paceline.pending import GRACE, LATE, SILENCE, Pending, limited, within
from paceline.testing import Serving, serving


def asked(timeout: float | None) -> Pending:
    return Pending(cast(Any, None), 1, "requests", timeout, None)


def test_without_a_time_of_its_callers_a_server_is_given_a_minute() -> None:
    made = asked(2.0)
    assert made.due is None
    assert made.until is not None
    assert made.until == pytest.approx(made.since + 2 + GRACE, abs=0.1)
    assert made.look(made.until, made.since) == "gone"
    assert asked(None).until is None


def test_a_silent_server_is_asked_once_and_then_given_up() -> None:
    made = within(2.0, asked, 2.0)
    due = made.due
    assert due is not None
    assert due == pytest.approx(made.since + 2, abs=0.1)
    assert made.until == due + LATE
    assert made.look(due + LATE, due) == "ask"
    assert made.until == due + SILENCE
    assert made.look(due + SILENCE, due) == "silent"
    assert made.look(due + SILENCE, due + LATE) == "ask"


def test_who_looks_late_gives_the_server_its_time_all_the_same() -> None:
    made = within(0.0, asked, 0.0)
    now = made.since + 10
    assert made.look(now, made.since) == "ask"
    assert made.until == now + SILENCE - LATE


def test_a_server_that_gives_signs_of_life_is_given_a_minute() -> None:
    made = within(2.0, asked, 2.0)
    now, found = made.since, set()
    while (said := made.look(now, now)) != "gone":
        found.add(said)
        assert made.until is not None
        now = made.until
    assert found == {"ask"}
    assert now == pytest.approx(made.since + 2 + GRACE, abs=0.1)


def test_a_server_in_this_process_is_never_asked() -> None:
    made = within(2.0, asked, None)
    assert made.look(made.since + 3, None) == "wait"
    assert made.until is None


def test_the_outer_time_holds() -> None:
    @limited
    def inner(timeout: float | None = 1.0) -> float | None:
        return asked(0.0).due

    def until(due: float | None) -> float:
        return math.inf if due is None else due - asked(0.0).since

    assert until(inner()) == pytest.approx(1, abs=0.1)
    assert until(inner(7)) == pytest.approx(7, abs=0.1)
    assert until(inner(timeout=3)) == pytest.approx(3, abs=0.1)
    assert until(inner(None)) == math.inf
    assert until(within(20.0, inner)) == pytest.approx(20, abs=0.1)
    assert until(within(20.0, within, 2.0, inner)) == pytest.approx(20, abs=0.1)
    assert until(within(None, inner, 1)) == math.inf
    assert asked(0.0).due is None
    with pytest.raises(ValueError, match=r"^timeout must be >= 0 seconds or None, not -1$"):
        inner(-1)


def test_no_interrupt_leaves_a_time_behind() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    @limited
    def inner(*, timeout: float = 1.0) -> None:
        within(timeout, int)

    before = signal.signal(signal.SIGALRM, interrupt)
    heard, end = 0, time.monotonic() + 0.5
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-4))
                while True:
                    inner()
            except Interrupted:
                heard += 1
            assert asked(0.0).due is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard > 100


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_a_server_that_has_no_verdict_yet_and_is_there_is_waited_for(
    carrier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "LATE", 0.05)
    monkeypatch.setattr(pending, "SILENCE", 0.3)
    with serving(carrier, where="thread") as made:
        read_on_and_on(made)


def read_on_and_on(server: Serving) -> None:
    session = server.session()
    variable = session.variable("v", np.zeros(3))

    # No server waits so long for one who gave no time; so this is as work that lasts.
    request = m.Read(variable.key, variable.version, None)
    call = Call(within, 0.0, session.connection.exchange, request)
    call.join(1.5)
    assert call.is_alive()
    assert variable.assign(np.ones(3)) == call.outcome()[0].version
