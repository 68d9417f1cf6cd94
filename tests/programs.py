"""The programs in `examples/`, run as users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Each process imports a framework, which takes its time on a busy machine.
LIMIT_SECONDS = 230.0
# How many workers an example is run with.
WORKERS = [
    pytest.param(1, marks=pytest.mark.slow),
    2,
    pytest.param(4, marks=pytest.mark.slow),
]


def run(name: str, *args: object) -> str:
    """What an example printed, when it has ended well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_taken(said: str) -> int:
    """How many steps a run took by its one line, which says whether the task was solved."""
    found = re.fullmatch(r"(?:not )?solved: mean return (\d+\.\d) after (\d+) steps\n", said)
    assert found, said
    return int(found[2])
