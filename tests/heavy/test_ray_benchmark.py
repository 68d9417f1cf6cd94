"""The benchmark beside Ray runs and reports; how fast anything is, is not asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "beside_ray.py"


@pytest.mark.timeout(180)
def test_each_figure_is_beside_that_of_ray() -> None:
    command = [sys.executable, str(PROGRAM), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"│ +>= \d+ │", done.stdout)) == 5
