"""What runs in a parameter server's process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.core.cluster_state import ClusterState
from paceline.core.errors import Refused
from paceline.core.spec import Spec, Task
from paceline.engines.base import Link
from paceline.server.loop import LINGER, Server
from paceline.transports.base import NEAR, Address, transport, ways

_log = logging.getLogger("paceline")


UP = "up"
"""What a server tells its launcher once it takes sessions."""


@dataclass(frozen=True, slots=True)
class Serve:
    """A server's first message: the socket that it inherits, already listening.

    It is the `index`-th of the cluster's servers, each given by what opens a session on it. With
    `restoring` nobody else may join until the launcher has brought back what it held.
    """

    transport: str
    place: str
    descriptor: int
    secret: bytes
    linger: float = LINGER
    index: int = 0
    servers: tuple[str, ...] = ()
    least_epoch: int = 0
    restoring: bool = False


@dataclass(frozen=True, slots=True)
class ServeAt:
    """The same on whatever host it is: at `target`, or at a port that the kernel chooses.

    It answers with its `Place`, and is then told all `Servers`.
    """

    target: str
    secret: bytes
    index: int = 0
    least_epoch: int = 0
    restoring: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """What opens a session on a server."""

    target: str


@dataclass(frozen=True, slots=True)
class Servers:
    """What opens a session on each of the cluster's servers."""

    targets: tuple[str, ...]


def run(link: Link) -> None:
    """Serve until the launcher closes the line."""
    setup = link.receive()
    if isinstance(setup, ServeAt):
        listeners, target = _listening(setup, link.host)
        try:
            link.send(Place(target))
            told = link.receive()
        except BaseException:
            for each in listeners:
                each.close()
            raise
        assert isinstance(told, Servers)
        linger, servers = LINGER, told.targets
    else:
        assert isinstance(setup, Serve)
        inherited = socket.socket(fileno=setup.descriptor)
        listeners = [transport(setup.transport).listen(setup.place, inherited)]
        linger, servers = setup.linger, setup.servers
    server = Server(
        listeners, setup.secret, linger=linger, on_note=_log.warning, least_epoch=setup.least_epoch
    )
    if len(servers) > 1:
        spec = Spec({"ps": list(servers)})
        server.service.cluster = ClusterState(spec, spec.tasks(), Task("ps", setup.index))
    server.service.cluster.restoring = setup.restoring

    def watch() -> None:
        try:
            link.receive()
        except EOFError:
            server.stop()

    link.send(UP)
    threading.Thread(target=watch, name="paceline-launcher-watch", daemon=True).start()
    try:
        server.serve()
    finally:
        server.close()


def _listening(setup: ServeAt, host: str) -> tuple[Sequence[Any], str]:
    """Listeners for all hosts and for this one, and what opens a session over either."""
    at = Address.parse(setup.target).place if setup.target else _port(host)
    outside = transport("tcp").listen(at)
    address = Address(NEAR, outside.place)
    listeners = [outside]
    for way in ways(address)[:-1]:
        # Where somebody has that name, or there are none without files, all use TCP.
        with suppress(Refused):
            listeners.append(transport(way.transport).listen(way.place))
    return listeners, str(address)


def _port(host: str) -> str:
    return f"[{host}]:0" if ":" in host else f"{host}:0"
