"""The README's programs run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_readme_runs(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAMS[number])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_there_are_programs_and_both_commands() -> None:
    assert len(PROGRAMS) == 2
    assert "make demo" in README
    assert "make test" in README
