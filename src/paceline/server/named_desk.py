"""What desks have in common whose resources are a name and a definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from paceline.core import messages as m
from paceline.core.errors import SchemaError, UnknownName
from paceline.core.names import beside, checked, parts
from paceline.core.waiting import NOT_YET
from paceline.server.lines import Peer
from paceline.server.service import Desk, Service
from paceline.transports.base import Frame


class Named(Protocol):
    """The state of one resource."""

    name: str

    @property
    def definition(self) -> Any:
        """What it was made with, as data that travels; equal for the same resource."""

    def stats(self) -> dict[str, Any]:
        """What it is now, as plain data."""


S = TypeVar("S", bound=Named)


class NamedDesk(Desk, Generic[S]):
    """The resources of one `kind`; whoever calls `made_by` with a definition makes one."""

    kind = ""
    made_by = ""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.states: dict[str, S] = {}

    def listing(self) -> tuple[str, dict[str, Any]]:
        return f"{self.kind}s", {name: state.stats() for name, state in self.states.items()}

    def reset(self, gone: Callable[[str], bool]) -> None:
        self.states = {name: state for name, state in self.states.items() if not gone(name)}

    def state(self, name: str) -> S:
        """The resource of that name.

        Raises:
            UnknownName: there is none.
        """
        found = self.states.get(name)
        if found is None:
            raise UnknownName(f"no {self.kind} '{name}'; there are {beside(name, self.states)}")
        return found

    def define(self, peer: Peer, frame: Frame, made: S) -> None:
        """Answer with the definition of that resource, which `made` becomes unless it exists.

        Raises:
            SchemaError: it exists with another definition.
        """
        self.keep(peer, made.name, made.definition, lambda: made)
        self._service.answer(peer, frame.request, m.Text(made.definition))

    def keep(self, peer: Peer, name: str, wanted: Any, make: Callable[[], S]) -> None:
        """See that there is a resource of that name and definition; `make` it unless there is one.

        Raises:
            SchemaError: it exists with another definition.
        """
        found = self.states.get(name)
        if found is None:
            self.states[checked(name)] = make()
            self._service.containers.made(self.kind, name, peer)
            self._service.parking.changed((self.kind, name))
        elif found.definition != wanted:
            raise SchemaError(
                f"{self.kind} '{name}' exists with {spelled(found.definition)}; asked for:"
                f" {spelled(wanted)}"
            )

    def find(self, peer: Peer, frame: Frame, name: str, timeout: float | None) -> None:
        """Answer with the definition of a resource once it is there."""

        def attempt() -> Any:
            found = self.states.get(name)
            return NOT_YET if found is None else m.Text(found.definition)

        def what() -> str:
            return (
                f"no {self.kind} '{name}'; there are {beside(name, self.states)}; whoever calls"
                f" {self.made_by.format(parts(name).name)} ends the wait; {self._service.who()}"
            )

        self._service.ask(peer, frame, (self.kind, name), attempt, timeout, what)


def spelled(definition: Any) -> str:
    if not isinstance(definition, dict):
        return str(definition)
    return ", ".join(f"{key}={value!r}" for key, value in definition.items())
