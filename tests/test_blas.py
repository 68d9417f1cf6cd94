"""How many threads linear algebra works with is asked of the libraries themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paceline import blas
from paceline.preflight import limits

LIMIT_SECONDS = 50.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="libraries are found on Linux")


def told(program: str, threads: int) -> dict[str, int]:
    """What `threads` says in a process that was started with so many."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport json; print(json.dumps(blas.threads()))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
        env={**os.environ, **dict.fromkeys(names, str(threads))},
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@on_linux
@pytest.mark.skipif(limits()[0] < 2, reason="a library has one thread on one core")
@pytest.mark.parametrize("threads", [1, 2])
def test_the_library_of_numpy_tells_its_threads(threads: int) -> None:
    found = told("import numpy; from paceline import blas", threads)
    assert found
    assert set(found.values()) == {threads}
    assert "torch" not in found


@pytest.mark.slow
def test_torch_is_asked_only_where_it_is_loaded() -> None:
    pytest.importorskip("torch")
    program = "import torch; from paceline import blas; torch.set_num_threads({})"
    assert told(program.format(1), 1)["torch"] == 1
    assert told(program.format(3), 1)["torch"] == 3


def test_several_threads_are_told_with_their_numbers_and_the_way_out() -> None:
    assert blas.several("the chief", {}) is None
    assert blas.several("the chief", {"libopenblas": 1, "torch": 1}) is None
    said = blas.several("the chief", {"torch": 4, "libopenblas": 2, "libmkl_rt": 1})
    assert said is not None
    assert said.startswith(
        "lockstep with several threads in the chief (libopenblas 2, torch 4): they may round"
    )
    for way in ("OPENBLAS_NUM_THREADS=1", "torch.set_num_threads(1)", "worker_threads=1"):
        assert way in said
