"""The mirror of this host, as a session sees it: it has copies of what servers hold.

It is found by a name that only those can tell who know the cluster's secret. Without it, or when it
does not answer, reads go to the servers as ever.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.conduct import Conduct
from paceline.core.errors import Disconnected, PacelineError, TimedOut
from paceline.packing import memory
from paceline.pending import Pending
from paceline.transports.base import Lease, Memory, transport

_log = logging.getLogger("paceline")

Found: TypeAlias = tuple[m.Value, Memory | None]
Wanted: TypeAlias = tuple[Connection, m.ReadAt | m.ReadPart]

REACH_LIMIT = 1.0
"""Seconds to reach a mirror that is there."""

TURN = 2.0
"""Seconds after which a mirror says at the latest that a copy is still on its way."""

SILENCE = 1.0
"""Seconds beyond them after which it is asked for a sign of life."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds until a mirror that was not there, or did not answer, is looked for again."""


def place(secret: bytes, addresses: Iterable[str]) -> str:
    """Where a host's mirror of the servers at these addresses listens."""
    said = "\n".join(["paceline mirror", *sorted(addresses)]).encode()
    return f"@paceline-{hmac.new(secret, said, hashlib.sha256).hexdigest()[:32]}"


class Mirror:
    """A session's line to the mirror of its host, made when it is first wanted."""

    def __init__(
        self, secret: Callable[[], bytes], addresses: Sequence[str], who: str, conduct: Conduct
    ) -> None:
        self._secret = secret
        self._addresses = addresses
        self._who = who
        self._conduct = conduct
        self._line: Connection | None = None
        self._lock = threading.Lock()
        self._pause = FIRST_PAUSE
        self._again = 0.0
        self._closed = False
        self.copies_had = 0
        self.bytes_had = 0

    def of(self, line: Connection) -> Mirror | None:
        """This, if copies of what that server holds are to be had here now."""
        if line.shares_memory or not sys.platform.startswith("linux"):
            return None
        return self if self._reached() is not None else None

    def told(self) -> dict[str, Any] | None:
        """Where it is, and what came from it; `None` while there is none."""
        line = self._line
        if line is None or not line.alive():
            return None
        return {"at": line.address, "copies": self.copies_had, "bytes": self.bytes_had}

    def copies(self, home: Connection, wanted: Sequence[Wanted]) -> list[Found | None]:
        """What servers would answer of a variable of that home's; `None` where it cannot say."""
        line = self._line
        if line is None:
            return [None] * len(wanted)
        pending: list[tuple[m.Mirrored, Pending]] = []
        found: list[Found | None] = []
        try:
            for server, request in wanted:
                asked = _mirrored(server, request, home)
                pending.append((asked, _post(line, asked)))
            for asked, one in pending:
                found.append(self._taken(line, asked, one))
        except Disconnected as e:
            self._lose(line, e)
            found += [None] * (len(wanted) - len(found))
        finally:
            for _, one in pending:
                one.forget()
        return found

    def give_back(self) -> None:
        """Let it know now what memory of its is no longer looked at."""
        if self._line is not None:
            self._line.give_back()

    def close(self) -> None:
        """Leave it; what was received stays as it is while it is held. Idempotent."""
        with self._lock:
            self._closed = True
            line, self._line = self._line, None
        if line is not None:
            _left(line)

    def _taken(self, line: Connection, asked: m.Mirrored, one: Pending) -> Found | None:
        while True:
            try:
                value, buffers = one.result()
            except TimedOut:
                # It lives, and has it fetched.
                one = _post(line, asked)
                continue
            except Disconnected:
                raise
            except PacelineError:
                return None
            if value.version == m.NO_VERSION:
                return None
            block = memory(buffers)
            self._pause = FIRST_PAUSE
            self.copies_had += 1
            if block is not None:
                self.bytes_had += block.nbytes
                # Told at once that nobody looks any more, not with the next message.
                block = Lease(block, line.give_back)
            return value, block

    def _reached(self) -> Connection | None:
        line = self._line
        if line is not None and line.alive() and not line.forked:
            # One that did not answer is given time.
            return line if time.monotonic() >= self._again else None
        if time.monotonic() < self._again or self._closed:
            return None
        with self._lock:
            if self._line is not line or self._closed:
                return self._line
            if line is not None:
                self._line = None
                if not line.forked:
                    _log.warning("%s: the mirror of this host has ended", self._who)
                    _left(line)
            try:
                self._line = self._connect()
            except PacelineError:
                self._wait()
            return self._line

    def _connect(self) -> Connection:
        secret = self._secret()
        where = place(secret, self._addresses)
        carrier = transport("unix")
        channel = carrier.connect(where, secret, REACH_LIMIT)
        line = Connection(channel, carrier.arena(), f"unix:{where}")
        line.conduct = self._conduct
        try:
            pending = line.post(m.Join("reader", -1, os.getpid(), b""))
            pending.due = time.monotonic() + REACH_LIMIT
            pending.end_within(REACH_LIMIT)
            joined, _ = pending.result()
        except BaseException:
            line.close()
            raise
        line.session = joined.session
        _log.info("%s: reads large variables through the mirror of this host", self._who)
        return line

    def _lose(self, line: Connection, why: Disconnected) -> None:
        """It is gone, or does not answer; then its line stays, for what is looked at."""
        with self._lock:
            if time.monotonic() >= self._again:
                told = "%s: the mirror of this host does not answer, the servers are asked: %s"
                # As text: who keeps the record must not keep what an error's frames hold.
                _log.warning(told, self._who, str(why))
            self._wait()
            if self._line is line and not line.alive():
                self._line = None
                _left(line)

    def _wait(self) -> None:
        self._again = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _mirrored(server: Connection, request: m.ReadAt | m.ReadPart, home: Connection) -> m.Mirrored:
    part = isinstance(request, m.ReadPart)
    number = request.stage if isinstance(request, m.ReadPart) else request.version
    return m.Mirrored(server.address, request.name, number, part, home.incarnation, TURN)


def _post(line: Connection, asked: m.Mirrored) -> Pending:
    pending = line.post(asked, timeout=TURN)
    # It answers within its turn; a silent one is not waited for, whatever time the reader has.
    pending.due = time.monotonic() + TURN + SILENCE
    pending.end_within(None)
    return pending


def _left(line: Connection) -> None:
    with suppress(PacelineError):
        # Not waited for: it may be one that does not answer.
        line.tell(m.Leave(""))
    line.close(left=True)
