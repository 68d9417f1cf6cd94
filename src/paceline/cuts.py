"""A cut through all servers of a cluster: what they had at one moment, fetched afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.errors import PacelineError, TimedOut
from paceline.core.names import parts
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


class Told(NamedTuple):
    """What servers say before something is brought back.

    Attributes:
        marked: the containers of which one has taken note, or had something brought back.
        epoch: the newest of theirs.
        restoring: the lines to those that were started again and wait for what they held.
    """

    marked: set[str]
    epoch: int
    restoring: list[Connection]


@contextmanager
def cut(lines: Sequence[Connection], containers: list[str] | None = None) -> Iterator[Cut]:
    """Freeze all servers, have them take note of what is in some containers or all, and thaw them.

    Nothing is copied, and what was noted stays as it is until the end of the block: one moment, of
    which each request has been carried out everywhere, or nowhere, before it.

    Raises:
        TimedOut: they could not be kept frozen for as long as it takes.
        Disconnected: a server is gone.
    """
    taken = None
    for _ in range(ATTEMPTS):
        taken = _taken(lines, containers)
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


def _taken(lines: Sequence[Connection], containers: list[str] | None) -> Cut | None:
    """A cut; `None` if a server did not stay frozen until all had taken note."""
    began = time.monotonic()
    try:
        # Who has frozen the first comes first at the others too.
        lines[0].call(m.Freeze())
        _all(lines[1:], m.Freeze())
        notes = _all(lines, m.Note(containers))
    except BaseException:
        for line in lines:
            with suppress(PacelineError):
                line.post(m.Thaw(True)).forget()
        raise
    frozen = [reply.content for reply in _all(lines, m.Thaw(False))]
    pause = time.monotonic() - began
    if not all(frozen):
        return None
    # The first one counts the resets: what they removed may not be gone from the others yet.
    _, every, by_name = notes[0].content
    entries = [
        Entry(line, number, *each)
        for line, note in zip(lines, notes, strict=True)
        for number, each in enumerate(note.content[0])
        if parts(each[1]).generation >= max(every, by_name.get(parts(each[1]).container, 0))
    ]
    return Cut(entries, pause)


def told(lines: Sequence[Connection], containers: list[str]) -> Told:
    """What servers say of containers that something is to be brought back into."""
    notes = [reply.content for reply in _all(lines, m.Noticed(containers))]
    return Told(
        {each for marked, _, _ in notes for each in marked},
        max(epoch for _, epoch, _ in notes),
        [line for line, note in zip(lines, notes, strict=True) if note[2]],
    )


def _all(lines: Sequence[Connection], request: m.Request[Any]) -> list[Any]:
    """The replies of all to the same request, side by side."""
    pending = [line.post(request) for line in lines]
    try:
        return [each.result()[0] for each in pending]
    finally:
        for each in pending:
            each.forget()
