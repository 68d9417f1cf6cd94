"""The Ray engine keeps the contract of all engines, and says what it cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rays import joined, nothing_of_ours, warned

from paceline.engines.base import Engine, engine
from paceline.testing.engines import ENGINE_CHECKS

pytestmark = warned


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with joined(num_cpus=4):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_of_ours():
        yield


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[Callable[[], Engine]], None]) -> None:
    check(lambda: engine("ray"))
