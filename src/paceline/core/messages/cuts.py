"""Requests of who takes all servers as they are at one moment, and of who brings that back."""

from __future__ import annotations

from typing import Any

from paceline.core.messages.replies import Count, Done, Fetched, Request, RunHead, Text


class Freeze(Request[Done], tag=84, frozen=True, gc=False):
    """Carry out nothing but what this session asks about a cut, until it thaws or for a while."""


class Note(Request[Text], tag=85, frozen=True, gc=False):
    """Take note, by reference, of all that there is in these containers, in all for `None`.

    Answered with what was noted: kinds, names and bytes; and the resets that the server knows of,
    of all containers and by name.
    """

    containers: list[str] | None = None


class Noticed(Request[Text], tag=83, frozen=True, gc=False):
    """Of which of these containers somebody took note, or brought something back.

    And the server's epoch, and whether it was started again and waits for what it held.
    """

    containers: list[str]


class Thaw(Request[Text], tag=86, frozen=True, gc=False):
    """Carry out all requests again; whether it was frozen until now.

    With `forget` also let go of what this session took note of.
    """

    forget: bool


class Fetch(Request[Fetched], tag=87, frozen=True, gc=False):
    """What was noted of one thing, from its piece `first` on; after the last it is forgotten."""

    entry: Count
    first: Count


class Bring(Request[Done], tag=88, frozen=True, gc=False):
    """Something that `Revive` will make, or more pieces of it; their arrays are in the buffers."""

    kind: str
    name: str
    facts: bytes
    heads: list[RunHead]
    about: list[Any]


class Revive(Request[Text], tag=89, frozen=True, gc=False):
    """Make all that this session has brought, in one step; of each whether it was made.

    What is there and has been used stays as it is: then it says why. That is all there is to bring
    back into these containers, into any for `None`.
    """

    containers: list[str] | None
