"""What desks have in common whose resources are in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, Protocol, TypeVar

from paceline.core.errors import SchemaError
from paceline.core.facts import Facts, Noted
from paceline.server.brought import Brought, Maker
from paceline.server.named_desk import Named, NamedDesk, spelled


class Kept(Named, Protocol):
    """The state of one resource that can be made again."""

    @property
    def pristine(self) -> bool:
        """Whether it is as it was made."""

    def noted(self) -> Noted:
        """All that it is."""


S = TypeVar("S", bound=Kept)


class KeptDesk(NamedDesk[S], Generic[S]):
    """Resources of which note is taken, as `facts` and pieces, and that are made again of these."""

    facts: ClassVar[type[Facts]]

    def noted(self, wanted: Callable[[str], bool]) -> Iterable[tuple[str, str, Noted]]:
        for name, state in self.states.items():
            if wanted(name):
                yield self.kind, name, state.noted()

    def makers(self) -> dict[str, Maker]:
        return {self.kind: (self.facts, self._make_again)}

    @abstractmethod
    def again(self, brought: Brought) -> S:
        """One with the definition of what was noted, as it would be made."""

    @abstractmethod
    def fill(self, state: S, brought: Brought) -> None:
        """Let such a one be what was noted, or raise. Who waits for it is asked again."""

    def _make_again(self, brought: Brought) -> None:
        new = self.again(brought)
        state = self.states.get(new.name, new)
        if state.definition != new.definition:
            raise SchemaError(f"it exists with {spelled(state.definition)}")
        if not state.pristine:
            raise SchemaError("it exists, and has been used")
        self.fill(state, brought)
        self.keep(brought.peer, new.name, new.definition, lambda: new)
