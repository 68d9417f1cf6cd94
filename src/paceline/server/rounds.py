"""Which readers read the versions of a round of lockstep, instead of the current ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.core.round import Round
from paceline.core.variable_state import VariableState
from paceline.server.lines import Peer


class Rounds:
    """The rounds of a server, and who makes items for which; `freed` as for `Round`."""

    def __init__(
        self, variables: Mapping[str, VariableState], freed: Callable[[str], None]
    ) -> None:
        self._variables = variables
        self._freed = freed
        self._rounds: list[Round] = []
        self._pinned: dict[Peer, Round] = {}

    def begin(self, what: str) -> Round:
        """A round whose workers are to be pinned to it, until it is forgotten."""
        made = Round(what, self._variables, self._freed)
        self._rounds.append(made)
        return made

    def forget(self, ended: Round | None) -> None:
        """Let go of what a round holds, and of the round."""
        if ended in self._rounds:
            self._rounds.remove(ended)
            ended.end()
            self._pinned = {peer: one for peer, one in self._pinned.items() if one is not ended}

    def pin(self, peer: Peer, going: Round | None) -> None:
        """From now on a peer reads the versions of that round, or again what is current."""
        self._pinned.pop(peer, None)
        if going in self._rounds:
            self._pinned[peer] = going

    def defined(self, state: VariableState) -> None:
        """A variable has its first value."""
        for going in self._rounds:
            going.defined(state)

    def reset(self, name: str) -> None:
        """A variable is gone."""
        for going in self._rounds:
            going.forget(name)

    def of(self, peer: Peer) -> Round | None:
        """The round that a peer makes items for."""
        return self._pinned.get(peer)

    def version(self, peer: Peer, name: str) -> int | None:
        """What a peer reads of a variable, if it is in a round."""
        going = self._pinned.get(peer)
        return None if going is None else going.version(name)
