"""A variable: one tree, one version for all of it."""

from __future__ import annotations

from typing import Literal

from paceline.core import tree, versions
from paceline.core.waiting import NOT_YET, NotYet, Stored


class VariableState:
    """The newest tree of one variable. Older ones live as long as somebody holds them."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.version = versions.first(epoch)
        self.stored: Stored | None = None
        self._adding = False

    def define(self, first: Stored, *, overwrite: bool = False) -> bool | NotYet:
        """Initialise, or find it initialised; whether `first` was taken.

        Raises:
            SchemaError: it exists with another structure.
        """
        if self.stored is None:
            return self._commit(first) > 0
        self._check("variable", first)
        if not overwrite:
            return False
        return NOT_YET if self._adding else self._commit(first) > 0

    def defined(self) -> Literal[True] | NotYet:
        """Whether it has a value."""
        return NOT_YET if self.stored is None else True

    def assign(self, new: Stored) -> int | NotYet:
        """Replace the tree; the new version. Not while an addition is being computed.

        Raises:
            SchemaError: `new` has another structure.
        """
        if self.stored is not None:
            self._check("assign", new)
        return NOT_YET if self._adding else self._commit(new)

    def begin_add(self, delta: Stored) -> Stored | NotYet:
        """Take the write turn; the tree that `delta` is to be added to.

        Raises:
            SchemaError: `delta` has another structure.
        """
        if self.stored is None or self._adding:
            return NOT_YET
        self._check("assign_add", delta)
        self._adding = True
        return self.stored

    def end_add(self, total: Stored | None) -> int:
        """Give the write turn back; the version, a new one unless `total` is `None`."""
        self._adding = False
        return self.version if total is None else self._commit(total)

    def read(self, newer_than: int) -> tuple[int, Stored] | NotYet:
        """The newest version and its tree, once it is above `newer_than`."""
        if self.stored is None or self.version <= newer_than:
            return NOT_YET
        return self.version, self.stored

    def _commit(self, new: Stored) -> int:
        # Version and tree change in one step, so no reader can pair an old one with a new one.
        self.stored, self.version = new, self.version + 1
        return self.version

    def _check(self, what: str, new: Stored) -> None:
        assert self.stored is not None
        tree.check(new.layout, self.stored.layout, f"{what} '{self.name}'")
