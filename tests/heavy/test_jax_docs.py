"""The program in JAX that the docs show, which needs what `make test` does not install."""

from pathlib import Path

import pytest
from pages import ROOT, page, run

COLLECT = page(ROOT / "docs" / "collect.md")


@pytest.mark.timeout(120)
def test_the_program_in_jax_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    printed = run(COLLECT.programs["with_jax.py"], "with_jax.py", tmp_path)
    assert printed == COLLECT.parts["with_jax.py", "output"]
