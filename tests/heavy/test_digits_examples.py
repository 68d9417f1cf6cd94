"""Digits with 2 servers and 3 workers: the accuracy, whoever is killed, and what a backup saves."""

from __future__ import annotations

import re

import pytest
from programs import run

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_digits_reach_97_percent(mode: str) -> None:
    assert "\nsolved: test accuracy " in run("digits.py", "--mode", mode)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_digits_reach_97_percent_while_a_worker_is_killed_every_2_seconds(mode: str) -> None:
    said = run("digits.py", "--mode", mode, "--kill-every", 2)
    killed = re.search(r"workers killed: (\d+)\nsolved: test accuracy ", said)
    assert killed, said
    assert int(killed[1]) >= 1


def test_digits_do_not_wait_for_a_slow_worker_when_there_is_a_backup() -> None:
    options = ("--slow", 20, "--steps", 100, "--goal", 0)
    seconds = []
    for backup in (0, 1):
        said = run("digits.py", *options, "--backup", backup)
        found = re.match(r"100 steps in (\d+\.\d) s; gradients: (\d+) taken, dropped: ", said)
        assert found, said
        assert int(found[2]) == 100 * (3 - backup)
        seconds.append(float(found[1]))
    assert seconds[0] >= 2 * seconds[1]
