"""Writes of a spread variable on their way: what its home has granted, what the others have staged.

A stage is a number that the home alone gives out, and that only grows; its epoch is in the high
bits, as for versions. What stages are needed never grows for those given out: a version that nobody
keeps is not kept again. So a part may act late on what the home said of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.core import versions
from paceline.core.errors import Refused
from paceline.core.waiting import Stored


@dataclass(frozen=True, slots=True)
class Grant:
    """A stage that somebody may write; `turn`: the variable's write turn is theirs."""

    name: str
    holder: object
    turn: bool


class Grants:
    """The stages of a home that may still be committed. All else that was staged never existed."""

    def __init__(self, epoch: int) -> None:
        self._last = versions.first(epoch)
        self._open: dict[int, Grant] = {}

    @property
    def below(self) -> int:
        """The first stage that was not given out yet."""
        return self._last + 1

    def begin(self, epoch: int) -> None:
        """All stages from now on are of that epoch, or of a later one."""
        self._last = max(self._last, versions.first(epoch))

    def grant(self, name: str, holder: object, *, turn: bool) -> int:
        """The next stage, for a write of the variable of that name."""
        self._last += 1
        self._open[self._last] = Grant(name, holder, turn)
        return self._last

    def of(self, name: str) -> set[int]:
        """The stages of a variable that may still be committed."""
        return {stage for stage, grant in self._open.items() if grant.name == name}

    def check(self, name: str, stage: int, holder: object, *, turn: bool) -> None:
        """Whether `holder` may commit that stage.

        Raises:
            Refused: it was not given it, or has abandoned it.
        """
        if self._open.get(stage) != Grant(name, holder, turn):
            raise Refused(
                f"commit '{name}': stage {versions.count_of(stage)} was not granted to this session"
                " for that, or was abandoned"
            )

    def keep(self, stage: int) -> None:
        """It is being committed: its holder's end does not end it any more."""
        grant = self._open[stage]
        self._open[stage] = Grant(grant.name, None, grant.turn)

    def end(self, stage: int) -> None:
        """It has been committed, or never will be."""
        self._open.pop(stage, None)

    def abandon(self, name: str, stage: int, holder: object) -> Grant | None:
        """End a stage that its holder gives up; what it was, if it was theirs."""
        grant = self._open.get(stage)
        if grant is None or (grant.name, grant.holder) != (name, holder):
            return None
        return self._open.pop(stage)

    def lost(self, holder: object) -> list[Grant]:
        """End what a peer that is gone was granted."""
        gone = {stage: grant for stage, grant in self._open.items() if grant.holder is holder}
        for stage in gone:
            del self._open[stage]
        return list(gone.values())

    def reset(self, gone: Callable[[str], bool]) -> None:
        """End what was granted for variables that are gone."""
        self._open = {stage: one for stage, one in self._open.items() if not gone(one.name)}


class PartState:
    """What one server has of a variable whose home is another: trees by their stage."""

    def __init__(self) -> None:
        self.trees: dict[int, Stored] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all its trees."""
        return sum(tree.nbytes for tree in self.trees.values())

    def drop(self, keep: Iterable[int], below: int) -> None:
        """Let go of what the home does not need: all below `below` that is not in `keep`."""
        needed = set(keep)
        for stage in [each for each in self.trees if each < below and each not in needed]:
            del self.trees[stage]
