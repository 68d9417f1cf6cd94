"""Which server is to have which leaf of a model that is linked: as told, by `device`, or evenly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core import spreading
from paceline.core.errors import PacelineError, SchemaError
from paceline.core.spreading import Placement
from paceline.lines import Lines
from paceline.placement import placed


class LeafPlaces:
    """Where the leaves of a replica go; by `placement`, if that is given."""

    def __init__(self, lines: Lines, name: str, placement: Placement | None) -> None:
        self._what = f"replica '{name}'"
        spreading.check_placement(placement, self._what)
        self._lines, self._name, self._placement = lines, name, placement

    def told(self, leaves: Mapping[str, Any]) -> list[list[str]] | None:
        """The tasks that `placement` chooses for each array; `None` without one."""
        if self._placement is None:
            return None
        return spreading.placed(self._placement, [*sizes(leaves).items()], self._what)

    def wished(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """The task of each leaf, if there is a setter to choose it."""
        tasks = self._lines.tasks
        chosen = callable(self._lines.device) and self._placement is None and len(tasks) > 1
        return self.each(leaves) if chosen else {}

    def each(self, leaves: Mapping[str, Any]) -> dict[str, str]:
        """The one task of each leaf: by `placement`, by `device`, or that with the fewest bytes."""
        tasks, arrays = self._lines.tasks or ["ps:0"], sizes(leaves)
        chosen = self.told(leaves)
        if chosen is None:
            wished = placed(self._name, arrays, tasks, self._lines.device)
            chosen = [[task] for task in wished]
        tasked = {leaf: self._one(leaf, each) for leaf, each in zip(arrays, chosen, strict=True)}
        first = next(iter(tasked.values()), tasks[0])
        return {leaf: tasked.get(leaf, first) for leaf in leaves}

    def _one(self, leaf: str, chosen: list[str]) -> str:
        if len(chosen) > 1:
            raise SchemaError(f"{self._what}: '{leaf}' is on one task if sharded, not on {chosen}")
        try:
            return self._lines.server(chosen[0])
        except PacelineError as e:
            raise type(e)(f"{self._what}: leaf {leaf}: {e}") from e


def sizes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of the arrays among them."""
    return {name: leaf.nbytes for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
