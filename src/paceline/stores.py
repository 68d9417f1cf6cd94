"""Where a variable is stored, as its handle sees it; and how that is with one server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import PacelineError
from paceline.core.rows import checked_indices
from paceline.core.tree import Array
from paceline.core.versions import epoch_of
from paceline.packing import LARGE, copied, memory, pack, pack_indices, view
from paceline.pending import limited
from paceline.transports.base import Buffers, Lease, Memory

R = TypeVar("R")


class Store(Protocol):
    """Reads and writes a variable's tree, wherever it is."""

    @property
    def home(self) -> Connection:
        """The line to its home."""

    def step(self, what: str) -> Connection:
        """The line to its home, for what is asked there in one step with other things.

        Raises:
            SchemaError: it is not in one place; the message begins with `what`.
        """

    @property
    def bounded(self) -> bool:
        """Whether its versions may take so many bytes only."""

    def hint(self) -> int | None:
        """The version that a read gives, where that can be seen without a message."""

    def write(self, tree: Any, what: str, *, adding: bool, timeout: float | None) -> int:
        """Replace the tree, or add to it; the new version."""

    def fetch(
        self, request: m.Read | m.ReadTag, patience: float | None, timeout: float | None
    ) -> tuple[int, Any, int]:
        """A version, its tree and bytes; no tree if it is the version that there is.

        `patience` is how long it may take by itself until there is such a version, `timeout` how
        long it may take if a server has to be started again.
        """

    def gather(
        self, indices: Any, leaf: str | None, what: str, timeout: float | None
    ) -> tuple[int, Any]:
        """The newest version, and its rows at `indices`, copied."""

    def scatter_add(
        self, indices: Any, rows: Any, leaf: str | None, what: str, timeout: float | None
    ) -> int:
        """Add to the rows at `indices`; the new version."""

    def call(self, request: m.Request[R]) -> R:
        """Ask the home what needs no tree."""

    def give_back(self) -> None:
        """Let servers know now what memory of theirs is no longer looked at."""

    def move(self, line: Connection, timeout: float | None) -> None:
        """Be at the other end of that line, once there is a value; raises `TimedOut`."""


class Near(Protocol):
    """What has copies close by of what servers hold, as a session's mirror does."""

    def of(self, line: Connection, /) -> Near | None:
        """This, if copies of what that server holds are to be had here now."""

    def copies(
        self, home: Connection, wanted: Sequence[tuple[Connection, m.ReadAt | m.ReadPart]], /
    ) -> list[tuple[m.Value, Memory | None] | None]:
        """What servers would answer of a variable of that home's; `None` where it cannot say."""

    def give_back(self) -> None:
        """Let it know now what memory of its is no longer looked at."""


