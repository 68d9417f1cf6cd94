"""What the workers of a lockstep collection read while they make the items of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.core.variable_state import VariableState


class Round:
    """The versions that were current when a batch was asked for, held until it is complete.

    `freed` is told of a variable whose memory has become free.
    """

    def __init__(
        self, what: str, variables: Mapping[str, VariableState], freed: Callable[[str], None]
    ) -> None:
        self._what = what
        self._variables = variables
        self._freed = freed
        self._versions: dict[str, int] = {}
        self._going = False

    def __str__(self) -> str:
        return self._what

    def begin(self) -> None:
        """Hold the current version of every variable."""
        self._going = True
        for state in self._variables.values():
            self.defined(state)

    def end(self) -> None:
        """Let go of them; until the next round its workers read what is current. Idempotent."""
        self._going = False
        versions, self._versions = self._versions, {}
        for name, version in versions.items():
            if self._variables[name].kept.let_go(version, self):
                self._freed(name)

    def forget(self, name: str) -> None:
        """A variable is not there any more."""
        self._versions.pop(name, None)

    def defined(self, state: VariableState) -> None:
        """A variable is there; if it was not before, its first version is this round's."""
        if self._going and state.stored is not None and state.name not in self._versions:
            self._versions[state.name] = state.version
            state.kept.hold(state.version, self)

    def version(self, name: str) -> int | None:
        """This round's version of a variable; `None` between rounds."""
        return self._versions.get(name)
