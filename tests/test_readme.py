"""The README's programs run as they stand, but for a smaller budget, and print what it says."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# A block belongs to the program that the comment above it names; parts are put in order.
BLOCKS = re.findall(r"(?:<!-- (\S+), (part \d|output) -->\n)?```(\w+)\n(.*?)```", README, re.DOTALL)
PARTS = {(name, part): text for name, part, _, text in BLOCKS if name}
PROGRAMS = {
    name: "\n\n".join(PARTS[key] for key in sorted(PARTS) if key[0] == name and key[1] != "output")
    for name, _ in PARTS
}
BUDGETS = {
    "cartpole.py": ("STEPS, GOAL = 256, 100", "STEPS, GOAL = 128, 20"),
    "acrobot.py": ("BATCHES = 10", "BATCHES = 2"),
}
# Each process imports torch, which takes its time on a busy machine.
LIMIT_SECONDS = 100.0


def run(name: str, folder: Path) -> str:
    program = PROGRAMS[name]
    if name in BUDGETS:
        given, smaller = BUDGETS[name]
        assert given in program
        program = program.replace(given, smaller)
    script = folder / name
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_program_of_the_readme_runs(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


def test_the_errors_of_the_readme_are_those_that_are_raised(tmp_path: Path) -> None:
    def timeless(text: str) -> str:
        return re.sub(r"after \d+\.\d s", "after a while", text)

    assert timeless(run("errors.py", tmp_path)) == timeless(PARTS["errors.py", "output"])


def test_every_python_block_of_the_readme_belongs_to_a_program() -> None:
    assert [text for name, _, language, text in BLOCKS if language == "python" and not name] == []
    assert README.count("```python") == sum(language == "python" for _, _, language, _ in BLOCKS)
    assert set(PROGRAMS) == {"cartpole.py", "acrobot.py", "errors.py"}


def test_the_readme_names_every_field_of_a_batch() -> None:
    fields = {field.name for field in dataclasses.fields(paceline.Batch)} - {"layout"}
    assert set(re.findall(r"^\| `batch\.(\w+)`", README, re.MULTILINE)) == fields


def test_the_files_and_commands_that_the_readme_names_exist() -> None:
    files = re.findall(r"\]\((\S+?)\)|`((?:examples|benchmarks)/\S+?)`", README)
    named = {link or path for link, path in files}
    assert len(named) >= 7
    assert [name for name in named if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
