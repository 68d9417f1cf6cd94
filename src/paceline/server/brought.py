"""Something that was noted once, and is to be made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.core.facts import Facts
from paceline.core.queue_items import Run
from paceline.server.lines import Peer


@dataclass(frozen=True, slots=True)
class Brought:
    """What was noted, by whom it was brought, and what is said of each run."""

    peer: Peer
    key: str
    facts: Any
    runs: list[Run]
    about: list[Any]


Maker: TypeAlias = tuple[type[Facts], Callable[[Brought], None]]
"""Which facts it takes, and what makes it; that raises if it cannot, and nothing was done."""
