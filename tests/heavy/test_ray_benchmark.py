"""The benchmarks beside Ray run and report; how fast anything is, is not asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces

pytest.importorskip("ray")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "beside_ray.py"


@pytest.mark.timeout(180)
def test_each_figure_is_beside_that_of_ray() -> None:
    command = [sys.executable, str(PROGRAM), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"│ +>= \d+ │", done.stdout)) == 5


@needs_namespaces
@pytest.mark.timeout(240)
def test_hosts_are_compared_with_sockets_and_ray() -> None:
    words = "--hosts 2 --megabytes 4 --versions 2".split()
    command = [sys.executable, str(PROGRAM.with_name("hosts.py")), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^│ (\S.+?) +│ +([\d.]+) │ +[\d.]+ │", done.stdout, re.MULTILINE)
    assert [how for how, _ in rows] == [
        "paceline, with mirrors",
        "paceline, without",
        "a socket to each worker",
        "ray.put, ray.get",
    ]
    once, twice = float(rows[0][1]), float(rows[1][1])
    assert 4 <= once < 5
    assert 8 <= twice < 10
