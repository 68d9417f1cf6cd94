"""The README's programs run as they stand, but for a smaller budget, and print what it says."""

import dataclasses
import re
from pathlib import Path

import pytest
from pages import ROOT, page, run, smaller, timeless

import paceline

README = page(ROOT / "README.md")
BUDGETS = {
    "cartpole.py": ("STEPS, GOAL = 256, 100", "STEPS, GOAL = 128, 20"),
    "acrobot.py": ("BATCHES = 10", "BATCHES = 2"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_program_of_the_readme_runs(name: str, tmp_path: Path) -> None:
    run(smaller(README.programs[name], *BUDGETS[name]), name, tmp_path)


def test_the_errors_of_the_readme_are_those_that_are_raised(tmp_path: Path) -> None:
    printed = run(README.programs["errors.py"], "errors.py", tmp_path)
    assert timeless(printed) == timeless(README.parts["errors.py", "output"])


def test_the_league_of_the_readme_keeps_its_generations(tmp_path: Path) -> None:
    printed = run(README.programs["league.py"], "league.py", tmp_path)
    assert printed == README.parts["league.py", "output"]


def test_every_python_block_of_the_readme_belongs_to_a_program() -> None:
    assert README.strays == []
    assert set(README.programs) == {"cartpole.py", "acrobot.py", "errors.py", "league.py"}


def test_the_readme_names_every_field_of_a_batch() -> None:
    fields = {field.name for field in dataclasses.fields(paceline.Batch)} - {"layout"}
    assert set(re.findall(r"^\| `batch\.(\w+)`", README.text, re.MULTILINE)) == fields


def test_the_files_and_commands_that_the_readme_names_exist() -> None:
    files = re.findall(r"\]\((\S+?)\)|`((?:examples|benchmarks)/\S+?)`", README.text)
    named = {link or path for link, path in files}
    assert len(named) >= 7
    assert [name for name in named if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.text, re.MULTILINE):
        assert f"\n{target}:" in makefile
