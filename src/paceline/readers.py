"""Readers: a shared list of work, each piece done once per epoch."""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.clock import checked_timeout
from paceline.core.errors import (
    Closed,
    Disconnected,
    PacelineError,
    SchemaError,
    WouldBlock,
    said_of,
)
from paceline.core.names import quoted
from paceline.core.runs import runs
from paceline.core.tree import unflatten
from paceline.handles import PATIENCE, Handle, lasting
from paceline.pending import limited

TO_LOOK = 1.0


class Piece:
    """A piece of work in this session's hands.

    Attributes:
        value: what was given; tuples and dicts are the receiver's own.
        epoch: which time it is handed out for, from 0.
        number: its place among the reader's pieces, from 0.
        attempt: how often it was handed out in this epoch, 1 unless somebody died with it or gave
            it back.
    """

    __slots__ = (
        "_connection",
        "_reader",
        "attempt",
        "delivery",
        "ended",
        "epoch",
        "number",
        "value",
    )

    def __init__(self, connection: Connection, reader: str, head: m.PieceHead) -> None:
        self.value: Any = unflatten(head.layout, head.values, None)
        self.epoch = head.epoch
        self.number = head.number
        self.attempt = head.attempt
        self.delivery, self.ended = head.delivery, False
        self._connection = connection
        self._reader = reader

    def __repr__(self) -> str:
        return (
            f"<Piece {self.number} of {quoted(self._reader)}, epoch {self.epoch}, attempt"
            f" {self.attempt}: {self.value!r}>"
        )

    def done(self) -> bool:
        """Say that it is done, now; whether it was in these hands still.

        It was not when its lease had run out, when it was given back or done before, or when its
        server was started again since.
        """
        return self._end(returned=False)

    def give_back(self) -> bool:
        """Let another session have it: it is handed out next; else as `done`."""
        return self._end(returned=True)

    def _came_over(self, connection: Connection) -> bool:
        """Whether it was handed out over that line."""
        return self._connection is connection

    def _end(self, *, returned: bool) -> bool:
        self.ended = True
        request = m.EndPiece(self._reader, self.delivery, returned)
        try:
            return bool(self._connection.call(request).content)
        except Disconnected:
            # A server that was started again knows nothing of who had what.
            if self._connection.succeeded(PATIENCE) is None:
                raise
            return False


