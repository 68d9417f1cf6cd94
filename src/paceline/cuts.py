"""A cut through all servers of a cluster: what they had at one moment, fetched afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import PacelineError, TimedOut
from paceline.transports.base import Memory

ATTEMPTS = 5
"""How often servers are frozen that do not stay so for as long as it takes."""


@dataclass(frozen=True)
class Entry:
    """Something of which a server took note: where, and as which of all there."""

    line: Connection
    number: int
    kind: str
    key: str
    nbytes: int


@dataclass(frozen=True)
class Found:
    """What was noted: its facts, and for each piece its head, what else is said, and its memory."""

    facts: bytes
    heads: list[m.RunHead]
    about: list[Any]
    memories: list[Memory | None]


@dataclass(frozen=True)
class Cut:
    """What was noted on all servers.

    Attributes:
        pause: seconds for which requests were kept waiting.
    """

    entries: list[Entry]
    pause: float

    def fetch(self, entry: Entry) -> Found:
        """All that was noted of one thing; it can be fetched once.

        Where memory is shared with the server its arrays are where they were; else they are copies.
        """
        facts, heads, about, memories = b"", list[m.RunHead](), list[Any](), list[Memory | None]()
        more = True
        while more:
            reply, buffers = entry.line.exchange(m.Fetch(entry.number, len(heads)))
            facts = facts or reply.facts
            heads += reply.heads
            about += reply.about
            memories += [*buffers, *[None] * (len(reply.heads) - len(buffers))]
            more = reply.more
        return Found(facts, heads, about, memories)


@contextmanager
def cut(lines: Sequence[Connection], container: str) -> Iterator[Cut]:
    """Freeze all servers, have them take note of what is in a container, and thaw them.

    Nothing is copied, and what was noted stays as it is until the end of the block: one moment, of
    which each request has been carried out everywhere, or nowhere, before it.

    Raises:
        TimedOut: they could not be kept frozen for as long as it takes.
        Disconnected: a server is gone.
    """
    taken = None
    for _ in range(ATTEMPTS):
        taken = _taken(lines, container)
        if taken is not None:
            break
    if taken is None:
        raise TimedOut(
            f"take note of all at one moment: {ATTEMPTS} times a server did not stay frozen for as"
            " long as it took; more time for the servers, or less traffic, ends this"
        )
    try:
        yield taken
    finally:
        for line in {id(each.line): each.line for each in taken.entries}.values():
            with suppress(PacelineError):
                line.call(m.Thaw(True))
                line.give_back()


def _taken(lines: Sequence[Connection], container: str) -> Cut | None:
    """A cut; `None` if a server did not stay frozen until all had taken note."""
    began = time.monotonic()
    try:
        # Who has frozen the first comes first at the others too.
        lines[0].call(m.Freeze())
        _all(lines[1:], m.Freeze())
        notes = _all(lines, m.Note(container))
    except BaseException:
        for line in lines:
            with suppress(PacelineError):
                line.post(m.Thaw(True)).forget()
        raise
    frozen = [reply.content for reply in _all(lines, m.Thaw(False))]
    pause = time.monotonic() - began
    if not all(frozen):
        return None
    entries = [
        Entry(line, number, *each)
        for line, note in zip(lines, notes, strict=True)
        for number, each in enumerate(note.content[2])
    ]
    return Cut(entries, pause)


def told(lines: Sequence[Connection], container: str) -> tuple[bool, int]:
    """Whether no server has taken note of that container, or had it brought back; their epoch.

    Of their epochs it is the newest.
    """
    notes = [reply.content for reply in _all(lines, m.Note(container, False))]
    return not any(note[0] for note in notes), max(note[1] for note in notes)


def _all(lines: Sequence[Connection], request: m.Request[Any]) -> list[Any]:
    """The replies of all to the same request, side by side."""
    pending = [line.post(request) for line in lines]
    try:
        return [each.result()[0] for each in pending]
    finally:
        for each in pending:
            each.forget()
