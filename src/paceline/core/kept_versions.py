"""Which versions of a variable are kept, and for whom: the current one, tagged ones, held ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from paceline.core.errors import OutOfMemory, SchemaError, UnknownName
from paceline.core.versions import count_of
from paceline.core.waiting import NOT_YET, NotYet, Stored

LISTED = 16
"""How many tags or versions a message names."""


class Kept(NamedTuple):
    """One version that is kept, and what keeps it."""

    version: int
    nbytes: int
    current: bool
    tags: tuple[str, ...]
    holders: tuple[object, ...]


class KeptVersions:
    """The versions of one variable that can be had, and the bytes that they take.

    A version is kept while it is current, while a tag names it, and while somebody holds it. With
    a `bound`, what is kept never takes more bytes than that, the version that is replaced included:
    both exist at that moment.
    """

    def __init__(self, name: str, bound: int | None) -> None:
        self.name = name
        self.bound = bound
        self.nbytes = 0
        self.tags: dict[str, int] = {}
        self._current: int | None = None
        self._stored: dict[int, Stored] = {}
        self._tagged: Counter[int] = Counter()
        self._holders: dict[int, Counter[object]] = {}

    def at(self, version: int) -> Stored | None:
        """The tree of a version, while it is kept."""
        return self._stored.get(version)

    def stages(self) -> set[int]:
        """What other servers have the rest of these trees under."""
        return {tree.stage for tree in self._stored.values()}

    def replace(self, version: int, new: Stored) -> None:
        """Make a tree the current one; the one before is let go of unless something keeps it."""
        before, self._current = self._current, version
        self._stored[version] = new
        self.nbytes += new.nbytes
        if before is not None:
            self._forget(before)

    def noted(self, versions: set[int]) -> list[tuple[int, Stored]]:
        """Trees that are kept, oldest first; from now on nobody writes to one."""
        found = [(version, self._stored[version]) for version in sorted(versions)]
        for _, tree in found:
            tree.own = False
        return found

    def revive(self, current: int, trees: Mapping[int, Stored], tags: Mapping[str, int]) -> None:
        """Keep these besides what is held, under these tags, and let one be the current one."""
        for version, tree in trees.items():
            if version != current:
                self._stored[version] = tree
                self.nbytes += tree.nbytes
        self.replace(current, trees[current])
        for tag, version in tags.items():
            self.tag(tag, version)
        for version in trees:
            self._forget(version)

    def alone(self) -> bool:
        """Whether the current version is kept only because it is that."""
        assert self._current is not None
        return self._current not in self._holders and not self._tagged[self._current]

    def renumber(self, version: int) -> None:
        """Let the current tree be that version, and none before it, as long as it is `alone`."""
        assert self._current is not None
        assert self.alone()
        self._stored[version] = self._stored.pop(self._current)
        del self._tagged[self._current]
        self._current = version

    # Holding

    def hold(self, version: int, holder: object) -> None:
        """Keep a version until `holder` has let go of it as often as it took hold."""
        assert version in self._stored
        self._holders.setdefault(version, Counter())[holder] += 1

    def let_go(self, version: int, holder: object) -> bool:
        """Undo one `hold`; whether the version's memory is free now."""
        held = self._holders[version]
        held[holder] -= 1
        if held[holder] > 0:
            return False
        del held[holder]
        if not held:
            del self._holders[version]
        return self._forget(version)

    # Tags

    def tag(self, tag: str, version: int | None) -> int:
        """Keep a version, the current one unless told another, under a name.

        Raises:
            SchemaError: the name is that of another version, or there is none yet.
            UnknownName: that version is not kept any more.
        """
        what = f"tag '{tag}' of '{self.name}'"
        if version is None:
            version = self._current
        if version is None:
            raise SchemaError(f"{what}: the variable has no value yet")
        if version not in self._stored:
            raise UnknownName(
                f"{what}: version {version} (count {count_of(version)}) is not kept; those of"
                f" counts {_some(map(count_of, sorted(self._stored)))} are; a"
                " version is kept while it is current, tagged or held"
            )
        found = self.tags.get(tag)
        if found is None:
            self.tags[tag] = version
            self._tagged[version] += 1
        elif found != version:
            raise SchemaError(
                f"{what}: it names version {count_of(found)} already, not {count_of(version)};"
                f" untag('{tag}') frees the name"
            )
        return version

    def untag(self, tag: str) -> bool:
        """Take a tag off; whether its version's memory is free now.

        Raises:
            UnknownName: there is no such tag; the message lists those there are.
        """
        version = self.tagged(tag)
        del self.tags[tag]
        self._tagged[version] -= 1
        return self._forget(version)

    def tagged(self, tag: str) -> int:
        """The version that a tag names.

        Raises:
            UnknownName: there is no such tag; the message lists those there are.
        """
        if tag not in self.tags:
            raise UnknownName(f"no tag '{tag}' of '{self.name}'; there are {_some(self.tags)}")
        return self.tags[tag]

    # The bound

    def check_bound(self, nbytes: int) -> None:
        """Whether the bound allows for a first tree of that size at all.

        Raises:
            SchemaError: not even the current version and the one after it have room.
        """
        if self.bound is not None and self.bound < 2 * nbytes:
            raise SchemaError(
                f"variable '{self.name}': memory={self.bound} bytes, but its first version takes"
                f" {nbytes}, and the current version and the next exist at once: give it"
                f" memory={2 * nbytes} or more"
            )

    def room(self, nbytes: int, asker: object, called: Callable[[object], str]) -> bool | NotYet:
        """Whether another version of `nbytes` has room; not yet when others could make room.

        `called` gives a holder's name for messages.

        Raises:
            OutOfMemory: whatever the others do, what `asker` itself holds leaves no room.
        """
        if self.bound is None or self.nbytes + nbytes <= self.bound:
            return True
        assert self._current is not None
        own = [version for version in self._held_by(asker) if version != self._current]
        # What would still be there if everybody else let go and every other tag were taken off.
        firm = sum(self._stored[version].nbytes for version in (self._current, *own))
        if firm + nbytes <= self.bound:
            return NOT_YET
        if own:
            why = f"this session itself holds {_some(map(count_of, own))}: let go of them first"
        else:
            why = "it and the current version never have room together"
        raise OutOfMemory(f"{self.full(nbytes, called)}; {why}")

    def full(self, nbytes: int, called: Callable[[object], str]) -> str:
        """Why there is no room for another version, as part of a message: who holds what."""
        kept = self.listing()
        held = [
            f"version {count_of(one.version)} ({one.nbytes} bytes) by"
            f" {_names(held_by(one, called))}"
            for one in kept[:LISTED]
        ]
        if len(kept) > LISTED:
            held.append(f"and {len(kept) - LISTED} more versions")
        return (
            f"no room in '{self.name}' for another {nbytes} bytes: {self.nbytes} of"
            f" memory={self.bound} are held: {'; '.join(held)}"
        )

    def listing(self) -> list[Kept]:
        """What is kept, oldest first."""
        tags: dict[int, list[str]] = {}
        for tag, version in self.tags.items():
            tags.setdefault(version, []).append(tag)
        return [
            Kept(
                version,
                self._stored[version].nbytes,
                version == self._current,
                tuple(tags.get(version, ())),
                tuple(self._holders.get(version, ())),
            )
            for version in sorted(self._stored)
        ]

    def _held_by(self, holder: object) -> list[int]:
        return sorted(version for version, held in self._holders.items() if holder in held)

    def _forget(self, version: int) -> bool:
        if version == self._current or version in self._holders or self._tagged[version]:
            return False
        del self._tagged[version]
        self.nbytes -= self._stored.pop(version).nbytes
        return True


def held_by(kept: Kept, called: Callable[[object], str]) -> list[str]:
    """What keeps a version, in words."""
    words = ["current"] if kept.current else []
    words += [f"tag {tag}" for tag in kept.tags]
    return words + sorted(map(called, kept.holders))


def _names(words: list[str]) -> str:
    return ", ".join(words[:LISTED]) + (
        f" and {len(words) - LISTED} more" if words[LISTED:] else ""
    )


def _some(things: Iterable[Any]) -> str:
    """The first of them, as part of a message."""
    known = list(things)
    return f"{known[:LISTED]}{f' and {len(known) - LISTED} more' if known[LISTED:] else ''}"
