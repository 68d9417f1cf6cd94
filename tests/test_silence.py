"""Workers that say nothing for long are told of with their stacks, and left alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import LIMIT, beside, quiet, until

from paceline.core.silence import SILENT, Silences
from paceline.core.stats import Spent, Stats, WorkerStats

pytestmark = pytest.mark.timeout(120)


def at(wall: float, requests: int, starts: int = 1, **options: Any) -> Stats:
    """A run of one worker, `wall` seconds old."""
    told = {"alive": True, "waits": None, "busy": True, **options}
    worker = WorkerStats(
        name="worker:0", starts=starts, collection=None, items=0, version=None, behind=None,
        silent=0.0, spent=Spent(wall, {}), requests=requests, **told,
    )  # fmt: skip
    return Stats(wall, Spent(wall, {}), None, (worker,), {}, {}, {}, {})


def told(*looks: Stats) -> list[list[tuple[str, float]]]:
    silences = Silences()
    return [list(silences.found(look)) for look in looks]


def test_a_silence_is_told_once_and_again_when_it_is_twice_as_long() -> None:
    found = told(*(at(1.0 + wall, 5) for wall in (0, 9.9, SILENT, 19.9, 20.0, 39.9, 40.0)))
    worker = "worker:0"
    assert found == [[], [], [(worker, 10.0)], [], [(worker, 20.0)], [], [(worker, 40.0)]]


def test_a_silence_as_long_as_one_that_was_told_is_not_told_again() -> None:
    assert told(at(0, 1), at(12, 1), at(14, 2), at(30, 2), at(38, 2))[1:] == [
        [("worker:0", 12.0)], [], [], [("worker:0", 24.0)],
    ]  # fmt: skip


def test_a_new_process_is_told_of_anew() -> None:
    assert told(at(0, 1), at(12, 1), at(14, 1, 2), at(24, 1, 2))[3] == [("worker:0", 10.0)]


@pytest.mark.parametrize(
    "options", [{"alive": False}, {"busy": False}, {"waits": "queue 'q'"}, {"requests": 0}]
)
def test_who_waits_or_has_nothing_to_do_is_not_told_of(options: dict[str, Any]) -> None:
    looks = [at(wall, **{"requests": 3, **options}) for wall in (0.0, 20.0, 40.0)]
    assert told(*looks) == [[], [], []]


def test_a_silence_begins_when_the_wait_has_ended() -> None:
    looks = [at(0, 3, waits="start"), at(20, 3, waits="start"), at(29, 3), at(30, 3)]
    assert told(*looks) == [[], [], [], [("worker:0", 10.0)]]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell of silences soon."""
    monkeypatch.setattr("paceline.core.silence.SILENT", 0.2)
    monkeypatch.setattr("paceline.watch.Watch.__init__.__kwdefaults__", QUICKLY)


QUICKLY = {"every": 0.05, "window": 10.0, "beside": True}


def hung(gate: str) -> Iterator[Any]:
    yield os.getpid()
    until(lambda: os.path.exists(gate))
    while True:
        yield os.getpid()


@beside
@pytest.mark.usefixtures("soon")
def test_a_worker_that_hangs_is_told_of_with_its_stack_and_goes_on(
    engine: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = tmp_path / "gate"
    with quiet(1, engine) as cluster:
        caplog.set_level(logging.WARNING, "paceline")
        batches = cluster.collect(hung, str(gate), batch_size=1)
        pid = batches.next(timeout=LIMIT).data[0]
        first = until(lambda: _silent(caplog, " in hung"))
        assert re.match(
            r"worker:0 has said nothing for \d+ s \(seed \d+, item 1, parameters' version none\);"
            r" it is alive, and at:\n(?s:.*) in hung(?s:.*)",
            first,
        )
        gate.touch()
        assert batches.next(timeout=LIMIT).data[0] == pid
        assert cluster.stats().workers[0].starts == 1


@pytest.mark.usefixtures("soon")
def test_a_call_that_takes_long_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def waits(gate: str) -> int:
        until(lambda: os.path.exists(gate))
        return 3

    gate = tmp_path / "gate"
    with quiet(1) as cluster:
        future = cluster.submit(waits, str(gate))
        until(lambda: _silent(caplog, " in waits"))
        gate.touch()
        assert future.result(timeout=LIMIT) == 3


def _silent(caplog: pytest.LogCaptureFixture, at: str) -> str | None:
    found = [text for text in caplog.messages if "has said nothing" in text and at in text]
    return found[0] if found else None
