"""Rows of variables, taken and added to without moving the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.core import versions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """Rows of one version, copied: the arrays own their memory and may be written."""

    version: int
    tree: T

    @property
    def count(self) -> int:
        """How many writes its epoch has had up to this version; messages show this number."""
        return versions.count_of(self.version)

    def __repr__(self) -> str:
        return f"<Rows of version {self.count}>"
