"""The same programs on every engine of this host; tests/heavy has them on Ray."""

from __future__ import annotations

from typing import Any

import pytest
from conformance import ON_ONE_CLUSTER, PROCESSES, RAY, SERIAL, THREADS, WHOLE, Kind, name_of
from pages import ROOT, page

each_kind = pytest.mark.parametrize("kind", [SERIAL, THREADS, PROCESSES], ids=str)


@each_kind
@pytest.mark.parametrize("program", ON_ONE_CLUSTER, ids=name_of)
def test_a_program_means_the_same(program: Any, kind: Kind) -> None:
    with kind.cluster() as cluster:
        program(kind, cluster)


# Each starts many processes; other tests show the same of these in less time.
@pytest.mark.parametrize(
    "kind", [SERIAL, THREADS, pytest.param(PROCESSES, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("program", WHOLE, ids=name_of)
def test_an_end_means_the_same(program: Any, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    program(kind, caplog)


FIELDS = {
    "workers go on beside the chief": "beside",
    "a worker is a process of its own": "alone",
    "a function runs in the main thread": "main",
    "how far a worker that died was is known": "near",
}


def test_the_docs_say_what_an_engine_does_otherwise() -> None:
    text = page(ROOT / "docs" / "collect.md").text.split("### What differs, by design\n")[1]
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    kinds = {str(kind): kind for kind in (PROCESSES, RAY, THREADS, SERIAL)}
    assert [name.strip('`"') for name in head[1:]] == list(kinds)
    assert all(len(row) == len(head) and all(row) for row in rows)
    said = {row[0]: [cell.startswith("yes") for cell in row[1:]] for row in rows}
    for row, field in FIELDS.items():
        assert said[row] == [getattr(kind, field) for kind in kinds.values()]
