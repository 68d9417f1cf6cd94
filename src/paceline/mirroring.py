"""A mirror's process: it has each version once for all sessions of its host.

It is a small server of its own, which only this host can reach, and a session's lines to the
cluster's servers, from which it fetches what somebody here wants.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.closing import Closing
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    Refused,
    SchemaError,
    TimedOut,
    Unsupported,
)
from paceline.core.mirror_state import KEEP, Thing
from paceline.core.numbers import whole
from paceline.core.spec import Spec
from paceline.core.waiting import Stored
from paceline.engines.base import Link
from paceline.mirrors import place
from paceline.packing import memory
from paceline.pending import within
from paceline.reach import Joining, member, reached_all
from paceline.server.loop import Server
from paceline.server.mirror_desk import MirrorDesk
from paceline.spec import ClusterSpec
from paceline.transports.base import Address, transport
from paceline.transports.tls import Tls

_log = logging.getLogger("paceline")

LOOK = 1.0
"""Seconds between two looks at whether the servers are there."""

PATIENCE = 60.0
"""Seconds without a server after which a mirror ends, as its cluster seems to have."""

FETCH_LIMIT = 10.0
"""Seconds of a server's silence after which a copy is not to be had."""


class Mirror(Closing):
    """Fetches each version once and lends it to all readers of this host, from shared memory.

    It serves in a thread of this process. Sessions find it by a name that only those can tell who
    know the secret and the servers' addresses. It decides nothing: which version a reader has is
    said by the variable's home.

    Raises:
        Unsupported: this system has no such names.
        SchemaError: no server of the cluster is reached over TCP.
        Refused: there is one for this cluster on this host already.
        TimedOut: a server is not there within `timeout` seconds; the message says which.
    """

    def __init__(
        self,
        joining: Joining,
        servers: Sequence[tuple[str, str]],
        *,
        keep: int = KEEP,
        timeout: float | None = PATIENCE,
    ) -> None:
        what = "a mirror"
        if not sys.platform.startswith("linux"):
            raise Unsupported(f"{what} needs names of sockets without files, which Linux has")
        addresses = [str(Address.parse(target)) for _, target in servers]
        if not any(address.startswith(("tcp:", "near:")) for address in addresses):
            raise SchemaError(
                f"{what} is for servers that are reached over TCP, these share memory with this"
                f" host: {', '.join(addresses)}"
            )
        keep = whole(keep, f"{what}: keep")
        carrier = transport("unix")
        where = place(joining.secret(), addresses)
        try:
            listener = carrier.listen(where)
        except Refused as e:
            raise Refused(f"{what} of {', '.join(addresses)} is there already: {e}") from e
        self.at = f"unix:{where}"
        self._patience = timeout
        self._ending, self._closed = threading.Event(), False
        try:
            self._server = Server(
                [listener], joining.secret(), on_note=_log.warning,
                desks=[partial(MirrorDesk, fetch=self._fetched, keep=keep)],
            )  # fmt: skip
        except BaseException:
            listener.close()
            raise
        try:
            # What it fetches comes straight into the memory that readers look at.
            joining.arena = self._server.service.arena
            self._lines, _ = reached_all(servers, joining, timeout)
        except BaseException:
            self._server.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="paceline-mirror", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Mirror of {', '.join(line.address for line in self._lines.all)}>"

    def stats(self) -> dict[str, Any]:
        """How many copies were `asked` for, `fetched` and `failed`, and what there is now."""
        desk: MirrorDesk = self._server.service.desk(MirrorDesk)
        told: dict[str, Any] = self._server.do(lambda: desk.listing()[1])
        return told

    def join(self) -> None:
        """Serve until the cluster is done, or this is closed by another thread.

        Raises:
            Disconnected: a server was away for longer than its patience; the message says which.
        """
        desk: MirrorDesk = self._server.service.desk(MirrorDesk)
        while not self._ending.wait(LOOK):
            with suppress(Closed):
                self._server.do(desk.tidy)
            for task in self._lines.tasks:
                if self._over(task):
                    return

    def _over(self, task: str) -> bool:
        """Whether the cluster is done, as a server says that has ended."""
        line = self._lines.now([task])[task]
        try:
            # It hears only while it asks: a server that ends says so.
            within(FETCH_LIMIT, line.call, m.Stopping())
        except Closed:
            return True
        except Disconnected:
            if not line.alive():
                return self._gone(task)
        return False

    def _gone(self, task: str) -> bool:
        """A server has ended without a word: whether this was closed before it was there again."""
        try:
            self._lines.line(task, self._patience)
        except TimedOut as e:
            raise Disconnected(f"the mirror at {self.at}: {e}") from e
        except Closed:
            return True
        return False

    def stop(self) -> None:
        """End `join`, from any thread."""
        self._ending.set()
        self._lines.end()

    def close(self) -> None:
        """End it. Readers go to the servers, and keep what they look at. Idempotent."""
        self.stop()
        if self._closed:
            return
        self._closed = True
        self._server.stop()
        self._thread.join()
        for line in self._lines.all:
            left = False
            with suppress(PacelineError):
                left = line.leave()
            line.close(left=left)
        self._server.close()

    def _serve(self) -> None:
        try:
            self._server.serve()
        finally:
            self._ending.set()

    def _fetched(self, thing: Thing, number: int) -> Stored | None:
        """A version from its server; on a thread beside the one that serves."""
        try:
            line = self._line(thing.address)
            if not thing.part and line.incarnation != thing.home:
                # Its session of before has not noticed yet, or the reader's has not.
                return None
            kind = m.ReadPart if thing.part else m.ReadAt
            value, buffers = within(FETCH_LIMIT, line.exchange, kind(thing.key, number))
        except PacelineError as e:
            _log.info("the mirror has no copy from %s: %s", thing.address, str(e))
            return None
        if value.version == m.NO_VERSION:
            return None
        found = Stored(value.layout, value.values, memory(buffers))
        found.stage = value.stage
        return found

    def _line(self, address: str) -> Connection:
        for task, line in self._lines.now(self._lines.tasks).items():
            if line.address == address:
                return self._lines.line(task, 0.0)
        raise Disconnected(f"no server of this mirror's is at {address}")


def of_cluster(
    cluster: Spec | Mapping[str, Any],
    *,
    servers: Sequence[str] | None = None,
    secret: bytes | None = None,
    secret_file: Any = None,
    tls: Tls | None = None,
    keep: int = KEEP,
    timeout: float | None = PATIENCE,
) -> Mirror:
    """The mirror of a cluster whose processes are started by hand; arguments as for `Session`."""
    spec = ClusterSpec(cluster)
    joining, targets = member(spec, "mirror", None, servers, secret, secret_file, tls)
    return Mirror(joining, targets, keep=keep, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Setup:
    """A launched mirror's first message: the servers, each by its task and target, and the secret.

    Sessions find it if they were given the same targets, and the same secret.
    """

    servers: tuple[tuple[str, str], ...]
    secret: bytes
    keep: int = KEEP


UP = "up"
"""What a launched mirror tells its launcher once readers can find it."""


def run(link: Link) -> None:
    """Be a mirror until the launcher closes the line; a task's target, as `ps.run` is."""
    setup = link.receive()
    assert isinstance(setup, Setup)
    joining = Joining("mirror", -1, lambda: setup.secret)
    with Mirror(joining, setup.servers, keep=setup.keep) as mirror:

        def watch() -> None:
            with suppress(EOFError):
                link.receive()
            mirror.stop()

        link.send(UP)
        threading.Thread(target=watch, name="paceline-launcher-watch", daemon=True).start()
        mirror.join()
