"""The examples that need more than the core and torch: JAX, Keras, and a notebook's kernel."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from programs import EXAMPLES, LIMIT_SECONDS, run, steps_taken

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_cartpole_in_jax_runs_with_any_number_of_workers(workers: int) -> None:
    assert steps_taken(run("cartpole_jax.py", "--workers", workers, "--steps", 3000)) >= 3000


def test_cartpole_in_jax_learns() -> None:
    assert run("cartpole_jax.py", "--goal", 100, "--seed", 1).startswith("solved: ")


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_keras_model_is_trained_by_workers_that_never_wait(workers: int) -> None:
    said = run("keras_replica.py", "--workers", workers, "--steps", 300, "--goal", 0.85)
    made = re.match(r"(\d+) steps, by worker: ([\d, ]+)\nsolved: test accuracy ", said)
    assert made, said
    assert int(made[1]) == 300
    assert len(made[2].split(", ")) == workers


# Runs all cells of a notebook, then those that train once more, in the same kernel.
NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
nbformat.validate(notebook)
notebook.cells += [
    nbformat.v4.new_code_cell(cell.source) for cell in notebook.cells if "Cluster" in cell.source
]
NotebookClient(notebook, timeout=int(sys.argv[2])).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text") or output["data"]["text/plain"])
"""


def test_the_notebook_runs_and_its_cells_run_again() -> None:
    path = EXAMPLES / "quickstart.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, path, str(int(LIMIT_SECONDS))],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^mean return 1[5-9]\d\.\d after \d+ batches$", done.stdout, re.M)) == 2
    assert done.stdout.count("'obs': (") == 2