class Reader(Handle):
    """A list or a stream of work that sessions share; iterating gives pieces to work on.

    In each epoch each piece is done once: it is handed out to whoever asks, and is theirs until
    they ask for the next one, call `done()` or `give_back()`, leave the loop, or end. What was not
    done by then is handed out again, before anything else. Epochs follow each other in order; one
    may begin while pieces of the one before are still held. When all pieces of the last one are
    done the loop of every session ends; until then those who ask wait, since pieces may come back.

    Any number of threads may use it: a loop, and a thread that calls `next`, has a piece of its
    own.
    """

    kind = "reader"

    def __init__(self, connection: Connection, key: str, definition: dict[str, Any]) -> None:
        super().__init__(connection, key)
        self._definition = definition
        self._mine = threading.local()
        self._left: deque[Piece] = deque()

    def __repr__(self) -> str:
        terms = ", ".join(f"{key}={value!r}" for key, value in self._definition.items())
        return f"<Reader {self.called} with {terms}, on {self._connection.address}>"

    def __iter__(self) -> Iterator[Piece]:
        """Pieces until there are no more; each is done when the next one is asked for.

        Waits as long as the server lives. A loop that is left, by `break` or an error, gives its
        piece back. With `engine="serial"`, where nobody can wait for another, it ends when all
        other pieces are held.
        """
        piece = self._before()
        while (piece := self._following(piece)) is not None:
            try:
                yield piece
            except GeneratorExit:
                self._leave(piece)
                raise

    @limited
    def next(self, timeout: float | None = 60.0) -> Piece:
        """The next piece; the one that this thread had by `next` before is done.

        Raises:
            Closed: all pieces of the last epoch are done.
            TimedOut: there was none within `timeout` seconds; the message says who holds them.
                The piece before is done nevertheless.
        """
        limit = checked_timeout(timeout)
        piece = self._take(self._before(), limit)
        if piece is None:
            raise Closed(f"next piece of reader {self.called}: all are done")
        self._mine.piece = piece
        return piece

    @lasting
    @limited
    def add(self, pieces: Iterable[Any], *, timeout: float | None = 60.0) -> None:
        """Append pieces to a stream, all or none.

        Raises:
            Closed: it was closed.
            Disconnected: the server said nothing within `timeout` seconds.
            SchemaError: it is no stream, a piece may not travel, or there are too many.
        """
        heads = packed(self.name, pieces)
        self._connection.call(m.FeedReader(self.key, heads))

    @lasting
    def close(self) -> None:
        """Nothing is added any more, and no other epoch begins; what is there is handed out.

        Closing twice is fine.
        """
        self._connection.call(m.FeedReader(self.key, [], True))

    @lasting
    def stats(self) -> dict[str, Any]:
        """Its counters; in each epoch, always: pieces = done + held + waiting.

        `delivered` counts how often pieces were handed out, `redelivered` how many of these times
        were not the first. The newest 16 epochs are kept, and those that are not over.
        """
        content: dict[str, Any] = self._connection.call(m.FeedReader(self.key, [])).content
        return content

    def _made_at(self, line: Connection, timeout: float | None) -> None:
        line.call(m.DefineReader(self.key, None, timeout=timeout), timeout=timeout)

    def _before(self) -> Piece | None:
        """The piece that this thread had by `next`, which ends when it asks again."""
        before: Piece | None = getattr(self._mine, "piece", None)
        self._mine.piece = None
        return before

    def _following(self, before: Piece | None) -> Piece | None:
        try:
            return self._take(before, None)
        except WouldBlock:
            # All others are held by generators of this one thread, which go on when this one ends.
            if not self.stats()["closed"]:
                raise
            self._connection.conduct.worked_off = True
            return None

    @lasting
    def _take(self, before: Piece | None, timeout: float | None) -> Piece | None:
        def back(head: m.PieceHead) -> m.EndPiece:
            return m.EndPiece(self.key, head.delivery, True)

        self._send_back()
        done = 0
        if before is not None and not before.ended:
            before.ended = True
            done = before.delivery if before._came_over(self._connection) else 0
        request = m.NextPiece(self.key, done, timeout)
        patience = TO_LOOK if timeout == 0 else timeout
        # As a wait, also with no time for one: what was made of a piece is handed in before it is
        # done.
        head, _ = self._connection.exchange(request, timeout=patience, undo=back)
        if head.delivery:
            return Piece(self._connection, self.key, head)
        self._connection.conduct.worked_off = True
        return None

    def _leave(self, piece: Piece) -> None:
        if piece.ended:
            return
        piece.ended = True
        self._left.append(piece)
        if not _sending():
            with suppress(PacelineError):
                self._send_back()

    def _send_back(self) -> None:
        while self._left:
            piece = self._left.popleft()
            if piece._came_over(self._connection):
                self._connection.tell(m.EndPiece(self.key, piece.delivery, True))


def packed(name: str, pieces: Iterable[Any]) -> list[m.RunHead]:
    """Pieces as they travel.

    Raises:
        SchemaError: they are no list, or one of them is not plain.
    """
    what = f"reader '{name}'"
    if isinstance(pieces, (str, bytes, dict)) or not isinstance(pieces, Iterable):
        raise SchemaError(f"{what}: pieces is a list or another iterable, not {pieces!r:.60}")
    items = [piece.item() if isinstance(piece, np.generic) else piece for piece in pieces]
    with said_of(what):
        found = runs(items)
    if any(run.nbytes for run in found):
        raise SchemaError(
            f"{what}: a piece is plain values, in dicts, lists and tuples, and has no arrays: give"
            " a number or a name, and what it stands for by a variable or a file"
        )
    return [m.RunHead(run.layout, run.count, run.columns) for run in found]


def seconds(name: str, lease: Any) -> float | None:
    """A lease as it travels.

    Raises:
        SchemaError: it is no number above 0.
    """
    number = isinstance(lease, (int, float)) and not isinstance(lease, bool)
    if lease is None or (number and 0 < lease < math.inf):
        return None if lease is None else float(lease)
    raise SchemaError(f"reader '{name}': lease is seconds > 0, or None, not {lease!r}")


def _sending() -> bool:
    """Whether this is a finaliser that interrupted this thread while it was sending.

    A loop that is in a ring of objects may end so, and must not send by itself.
    """
    frame = sys._getframe()
    while (back := frame.f_back) is not None:
        frame = back
        if str(frame.f_globals.get("__name__", "")).startswith("paceline.transports."):
            return True
    return False
