"""Variables: trees of arrays that all sessions share, each with one version for all of it."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.adapters.base import fingerprint, read_into, rebuild
from paceline.connection import Connection, memory
from paceline.core import messages as m
from paceline.core import versions
from paceline.core.clock import checked_timeout
from paceline.core.tree import Array
from paceline.packing import pack, view

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[T]):
    """One version and its tree, which belong together for ever.

    The tree's arrays are read-only views of memory that all readers on this host share. That memory
    is not used again while the snapshot, or any view of it, is alive. Models in the tree have
    become dicts of arrays by parameter name, unless `read` was given one to be like.
    """

    version: int
    tree: T

    def __repr__(self) -> str:
        return f"<Snapshot of version {versions.count_of(self.version)}>"


class Variable(Generic[T]):
    """A tree of arrays with one version for the whole tree, shared by all sessions.

    Every read is one version, never parts of two. Versions only grow; the same version is the same
    bytes for everyone.
    """

    def __init__(self, connection: Connection, name: str, word: Array | None) -> None:
        self.name = name
        self.first_read: int | None = None
        """The first version read since this was set to `None`: what stamps a worker's items."""
        self.held: int | None = None
        """The last version read."""
        self._connection = connection
        self._word = word
        self._snapshot: Snapshot[T] | None = None
        self._filled: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Variable '{self.name}' on {self._connection.address}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("variable", self.name, self._connection.address)

    @property
    def version(self) -> int:
        """The version that now is; asks the server unless memory is shared with it."""
        if self._word is not None and self._connection.alive():
            return int(self._word[0])
        return self._connection.exchange(m.Await(self.name, 0.0))[0].version

    def assign(self, tree: T) -> int:
        """Replace the whole tree; return the new version.

        Atomic: readers see the old tree or the new one. The tree is copied before this returns, so
        the caller may go on changing it. NaN is a value like any other.

        Raises:
            SchemaError: the structure, a dtype or a shape differs; the message names the leaf.
            OutOfMemory: there is no memory for another version.
        """
        return self._write(m.Assign, tree, f"assign '{self.name}'")

    def assign_add(self, tree: T) -> int:
        """Add a tree of the same structure, leaf by leaf; return the new version.

        Atomic, and no addition is lost, whoever adds at the same time.

        Raises:
            SchemaError: the structure, a dtype or a shape differs, or a leaf cannot be added.
        """
        return self._write(m.Add, tree, f"assign_add '{self.name}'")

    def read(
        self,
        *,
        newer_than: int | None = None,
        like: Any = None,
        timeout: float | None = 60.0,
    ) -> Snapshot[T]:
        """The newest version, once it is above `newer_than`.

        Costs no message when nothing has changed since the last read, and a short one where no
        memory is shared with the server. With `like`, named tuples and dataclasses come back as
        such, and so do JAX arrays and pytrees such as Equinox modules: where `like` has a JAX
        array, the tree has one with a copy of the leaf, on the same device. What cannot travel,
        such as a module's functions, is that of `like`.

        Raises:
            SchemaError: the variable differs from `like`; the message names the first odd leaf.
            TimedOut: no such version came within `timeout` seconds.
            Disconnected: the server is gone.
        """
        limit = checked_timeout(timeout)
        floor = m.NO_VERSION if newer_than is None else operator.index(newer_than)
        found = self._snapshot
        if found is None or found.version <= floor or not self._unchanged(found.version):
            have = m.NO_VERSION if found is None else found.version
            value, buffers = self._fetch(floor, limit, have)
            if found is None or value.version != have:
                tree = view(value.layout, value.values, memory(buffers))
                found = self._snapshot = Snapshot(value.version, tree)
        self._note(found.version)
        if like is not None:
            return Snapshot(found.version, rebuild(found.tree, like, f"read '{self.name}'"))
        return found

    def read_into(self, target: Any, *, timeout: float | None = 60.0) -> int:
        """Copy the newest version into `target`, in place; return the version.

        `target` is a NumPy array, a torch module (parameters and buffers) or tensor, or a tree of
        them; JAX's arrays never change: use `read(like=)`. Everything is checked before the first
        byte is copied. A model that holds the newest version already is left as it is, at no cost;
        one that was changed since is written again, and so is every target with NumPy arrays, where
        a change cannot be seen.

        Raises:
            SchemaError: the target differs from the variable; the message names the leaf.
            TimedOut, Disconnected: as `read`.
        """
        limit = checked_timeout(timeout)
        version, mark = self._filled_with(target)
        have = m.NO_VERSION
        if version is not None and fingerprint(target) == mark:
            if self._unchanged(version):
                self._note(version)
                return version
            have = version
        value, buffers = self._fetch(m.NO_VERSION, limit, have)
        if value.version == have:
            self._note(have)
            return have
        read_into(
            target,
            view(value.layout, value.values, memory(buffers)),
            f"read_into '{self.name}'",
        )
        del buffers
        self._connection.give_back()
        self._note(value.version)
        self._remember(target, value.version)
        return value.version

    def _write(self, kind: type[m.Assign | m.Add], tree: T, what: str) -> int:
        head, block = pack(self._connection.arena, tree, what)
        # The last snapshot may be all that keeps an old version's memory from being used again.
        self._snapshot = None
        return self._connection.call(kind(self.name, head), [block]).version

    def _fetch(
        self, newer_than: int, limit: float | None, have: int = m.NO_VERSION
    ) -> tuple[m.Value, Any]:
        request = m.Read(self.name, newer_than, limit, have)
        # What is there already needs no wait.
        patience = 0.0 if newer_than == m.NO_VERSION else limit
        return self._connection.exchange(request, timeout=patience)

    def _unchanged(self, version: int) -> bool:
        # The word is a hint: equal means unchanged. It means nothing once the server is gone.
        return self._word is not None and self._word[0] == version and self._connection.alive()

    def _note(self, version: int) -> None:
        self.held = version
        if self.first_read is None:
            self.first_read = version

    def _filled_with(self, target: Any) -> tuple[int | None, Any]:
        try:
            return self._filled.get(target, (None, None))
        except TypeError:
            return None, None

    def _remember(self, target: Any, version: int) -> None:
        mark = fingerprint(target)
        if mark is None:
            return
        try:
            self._filled[target] = (version, mark)
        except TypeError:
            # Plain containers cannot be remembered; they are written again.
            return
