"""Variables: trees of arrays that all sessions share, each with one version for all of it."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.adapters.base import fingerprint, read_into, rebuild
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import versions
from paceline.core.clock import checked_timeout
from paceline.core.errors import SchemaError
from paceline.core.names import text
from paceline.handles import Handle, lasting
from paceline.packing import LARGE, memory, pack, view
from paceline.requests import Request
from paceline.rows import Rows
from paceline.stores import Store
from paceline.transports.base import Buffers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Snapshot(Generic[T]):
    """One version and its tree, which belong together for ever.

    The tree's arrays are read-only views of memory that all readers on this host share. That memory
    is not used again while the snapshot, or any view of it, is alive. Models in the tree have
    become dicts of arrays by parameter name, unless `read` was given one to be like.
    """

    version: int
    tree: T

    @property
    def count(self) -> int:
        """How many assigns its epoch has had up to this version; messages show this number."""
        return versions.count_of(self.version)

    def __repr__(self) -> str:
        return f"<Snapshot of version {self.count}>"


class Variable(Handle, Generic[T]):
    """A tree of arrays with one version for the whole tree, shared by all sessions.

    Every read is one version, never parts of two. Versions only grow; the same version is the same
    bytes for everyone.
    """

    kind = "variable"

    def __init__(self, key: str, store: Store) -> None:
        super().__init__(store.home, key)
        self.first_read: int | None = None
        """The first version read since this was set to `None`: what stamps a worker's items."""
        self.held: int | None = None
        """The last version read."""
        self._store = store
        self._newest: Snapshot[T] | None = None
        self._seen: weakref.WeakValueDictionary[str | None, Snapshot[T]] = (
            weakref.WeakValueDictionary()
        )
        self._filled: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Variable {self.called} on {self._connection.address}>"

    @property
    @lasting
    def version(self) -> int:
        """The version that now is; asks the server unless memory is shared with it.

        In a round of lockstep it is the round's, and so is what is read.
        """
        hint = self._store.hint()
        return self._store.call(m.Await(self.key, 0.0)).version if hint is None else hint

    @lasting
    def assign(self, tree: T, *, timeout: float | None = 60.0) -> int:
        """Replace the whole tree; return the new version.

        Atomic: readers see the old tree or the new one. The tree is copied before this returns, so
        the caller may go on changing it. NaN is a value like any other. Where the variable has a
        bound (`memory=`), this waits until the new version has room.

        Raises:
            SchemaError: the structure, a dtype or a shape differs; the message names the leaf.
            OutOfMemory: there is no memory for another version, or this session itself holds the
                versions that leave no room below the bound; the message says who holds what.
            TimedOut: the others made no room within `timeout` seconds; nothing was changed.
        """
        return self._write(tree, f"assign {self.called}", timeout, adding=False)

    @lasting
    def assign_add(self, tree: T, *, timeout: float | None = 60.0) -> int:
        """Add a tree of the same structure, leaf by leaf; return the new version.

        Atomic, and no addition is lost, whoever adds at the same time.

        Raises:
            SchemaError: the structure, a dtype or a shape differs, or a leaf cannot be added:
                arrays of numbers, ints and floats can. Text, bytes and bools can not: an empty one,
                or False, leaves what is there as it is.
            OutOfMemory, TimedOut: as `assign`.
        """
        return self._write(tree, f"assign_add {self.called}", timeout, adding=True)

    @lasting
    def gather(
        self, indices: Any, leaf: str | None = None, *, timeout: float | None = 60.0
    ) -> Rows[Any]:
        """The rows at `indices` of the newest version, copied.

        The variable is one array `[n, ...]`; or a tree, of which `leaf` names one by its path, as
        messages write it (`"$.table"`). Without a `leaf` it is all leaves, which then have the same
        `n`. `indices` are whole numbers from 0 to `n - 1` of any shape, in any order, one as often
        as wanted: the result has the shape `[*indices.shape, ...]` and owns its memory. All rows
        are of one version. It stamps a worker's items as `read` does, and in a round of lockstep
        the version is the round's. It waits only where the variable is spread over several servers
        and one of them has to be started again, or has lost its part until the next `assign`.

        Raises:
            SchemaError: there is no row at an index, the message has it and its place; or no such
                leaf, or none with rows.
            OutOfMemory: there is no memory for so many rows.
            TimedOut: such a wait took longer than `timeout` seconds.
            Disconnected: the server is gone, or silent when `timeout` is over.
        """
        limit, what = checked_timeout(timeout), f"gather {self.called}"
        version, tree = self._store.gather(indices, _checked_leaf(leaf, what), what, limit)
        self._note(version)
        return Rows(version, tree)

    @lasting
    def scatter_add(
        self,
        indices: Any,
        rows: Any,
        leaf: str | None = None,
        *,
        timeout: float | None = 60.0,
    ) -> int:
        """Add `rows` to those at `indices`; return the new version.

        Indices and `leaf` are as with `gather`, and `rows` has the shape and structure that gather
        gives, in the variable's dtypes. Rows of an index that comes more than once are added one
        after the other, in order, as `np.add.at` does. Atomic, and no addition is lost, whoever
        writes at the same time. Without indices there is no new version: the current is returned.

        No more is moved than these rows, unless somebody still keeps the version before, by a tag,
        a snapshot or a round of lockstep, or it was assigned: then the whole table is copied once.

        Raises:
            SchemaError: as `gather`; or rows have another shape or dtype, or cannot be added.
                Nothing was added.
            OutOfMemory, TimedOut: as `assign`.
            Disconnected: the server is gone, or silent when `timeout` is over. Whether the rows
                were added is unknown where this happened while they were.
        """
        limit, what = checked_timeout(timeout), f"scatter_add {self.called}"
        leaf = _checked_leaf(leaf, what)
        # It would be held only to be found again.
        self._newest = None
        return self._store.scatter_add(indices, rows, leaf, what, limit)

    def assigning(self, tree: T) -> Request[int]:
        """As `assign`, for `session.run` together with others."""
        return self._writing(m.Assign, tree, f"assign {self.called}")

    def adding(self, tree: T) -> Request[int]:
        """As `assign_add` of up to 1 MB, for `session.run` together with others."""
        return self._writing(m.Add, tree, f"assign_add {self.called}")

    def reading(self) -> Request[Snapshot[T]]:
        """As `read`, for `session.run` together with others; it does not stamp items."""
        home = self._store.step(f"read {self.called}")
        return Request(home, m.Read(self.key, m.NO_VERSION, 0.0), (), _snapshot)

    @lasting
    def read(
        self,
        *,
        newer_than: int | None = None,
        tag: str | None = None,
        like: Any = None,
        timeout: float | None = 60.0,
    ) -> Snapshot[T]:
        """The newest version, once it is above `newer_than`; or the one that `tag` names.

        Costs no message when nothing has changed since the last read, and a short one where no
        memory is shared with the server. Of a variable of 1 MB or more, or with a bound
        (`memory=`), that holds while the last snapshot is still alive. With `like`, named tuples
        and dataclasses come back as such, and so do JAX arrays and pytrees such as Equinox modules:
        where `like` has a JAX array, the tree has one with a copy of the leaf, on the same device.
        What cannot travel, such as a module's functions, is that of `like`. A read by tag does not
        stamp a worker's items.

        Raises:
            SchemaError: the variable differs from `like`; the message names the first odd leaf.
            TimedOut: no such version came within `timeout` seconds.
            WouldBlock: in a round of lockstep no newer version than the round's can come.
            UnknownName: there is no such tag; the message lists those there are.
            Disconnected: the server is gone.
        """
        limit = checked_timeout(timeout)
        if tag is None:
            found = self._read_newest(newer_than, limit)
        elif newer_than is None:
            found = self._read_tagged(checked_tag(tag), limit)
        else:
            raise SchemaError(
                f"read {self.called}: tag={tag!r} names one version, so it cannot be asked for"
                f" with newer_than={newer_than!r}; give one of the two"
            )
        if like is not None:
            return Snapshot(found.version, rebuild(found.tree, like, f"read {self.called}"))
        return found

    @lasting
    def read_into(
        self, target: Any, *, tag: str | None = None, timeout: float | None = 60.0
    ) -> int:
        """Copy the newest version, or the one that `tag` names, into `target`; return the version.

        `target` is a NumPy array, a torch module (parameters and buffers) or tensor, or a tree of
        them; JAX's arrays never change: use `read(like=)`. Everything is checked before the first
        byte is copied. A model that holds that version already is left as it is, at no cost; one
        that was changed since is written again, and so is every target with NumPy arrays, where a
        change cannot be seen. A read by tag does not stamp a worker's items.

        Raises:
            SchemaError: the target differs from the variable; the message names the leaf.
            UnknownName, TimedOut, Disconnected: as `read`.
        """
        limit = checked_timeout(timeout)
        held, mark = self._filled_with(target)
        have = m.NO_VERSION if held is None or fingerprint(target) != mark else held
        if tag is not None:
            request = m.ReadTag(self.key, checked_tag(tag), have)
            version, tree, _ = self._store.fetch(request, 0.0, limit)
        elif have != m.NO_VERSION and self._unchanged(have):
            version, tree = have, None
        else:
            # What is there already needs no wait.
            version, tree, _ = self._store.fetch(
                m.Read(self.key, m.NO_VERSION, limit, have), 0.0, limit
            )
        if version != have:
            try:
                read_into(target, tree, f"read_into {self.called}")
            finally:
                del tree
                self._store.give_back()
            self._remember(target, version)
        if tag is None:
            self._note(version)
        return version

    def last_read(self) -> Snapshot[Any] | None:
        """What was read last, if it is at hand still: a snapshot, or a model that is as it was."""
        found = self._newest or self._seen.get(None)
        if found is not None and found.version == self.held:
            return found
        for target, (version, mark) in list(self._filled.items()):
            if version == self.held and fingerprint(target) == mark:
                return Snapshot(version, target)
        return None

    @lasting
    def tag(self, tag: str, version: int | None = None) -> int:
        """Keep a version, the current one unless told another, under a name; return the version.

        It stays until `untag`, for all sessions. Another version than the current can be tagged
        while it is there: while it has another tag, or somebody on the server's host looks at it.
        Giving a version the tag that it has already changes nothing.

        Raises:
            SchemaError: the tag names another version; the message says which.
            UnknownName: that version is not kept any more; the message lists those that are.
        """
        wanted = None if version is None else operator.index(version)
        return self._store.call(m.Tag(self.key, checked_tag(tag), wanted)).version

    @lasting
    def tags(self) -> dict[str, int]:
        """All tags and the versions that they name, in order of tagging."""
        content: dict[str, int] = self._store.call(m.Tags(self.key)).content
        return content

    @lasting
    def untag(self, tag: str) -> None:
        """Take a tag off; its version goes as soon as nobody holds it.

        Raises:
            UnknownName: there is no such tag; the message lists those there are.
        """
        self._store.call(m.Untag(self.key, checked_tag(tag)))

    @lasting
    def memory(self) -> dict[str, Any]:
        """What its versions take where they are stored, and who keeps each of them.

        `bytes` in all, the `bound` (`None` without one), how many writes are `waiting` for room,
        and for each of the `versions` its `version`, its `bytes`, and what it is `held_by`:
        "current", "tag gen-12", or a task such as "worker:0" that looks at it. Who reads from
        another host, or has copied it, looks at memory of its own, which does not count.
        """
        content: dict[str, Any] = self._store.call(m.Usage(self.key)).content
        return content

    def _made_at(self, line: Connection, timeout: float | None) -> None:
        self._newest = None
        self._store.move(line, timeout)

    def _writing(self, kind: type[m.Assign | m.Add], tree: T, what: str) -> Request[int]:
        self._newest = None
        home = self._store.step(what)
        head, block = pack(home.arena, tree, what)
        message = kind(self.key, head, 0.0)
        return Request(home, message, [block], lambda reply, _: int(reply.version))

    def _write(self, tree: T, what: str, timeout: float | None, *, adding: bool) -> int:
        limit = checked_timeout(timeout)
        # The last snapshot may be all that keeps an old version's memory from being used again.
        self._newest = None
        return self._store.write(tree, what, adding=adding, timeout=limit)

    def _read_newest(self, newer_than: int | None, limit: float | None) -> Snapshot[T]:
        floor = m.NO_VERSION if newer_than is None else operator.index(newer_than)
        found = self._newest or self._seen.get(None)
        if found is None or found.version <= floor or not self._unchanged(found.version):
            have = m.NO_VERSION if found is None else found.version
            # What is there already needs no wait.
            patience = 0.0 if newer_than is None else limit
            request = m.Read(self.key, floor, limit, have)
            version, tree, nbytes = self._store.fetch(request, patience, limit)
            if found is None or version != have:
                found = self._seen[None] = Snapshot(version, tree)
                self._newest = None if self._is_wanted(nbytes) else found
        self._note(found.version)
        return found

    def _read_tagged(self, tag: str, limit: float | None) -> Snapshot[T]:
        found = self._seen.get(tag)
        have = m.NO_VERSION if found is None else found.version
        version, tree, _ = self._store.fetch(m.ReadTag(self.key, tag, have), 0.0, limit)
        if found is None or version != have:
            found = self._seen[tag] = Snapshot(version, tree)
        return found

    def _is_wanted(self, nbytes: int) -> bool:
        """Whether others may need that memory: nothing that is only remembered must keep it."""
        return self._store.bounded or nbytes >= LARGE

    def _unchanged(self, version: int) -> bool:
        return self._store.hint() == version

    def _note(self, version: int) -> None:
        if version != self.held:
            self.held = version
            noted = self._connection.conduct.on_read
            if noted is not None:
                noted(self.key, version)
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


def _snapshot(value: m.Value, buffers: Buffers) -> Snapshot[Any]:
    return Snapshot(value.version, view(value.layout, value.values, memory(buffers)))


def checked_tag(tag: Any) -> str:
    """`tag`, if it can be one; `SchemaError` if not."""
    return text(tag, "a tag")


def _checked_leaf(leaf: Any, what: str) -> str | None:
    """`leaf`, if it can be the path of one; `SchemaError` if not."""
    return None if leaf is None else text(leaf, f"{what}: the path of a leaf")
