"""Sessions that outlive their connections: found by their token, with what they have not had."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

from paceline.core import messages as m
from paceline.core.account import Times
from paceline.core.codec import ERROR
from paceline.core.errors import Disconnected, PacelineError, ProtocolError
from paceline.core.member_state import Member
from paceline.core.window import Window
from paceline.transports.base import Channel, Frame

UNACKNOWLEDGED = 1024
"""Replies that a session may leave unacknowledged: one that asks has had the last ones."""


class Peer:
    """The member that speaks over a connection, or over several, one after the other.

    Attributes:
        window: what must be said again on the next connection; `None` where the end of the
            connection is the end of the session.
        lingers: whether it has no connection now, and is waited for.
        left: whether it said that it ends.
        times, heard: its account, as it told it, and when.
        requests: how many it has made.
        unwanted: why it may not join, as there are too many.
        making, items, version: what it has handed in items for, how many, the newest one's stamp.
    """

    __slots__ = (
        "board_sent", "channel", "heard", "items", "left", "lingers", "making", "member",
        "requests", "times",
        "token", "unwanted", "version", "window",
    )  # fmt: skip

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.member: Member | None = None
        self.board_sent = False
        self.token = b""
        self.window: Window[Frame] | None = None
        self.lingers = False
        self.left = False
        self.unwanted = ""
        self.times: Times | None = None
        self.heard = 0.0
        self.requests = 0
        self.making: str | None = None
        self.items = 0
        self.version = m.NO_VERSION

    @property
    def name(self) -> str:
        """The member's task."""
        return self.member.name if self.member else "a session that has not joined"

    def told(self, now: float) -> dict[str, Any]:
        """What is told of it in statistics; its process only while it has a connection."""
        return {
            "process": self.member.pid if self.member and not self.lingers else None,
            "times": self.times,
            "since": now - self.heard,
            "requests": self.requests,
            "making": self.making,
            "items": self.items,
            "version": self.version,
        }

    def post(self, frame: Frame) -> None:
        """Send a frame, now and, if its connection breaks, again."""
        window = self.window
        if window is not None:
            window.sending(frame)
            frame.received = window.received
        # Whoever drives the server sees the same end of the connection, and what it means.
        with suppress(Disconnected):
            self.channel.send(frame)

    def dismiss(self, why: PacelineError | None = None) -> None:
        """Tell the session that the server ends, so that it does not look for it, and `why`."""
        if self.window is not None or (why is not None and self.member is not None):
            told = m.failure(why or Disconnected("the server has ended"))
            with suppress(Disconnected):
                self.channel.send(Frame(ERROR, 0, m.encode(told)))

    def took(self, acknowledged: int) -> None:
        """One more frame of the session's is here.

        Raises:
            ProtocolError: it acknowledges what was never sent, or nothing at all.
        """
        window = self.window
        if window is not None:
            window.arrived(acknowledged)
            if len(window) > UNACKNOWLEDGED:
                raise ProtocolError(f"{len(window)} replies were not acknowledged")


class Lines:
    """The sessions of one server that outlive their connections, each for `linger` seconds."""

    def __init__(self, epoch: int, linger: float) -> None:
        self.linger = linger
        self.incarnation = secrets.randbits(63)
        """Says which run of the server it is, also where two began in one second."""
        self._epoch = epoch
        self._peers: dict[bytes, Peer] = {}

    def lasts(self, peer: Peer, token: bytes) -> bool:
        """Whether a session with that token outlives this connection of its."""
        return bool(self.linger and token and not peer.channel.shares_memory)

    def begin(self, peer: Peer, token: bytes) -> None:
        """From now on everything is counted."""
        peer.token, peer.window = token, Window()
        self._peers[token] = peer

    def end(self, peer: Peer) -> None:
        """A session is over; what it has not had goes back."""
        self._peers.pop(peer.token, None)
        peer.window = None

    def joined_before(self, token: bytes) -> Peer | None:
        """Who has joined with that token, if the answer may have been lost: it did nothing yet."""
        peer = self._peers.get(token)
        if peer is None or peer.window is None or peer.window.received:
            return None
        return peer

    def found(self, request: m.Rejoin) -> tuple[Peer, list[Frame]]:
        """The session that wants to go on, and what it has not had.

        Raises:
            Disconnected: there is none any more; the message says why.
            ProtocolError: it cannot have had what it says.
        """
        peer = self._peers.get(request.token)
        if peer is None or peer.window is None:
            raise self._unknown(request)
        return peer, peer.window.missing(request.received)

    def waited_for(self, job: str, index: int) -> str:
        """Said of a task whose session has no connection now."""
        for peer in self._peers.values():
            member = peer.member
            if peer.lingers and member and (member.job, member.index) == (job, index):
                return f"; its connection has broken, it has {self.linger} s to make another"
        return ""

    def _unknown(self, request: m.Rejoin) -> PacelineError:
        if request.epoch != self._epoch:
            return Disconnected(
                "the server was started again since: what was shared before, and session"
                f" {request.session}, are gone"
            )
        return Disconnected(
            f"the server has given up session {request.session}, which had no connection for more"
            f" than {self.linger} s, or broke the protocol"
        )


def holder_name(holder: object) -> str:
    """Who holds a version, as messages say it."""
    return holder.name if isinstance(holder, Peer) else str(holder)


def new_epoch(least: int = 0) -> int:
    """An epoch above all those before it on this machine's clock: its seconds, or `least`."""
    return max(int(time.time()), least)
