"""Every engine keeps the one contract."""

from collections.abc import Callable

import pytest

from paceline.engines.base import Engine, engine
from paceline.testing.engines import ENGINE_CHECKS


@pytest.mark.parametrize("name", ["serial", "threads", "processes"])
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_an_engine_keeps_the_contract(
    name: str, check: Callable[[Callable[[], Engine]], None]
) -> None:
    check(lambda: engine(name))