class OneServer:
    """All of a variable is on the server at the other end of a line."""

    def __init__(
        self,
        home: Connection,
        key: str,
        hint: Hint | None,
        *,
        bounded: bool = False,
        near: Near | None = None,
    ) -> None:
        self._near = near
        self.bounded = bounded
        self.home = home
        self._key = key
        self._hint = hint

    def step(self, what: str) -> Connection:
        return self.home

    def hint(self) -> int | None:
        return None if self._hint is None else self._hint.version()

    @limited
    def write(self, tree: Any, what: str, *, adding: bool, timeout: float | None) -> int:
        kind = m.Add if adding else m.Assign
        patience = timeout if self.bounded else 0.0
        home = self.home
        with home.interrupts:
            head, block = pack(home.arena, tree, what)
            # Without a bound it waits for nothing but additions in hand.
            request = kind(self._key, head, timeout if self.bounded else None)
            return home.call(request, [block], patience).version

    @limited
    def fetch(
        self, request: m.Read | m.ReadTag, patience: float | None, timeout: float | None
    ) -> tuple[int, Any, int]:
        home = self.home
        near = None if self._near is None else self._near.of(home)
        if near is None:
            value, buffers = home.exchange(request, timeout=patience)
            block = memory(buffers)
        else:
            value, block = self._through(near, replace(request, lean=True), patience)
        if value.version == request.have:
            return value.version, None, 0
        nbytes = 0 if block is None else block.nbytes
        if block is not None and (self.bounded or nbytes >= LARGE):
            # Told at once that nobody looks any more, not with the next message.
            block = Lease(block, home.give_back)
        return value.version, view(value.layout, value.values, block), nbytes

    def _through(
        self, near: Near, request: m.Read | m.ReadTag, patience: float | None
    ) -> tuple[m.Value, Memory | None]:
        """As the home answers, which says the version and keeps it; its tree is from close by."""
        home, key = self.home, self._key
        held = m.NO_VERSION

        def undo(reply: m.Value) -> m.LetGo:
            kept = reply.version != request.have and not reply.layout
            return m.LetGo(key, reply.version if kept else m.NO_VERSION)

        try:
            with home.interrupts:
                value, buffers = home.exchange(request, timeout=patience, undo=undo)
                if value.version == request.have or value.layout:
                    return value, memory(buffers)
                held = value.version
            wanted = m.ReadAt(key, held)
            found = near.copies(home, [(home, wanted)])[0]
            if found is None:
                value, buffers = home.exchange(wanted)
                found = value, memory(buffers)
            return found
        finally:
            if held != m.NO_VERSION:
                with suppress(PacelineError):
                    home.tell(m.LetGo(key, held))

    @limited
    def gather(
        self, indices: Any, leaf: str | None, what: str, timeout: float | None
    ) -> tuple[int, Any]:
        places = checked_indices(indices, what)
        home = self.home
        with home.interrupts:
            request = m.Gather(self._key, leaf, places.shape)
            found, buffers = home.exchange(request, [pack_indices(home.arena, places)])
            tree = copied(found.layout, found.values, memory(buffers))
            del buffers
            home.give_back()
        return found.version, tree

    @limited
    def scatter_add(
        self, indices: Any, rows: Any, leaf: str | None, what: str, timeout: float | None
    ) -> int:
        places = checked_indices(indices, what)
        home = self.home
        with home.interrupts:
            head, block = pack(home.arena, rows, what)
            # Without a bound it waits for nothing but additions in hand.
            patience = timeout if self.bounded else None
            request = m.ScatterAdd(self._key, leaf, places.shape, head, patience)
            buffers = [pack_indices(home.arena, places), block]
            return home.call(request, buffers, timeout if self.bounded else 0.0).version

    def call(self, request: m.Request[R]) -> R:
        return self.home.call(request)

    def give_back(self) -> None:
        self.home.give_back()
        if self._near is not None:
            self._near.give_back()

    def move(self, line: Connection, timeout: float | None) -> None:
        defined, buffers = line.exchange(m.Await(self._key, timeout), timeout=timeout)
        self.home, self._hint = line, hinted(line, defined, buffers)


class Hint:
    """The word that says which version is current, where memory is shared with the home."""

    def __init__(self, home: Connection, word: Array, epoch: int) -> None:
        self._home = home
        self._word = word
        self._epoch = epoch

    def version(self) -> int | None:
        """What a read gives; `None` where only the home can tell."""
        # It means nothing once the server is gone; a lockstep round has versions of its own.
        if self._home.conduct.in_lockstep or not self._home.alive():
            return None
        found = int(self._word[0])
        # After a reset the word may be another variable's, of a later epoch: ask.
        return found if epoch_of(found) == self._epoch else None


def hinted(home: Connection, defined: m.Defined, buffers: Buffers) -> Hint | None:
    """Where a variable that is there tells its version."""
    board = memory(buffers)
    if board is not None:
        home.board = board.lasting().view(np.int64)
    if home.board is None:
        return None
    word = home.board[defined.word : defined.word + 1]
    return Hint(home, word, epoch_of(defined.version))
