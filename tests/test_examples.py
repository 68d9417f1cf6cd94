"""Every example runs, with 1, 2 and 4 workers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Each process imports torch, which takes its time on a busy machine.
LIMIT_SECONDS = 110.0


def run(name: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", ["cartpole_torch.py", "session_loop.py"])
def test_an_example_runs_with_any_number_of_workers(name: str, workers: int) -> None:
    said = run(name, "--workers", workers, "--steps", 3000)
    found = re.fullmatch(r"(?:not )?solved: mean return (\d+\.\d) after (\d+) steps\n", said)
    assert found, said
    assert int(found[2]) >= 3000


def test_the_session_loop_solves_its_task() -> None:
    assert run("session_loop.py", "--seed", 1).startswith("solved: ")


def test_every_example_is_run_here() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {"cartpole_torch.py", "session_loop.py"}
