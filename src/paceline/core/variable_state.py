"""A variable: one tree, one version for all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from paceline.core import tree, versions
from paceline.core.errors import SchemaError
from paceline.core.facts import Noted, Piece, VariableFacts, tree_piece
from paceline.core.kept_versions import KeptVersions
from paceline.core.messages.replies import Spreading
from paceline.core.names import parts
from paceline.core.waiting import NOT_YET, NotYet, Stored

LEAN = 64 << 10
"""Bytes up to which a tree goes to its reader at once, who could have it from elsewhere."""


def _by_str(holder: object) -> str:
    return str(holder)


class VariableState:
    """The newest tree of one variable, and the older ones that are kept.

    `called` gives the name of a holder or writer for messages. Of a variable that is spread over
    servers (`spread` says how) this is its home, and trees are the home's shares.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        *,
        memory: int | None = None,
        spread: Spreading | None = None,
        called: Callable[[object], str] = _by_str,
    ) -> None:
        self.name = name
        self.spread = spread
        self.version = versions.first(epoch)
        self.stored: Stored | None = None
        self.kept = KeptVersions(name, memory)
        self.changing = False
        """Whether numbers are being added to the current tree itself."""
        self._called = called
        self._adding = False

    @property
    def layout(self) -> bytes:
        """The layout of the whole tree."""
        assert self.stored is not None
        return self.stored.layout if self.spread is None else self.spread.layout

    def in_one_place(self) -> VariableState:
        """This variable, if all of it is here.

        Raises:
            SchemaError: it is spread over several servers.
        """
        if self.spread is None:
            return self
        tasks = ", ".join(task for task, _ in self.spread.parts)
        raise SchemaError(
            f"variable '{self.name}' is spread over {tasks}: find it again with"
            f" session.variable('{parts(self.name).name}')"
        )

    def define(
        self, first: Stored, *, overwrite: bool = False, writer: object = None
    ) -> bool | NotYet:
        """Initialise, or find it initialised; whether `first` was taken.

        Raises:
            SchemaError: it exists with another structure, or `first` is too large for its bound.
            OutOfMemory: as `assign`.
        """
        if self.stored is None:
            self.kept.check_bound(first.nbytes)
            return self._commit(first) > 0
        self._check("variable", first)
        if not overwrite:
            return False
        return self._free(first, writer) and self._commit(first) > 0

    def defined(self) -> Literal[True] | NotYet:
        """Whether it has a value."""
        return NOT_YET if self.stored is None else True

    def assign(self, new: Stored, writer: object = None) -> int | NotYet:
        """Replace the tree; the new version. Not while an addition is being computed.

        Not, either, while there is no room for another version.

        Raises:
            SchemaError: `new` has another structure.
            OutOfMemory: what `writer` itself holds leaves no room.
        """
        if self.stored is not None:
            self._check("assign", new)
        return self._free(new, writer) and self._commit(new)

    def begin_add(self, delta: Stored, writer: object = None) -> Stored | NotYet:
        """Take the write turn; the tree that `delta` is to be added to.

        Raises:
            SchemaError: `delta` has another structure.
            OutOfMemory: what `writer` itself holds leaves no room.
        """
        if self.stored is None:
            return NOT_YET
        self._check("assign_add", delta)
        return self.take_turn(writer)

    def take_turn(self, writer: object = None) -> Stored | NotYet:
        """Take the write turn, to add what is not here yet; the tree that it is added to.

        Raises:
            OutOfMemory: what `writer` itself holds leaves no room.
        """
        if self.stored is None or not self._free(self.stored, writer):
            return NOT_YET
        # Until it ends nobody else can take the room that was found for the sum.
        self._adding = True
        return self.stored

    def begin_rows(self, writer: object = None) -> Stored | NotYet:
        """Take the write turn to add to rows; the tree that they are to be added to.

        Either to a copy, as with `begin_add`. Or, where nobody else can have that tree, to itself:
        `changing` says so. It is the next version from now on, so that whoever holds or tags what
        is current keeps what it becomes; nobody may look at it until the turn has ended.

        Raises:
            OutOfMemory: what `writer` itself holds leaves no room for a copy.
        """
        if self.stored is None or self._adding:
            return NOT_YET
        changing = self.stored.own and self.kept.alone()
        if not changing and not self._free(self.stored, writer):
            return NOT_YET
        self._adding, self.changing = True, changing
        if changing:
            self.version += 1
            self.kept.renumber(self.version)
        return self.stored

    def end_add(self, total: Stored | None) -> int:
        """Give the write turn back; the version, a new one unless `total` is `None`."""
        self._adding = self.changing = False
        return self.version if total is None else self._commit(total)

    def read(self, newer_than: int) -> tuple[int, Stored] | NotYet:
        """The newest version and its tree, once it is above `newer_than`."""
        if self.stored is None or self.version <= newer_than:
            return NOT_YET
        return self.version, self.stored

    def at(self, version: int) -> Stored | None:
        """The tree of a version, while it is kept: while it is current, tagged or held."""
        return self.kept.at(version)

    @property
    def pristine(self) -> bool:
        """Whether it has its first value, if any, and nobody writes or has tagged it."""
        written = versions.count_of(self.version) > 1
        return not (written or self.kept.tags or self._adding or self.spread)

    def noted(self) -> Noted:
        """Its current version and those that have tags; from now on none of them is changed."""
        assert self.stored is not None
        tags = dict(self.kept.tags)
        found = self.kept.noted({self.version, *tags.values()})

        def pieces() -> list[Piece]:
            return [tree_piece(each, version, each.stage) for version, each in found]

        facts = VariableFacts(self.kept.bound, self.version, tags, self.spread)
        nbytes = sum(each.nbytes for _, each in found)
        return Noted(facts, pieces, nbytes, self.changing)

    def revive(self, current: int, trees: Mapping[int, Stored], tags: Mapping[str, int]) -> None:
        """Be, if it is `pristine`, what was noted of one of the same structure.

        Raises:
            SchemaError: it has another structure.
            ValueError: a tag is of a version that is not there.
        """
        if self.stored is not None:
            self._check("restore", trees[current])
        if not trees.keys() >= {*tags.values()}:
            raise ValueError("it has a tag of a version that it does not have")
        self.stored, self.version = trees[current], current
        self.kept.revive(current, trees, tags)

    def check_write(self, what: str, new: Stored, writer: object) -> None:
        """Whether a write is possible at all, whoever else is to write before it.

        Raises:
            SchemaError: `new` has another structure.
            OutOfMemory: what `writer` itself holds leaves no room.
        """
        if self.stored is not None:
            self._check(what, new)
            self.kept.room(new.nbytes, writer, self._called)

    def writable(self, new: Stored, writer: object) -> bool:
        """Whether a write that is possible is so now; raises as `check_write`."""
        return self._free(new, writer) is True

    def why_not(self, nbytes: int) -> str:
        """What a write waits for, as part of a message."""
        if self._adding:
            return f"an addition to '{self.name}' is being computed"
        return f"{self.kept.full(nbytes, self._called)}; whoever lets go or untags ends the wait"

    def _free(self, new: Stored, writer: object) -> Literal[True] | NotYet:
        if self.kept.room(new.nbytes, writer, self._called) and not self._adding:
            return True
        return NOT_YET

    def _commit(self, new: Stored) -> int:
        # Version and tree change in one step, so no reader can pair an old one with a new one.
        self.stored, self.version = new, self.version + 1
        self.kept.replace(self.version, new)
        return self.version

    def _check(self, what: str, new: Stored) -> None:
        assert self.stored is not None
        tree.check(new.layout, self.stored.layout, f"{what} '{self.name}'")
