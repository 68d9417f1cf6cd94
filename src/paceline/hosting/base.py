"""Where a cluster lives that is launched: its engine, its servers, and how its tasks reach them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.errors import UnknownName
from paceline.engines.base import Engine, name_of
from paceline.engines.wishes import Ray
from paceline.session import Session
from paceline.worker.line import Setup

OnEnd: TypeAlias = Callable[[str, str, bool], None]
"""Hears which server has ended; how, as the end of a sentence about it; and whether another that
takes its place would end in the same way."""

CARRIERS = ("unix", "tcp")

GRACE = 2.0
"""Seconds that processes have to end by themselves."""

HOSTINGS = {
    "processes": "paceline.hosting.launched:Launched",
    "ray": "paceline.hosting.anywhere:Anywhere",
    "serial": "paceline.hosting.local:Local",
    "threads": "paceline.hosting.local:Local",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a cluster's launcher was asked for.

    Versions begin with an epoch of `least_epoch` or more. Where it `lasts`, servers in processes of
    their own are started again. `carrier` is how processes of one host reach them.
    """

    engine: str | Ray
    carrier: str
    servers: int
    least_epoch: int = 0
    lasts: bool = False


class Hosting(ABC):
    """A cluster's engine and its servers."""

    engine: Engine

    lasts: bool = False
    """Whether servers that have ended are started again."""

    @abstractmethod
    def start(self, on_end: OnEnd, workers: Sequence[str]) -> None:
        """Start the servers, where there is room for those workers too."""

    @abstractmethod
    def setup(self, job: str, index: int, seed: int) -> Setup:
        """A worker's first message."""

    @abstractmethod
    def preflight(self, workers: int, threads: int) -> list[str]:
        """What will not fit on this machine, with the numbers."""

    @abstractmethod
    def chief(self) -> Session:
        """The session of this process."""

    def processes(self) -> dict[str, int]:
        """The processes of the servers that live, where they are on this host."""
        return {}

    def ended(self) -> list[tuple[str, str]]:
        """The servers that have ended, and for each a sentence that says how.

        That is known within a second of a broken line.
        """
        return []

    def anew(self, forget: Callable[[], None]) -> None:
        """End all servers and start them anew, with nothing; `forget` is called between."""
        raise AssertionError("there are no servers to be started anew")

    def again(self, task: str) -> None:
        """Start the server again that is `task`, in an epoch above those that it had before."""
        raise AssertionError(f"{task} was not started to be started again")

    def restorer(self) -> Session:
        """The session that brings back what servers held.

        Raises:
            Disconnected: one of them has ended again, or this has given up.
        """
        raise AssertionError("nothing was lost")

    @abstractmethod
    def give_up(self) -> None:
        """Start none of the servers again: whoever calls one that has ended hears that."""

    @abstractmethod
    def close(self) -> None:
        """End the servers, and the engine with all its tasks."""


def hosting(wanted: Wanted) -> Hosting:
    """Where a cluster lives that was asked for so; where all is one process, one server is enough.

    Raises:
        UnknownName: there is no such engine, or no such way to reach a server.
    """
    if wanted.carrier not in CARRIERS:
        raise UnknownName(
            f"no transport {wanted.carrier!r} for a cluster; there are {list(CARRIERS)}"
        )
    module, _, kind = HOSTINGS[name_of(wanted.engine)].partition(":")
    made = getattr(importlib.import_module(module), kind)(wanted)
    assert isinstance(made, Hosting)
    return made
