"""The fourth question, with TensorFlow's own graphs in every process."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from programs import run

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs tensorflow")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_graphs_linked_by_their_variables_learn(workers: int) -> None:
    said = run("between_graph/q4_tensorflow.py", "--workers", workers)
    linked = ", ".join(rf"worker:{n} \(process \d+\)" for n in range(workers))
    assert re.search(rf"linked to its parameters: {linked}\n", said)
    assert "each step was made of 4 items of the version just before it" in said
    found = re.search(r"mean return (\d+\.\d) at first, (\d+\.\d) after \d+ steps", said)
    assert found
    assert float(found[1]) < 50 < 100 <= float(found[2])


@pytest.mark.timeout(180)
def test_the_questions_include_that_on_tensorflow() -> None:
    said = run("between_graph", "q4_tensorflow")
    assert said.startswith("q4_tensorflow: ")
    assert "left out" not in said
