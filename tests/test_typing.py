"""The types that users see are those that were meant."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "typing_cases.py"


@pytest.mark.timeout(180)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_strict_checker_agrees_on_the_types_of_the_public_names(tmp_path: Path) -> None:
    # `make check` runs mypy over the whole tree; this is for who runs the tests only.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(CASES)]
    done = subprocess.run(
        [*command, f"--cache-dir={tmp_path}", "--config-file="],
        capture_output=True,
        text=True,
        check=False,
        cwd=CASES.parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
