"""What drives a service within one process: whoever calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from paceline.core.errors import Disconnected, ProtocolError
from paceline.server.lines import Peer, new_epoch
from paceline.server.loop import DESKS
from paceline.server.poller import sooner
from paceline.server.reader_desk import ReaderDesk
from paceline.server.service import Service, Work
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Frame, transport
from paceline.transports.memory import MemoryChannel

R = TypeVar("R")

LOOK = 0.01
"""Seconds until one looks again whether another thread let go of a version, or leased a piece."""


class LocalServer:
    """A service within this process: whoever calls it runs it.

    `waits=False` is for everything in one thread: a wait that nothing can end raises `WouldBlock`.
    """

    def __init__(self, *, waits: bool = True, least_epoch: int = 0) -> None:
        self._waits = waits
        self._lock = threading.RLock()
        self._arena = transport("memory").arena()
        self.service = Service(self._arena, new_epoch(least_epoch), DESKS)
        self._ends: set[MemoryChannel] = set()
        self._jobs: deque[tuple[Work, Callable[[], None]]] = deque()
        self.service.beside = lambda lane, threads, *job: self._jobs.append(job)

    def close(self) -> None:
        """End every connection; whoever waits hears of it. Idempotent."""
        for end in list(self._ends):
            end.close()

    def do(self, call: Callable[[], R]) -> R:
        """Make a call between two requests; what it returns."""
        with self._lock:
            return call()

    def connect(self) -> MemoryChannel:
        """A new connection's client end."""
        client, server = MemoryChannel.pair(waits=self._waits)
        peer = Peer(server)
        variables: VariableDesk = self.service.desk(VariableDesk)
        readers: ReaderDesk = self.service.desk(ReaderDesk)
        self._ends.add(server)

        def pump() -> None:
            with self._lock:
                try:
                    while (frame := server.receive(0)) is not None:
                        self.service.feed(peer, frame)
                except (Disconnected, ProtocolError):
                    server.close()
                    if server in self._ends:
                        self._ends.discard(server)
                        self.service.lost(peer)
                self._catch_up()
                jobs = self._taken()
            self._work(client, jobs)

        def tick() -> float | None:
            with self._lock:
                limit = self.service.tick()
                self._catch_up()
                if variables.crowded or readers.leasing:
                    limit = sooner(limit, LOOK)
                jobs = self._taken()
            return 0.0 if self._work(client, jobs) else limit

        server.on_frame = pump
        client.idle = tick
        return client

    def _catch_up(self) -> None:
        """Carry out what came while the service was frozen."""

        def feed(peer: Peer, frame: Frame) -> None:
            try:
                self.service.feed(peer, frame, kept=True)
            except ProtocolError:
                peer.channel.close()

        if self.service.freezing.due:
            self.service.catch_up(feed)

    def _taken(self) -> list[tuple[Work, Callable[[], None]]]:
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs

    def _work(self, asking: MemoryChannel, jobs: list[tuple[Work, Callable[[], None]]]) -> bool:
        """Run operations, while others use the server, and those that follow; whether any ran."""
        ran = bool(jobs)
        while jobs:
            work, finish = jobs.pop(0)
            try:
                asking.interrupts.during(work)
            except BaseException:
                # What is left is of other threads: whoever next asks something runs it.
                with self._lock:
                    self._jobs.extendleft(reversed(jobs))
                    finish()
                raise
            with self._lock:
                finish()
                jobs += self._taken()
        return ran
