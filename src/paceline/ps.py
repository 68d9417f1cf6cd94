"""What runs in a parameter server's process."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass

from paceline.core.cluster_state import ClusterState
from paceline.core.spec import Spec, Task
from paceline.engines.base import Link
from paceline.server.loop import LINGER, Server
from paceline.transports.base import transport

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


def run(link: Link) -> None:
    """Serve until the launcher closes the line."""
    setup = link.receive()
    assert isinstance(setup, Serve)
    inherited = socket.socket(fileno=setup.descriptor)
    listener = transport(setup.transport).listen(setup.place, inherited)
    server = Server(
        [listener], setup.secret, linger=setup.linger, on_note=_log.warning,
        least_epoch=setup.least_epoch,
    )  # fmt: skip
    if len(setup.servers) > 1:
        spec = Spec({"ps": list(setup.servers)})
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
