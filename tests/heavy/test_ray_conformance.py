"""The same programs as on every other engine, on a Ray cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conformance import ON_ONE_CLUSTER, RAY, WHOLE, name_of
from rays import joined, nothing_of_ours, warned

import paceline

pytestmark = [warned, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[None]:
    with joined(num_cpus=4):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """In place of the look at this process and its children: actors are Ray's."""


@pytest.fixture(scope="module")
def cluster(nodes: None) -> Iterator[paceline.Cluster]:
    """One for all that do not end it: to start actors takes the longest."""
    with nothing_of_ours(), RAY.cluster() as made:
        yield made


@pytest.mark.parametrize("program", ON_ONE_CLUSTER, ids=name_of)
def test_a_program_means_the_same(program: Any, cluster: paceline.Cluster) -> None:
    program(RAY, cluster)


@pytest.mark.parametrize("program", WHOLE, ids=name_of)
def test_an_end_means_the_same(program: Any, caplog: pytest.LogCaptureFixture) -> None:
    with nothing_of_ours():
        program(RAY, caplog)
