"""Replicas: models linked to the variables that hold their parameters, by the leaves' names."""

from __future__ import annotations

import time
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np

from paceline.core.clock import checked_timeout, left
from paceline.core.errors import SchemaError, TimedOut, WouldBlock, said_of
from paceline.core.names import text
from paceline.core.spreading import Placement
from paceline.core.tree import check, flatten
from paceline.core.versions import count_of
from paceline.leaves import LeafPlaces, sizes
from paceline.lines import Lines
from paceline.linked import Leaves, Linked, Names
from paceline.pending import limited
from paceline.variables import Variable

T = TypeVar("T")

_UNSET: Any = object()


class _Link(Generic[T]):
    """A model, and the variables that have its leaves: one, or one for each server."""

    def __init__(
        self, name: str, linked: Linked[T], parts: dict[str, tuple[Variable[Leaves], list[str]]]
    ) -> None:
        self.name = name
        self._linked = linked
        self._parts = parts
        self._known: dict[str, int] = {}
        self._mark: object | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' of a {type(self.value).__name__}>"

    def __paceline_handle__(self) -> tuple[str, ...]:
        return ("replica", self.name)

    @property
    def value(self) -> T:
        """The model. Where it is a tree that never changes, such as JAX's, the newest one.

        Such a tree can be replaced here, by another of the same structure.
        """
        return self._linked.value

    @value.setter
    def value(self, model: T) -> None:
        self._linked.value = model

    def leaves(self) -> dict[str, Any]:
        """Copies of the model's parameters as they are now, by the leaves' shared names.

        Raises:
            SchemaError: a graph's variables are not all initialised.
        """
        found = self._linked.leaves(None, f"leaves of '{self.name}'")
        # A torch module's are its own memory: a step would change those of before it.
        arrays = {name: leaf for name, leaf in found.items() if isinstance(leaf, np.ndarray)}
        return found | {name: array.copy() for name, array in arrays.items()}

    def _pull(self, timeout: float | None) -> dict[str, int]:
        limit, began = checked_timeout(timeout), time.monotonic()
        mark = self._linked.mark()
        known = self._known if mark is not None and mark == self._mark else {}
        found: Leaves = {}
        versions: dict[str, int] = {}
        for place, (variable, _) in self._parts.items():
            version = variable.version
            if version == known.get(place):
                _note(variable, version)
            else:
                snapshot = variable.read(timeout=left(limit, began))
                version = snapshot.version
                found.update(snapshot.tree)
            versions[place] = version
        if found:
            self._linked.put(found, f"pull '{self.name}'")
            self._mark = self._linked.mark()
        self._known = versions
        return versions

    def _push(self, tree: Any, op: str, timeout: float | None) -> dict[str, int]:
        what = f"push '{self.name}'"
        if op not in ("assign", "add"):
            raise SchemaError(f"{what}: op is 'assign' or 'add', not {op!r}")
        limit, began = checked_timeout(timeout), time.monotonic()
        if tree is None and op == "add":
            raise SchemaError(f"{what}: op='add' adds a tree, such as gradients or a step: give it")
        mark = self._linked.mark() if tree is None else None
        found = self._linked.leaves(tree, what, adding=op == "add")
        versions: dict[str, int] = {}
        for place, (variable, names) in self._parts.items():
            write = variable.assign if op == "assign" else variable.assign_add
            share = {name: found[name] for name in names if name in found}
            versions[place] = write(share, timeout=left(limit, began))
        if tree is None:
            self._known, self._mark = versions, mark
        return versions


class Replica(_Link[T]):
    """A model linked to one variable, which has its leaves by name.

    The model is a torch module, a Keras model, a TensorFlow 1 graph (its `tf.compat.v1.Session`),
    or a tree of arrays: NumPy's, or JAX's. What has the same names and shapes shares the variable,
    whatever its framework. Nothing is copied but by `pull` and `push`.
    """

    @property
    def variable(self) -> Variable[Leaves]:
        """What has the parameters, as a dict by the leaves' shared names."""
        return self._parts[""][0]

    @property
    def version(self) -> int | None:
        """The version that was last pulled, or pushed from the model; `None` before."""
        return self._known.get("")

    @property
    def count(self) -> int | None:
        """That version as messages show it, the number of assigns up to it; `None` before."""
        return None if self.version is None else count_of(self.version)

    @limited
    def pull(self, *, timeout: float | None = 60.0) -> int:
        """Bring the newest version into the model; return the version.

        Free when the model has it already, where the framework lets a change be seen: not with
        NumPy arrays and TensorFlow, which are written again. All is read, and checked, before the
        first byte of the model is written. Stamps a worker's items as `Variable.read` does.

        Raises:
            SchemaError: the model is no longer what it was when it was linked.
            TimedOut, Disconnected: as `Variable.read`.
        """
        return self._pull(timeout)[""]

    @limited
    def push(
        self,
        tree: Any = None,
        op: Literal["assign", "add"] = "assign",
        *,
        timeout: float | None = 60.0,
    ) -> int:
        """Assign the model's parameters, or a tree's; or add a tree to what is there. The version.

        A tree has leaves of the shared names, in any nesting, or of the model's own, for example
        gradients of `named_parameters()`. If all its names are shared ones they are taken as such,
        else all are the model's own. To assign it has all, to add as many as it likes; `None`
        counts as missing. Atomic, as `Variable.assign` and `Variable.assign_add` are.

        Raises:
            SchemaError: a leaf is none of the model's, is missing, or has another shape or dtype;
                the message names it. Names are of both kinds, or there is nothing to add. Arrays
                of bools and of bfloat16 cannot be added to.
            OutOfMemory, TimedOut, Disconnected: as `Variable.assign`.
        """
        return self._push(tree, op, timeout)[""]


class ShardedReplica(_Link[T]):
    """A model whose leaves are spread over a variable on each of several servers.

    Each of these has versions of its own, so an optimiser may run beside each, for its own share.
    """

    @property
    def variables(self) -> dict[str, Variable[Leaves]]:
        """The variable on each server, by its task, with leaves by their shared names."""
        return {task: variable for task, (variable, _) in self._parts.items()}

    @property
    def versions(self) -> dict[str, int]:
        """For each server the version that was last pulled, or pushed from the model."""
        return dict(self._known)

    @property
    def counts(self) -> dict[str, int]:
        """Those versions as messages show them, the numbers of assigns up to them."""
        return {task: count_of(version) for task, version in self._known.items()}

    @limited
    def pull(self, *, timeout: float | None = 60.0) -> dict[str, int]:
        """Bring the newest versions into the model; return that of each server.

        As `Replica.pull`: all are read before the first byte is written. They are not of one
        moment.
        """
        return self._pull(timeout)

    @limited
    def push(
        self,
        tree: Any = None,
        op: Literal["assign", "add"] = "assign",
        *,
        timeout: float | None = 60.0,
    ) -> dict[str, int]:
        """Assign or add on each server; return the version of each. As `Replica.push`.

        It is atomic on each server, and not for all: after an error some may have it.
        """
        return self._push(tree, op, timeout)


class Replicas:
    """A session's way to replicas."""

    _lines: Lines

    @overload
    def replica(
        self,
        name: str | Variable[Any],
        model: T,
        *,
        names: Names | None = None,
        placement: Placement | None = None,
        overwrite: bool = False,
        sharded: Literal[False] = False,
        timeout: float | None = 60.0,
    ) -> Replica[T]: ...

    @overload
    def replica(
        self,
        name: str,
        model: T,
        *,
        names: Names | None = None,
        placement: Placement | None = None,
        overwrite: bool = False,
        sharded: Literal[True],
        timeout: float | None = 60.0,
    ) -> ShardedReplica[T]: ...

    @limited
    def replica(
        self,
        name: str | Variable[Any],
        model: Any = _UNSET,
        *,
        names: Names | None = None,
        placement: Placement | None = None,
        overwrite: bool = False,
        sharded: bool = False,
        timeout: float | None = 60.0,
    ) -> Replica[Any] | ShardedReplica[Any]:
        """Link a model to the variable of that name, which has its parameters by their names.

        Whoever is first initialises it with the model's parameters. Later models are checked, and
        stay as they are until `pull`. Given a variable in place of its name, such as the one that a
        worker's function is given, that one is linked: what is pulled then stamps items.

        Names of leaves are one for all frameworks: the keys joined by dots, `fc.weight`. With
        `names`, a dict or a function, this model's become the shared ones; what becomes `None` is
        not shared. So a torch module, a JAX tree and a Keras model share one set of parameters
        where names, shapes and dtypes agree.

        Where there are several servers the first model's leaves are spread over them, with one
        version for all: where `placement` says, a function of the names and bytes of all arrays, as
        `spread` takes it; else where the setter of `device` puts each leaf; else evenly by bytes.
        With `device("ps:1")` all are there. If `sharded`, each of these servers has a variable of
        its own in place of that, `name@ps:0`, with versions of its own.

        Raises:
            SchemaError: the variable has other leaves, shapes or dtypes than the model, the message
                names the first odd leaf; or the model is none, or two leaves have one name.
            TimedOut, OutOfMemory: as `variable` and `spread`.
        """
        variable = name if isinstance(name, Variable) else None
        called = name.name if isinstance(name, Variable) else text(name, "the name of a replica")
        what = f"replica '{called}'"
        if model is _UNSET:
            raise SchemaError(f"{what}: give a model; session.variable('{called}') needs none")
        if not isinstance(sharded, (bool, np.bool_)):
            raise SchemaError(f"{what}: sharded is True or False, not {sharded!r}")
        linked = Linked(model, names, what)
        linking = Linking(self, self._lines, called, linked, placement, overwrite, timeout)
        return linking.sharded() if sharded else linking.whole(variable)


class Linking(Generic[T]):
    """How a model comes to be linked: its variables are found, or made of its leaves."""

    def __init__(
        self,
        session: Any,
        lines: Lines,
        name: str,
        linked: Linked[T],
        placement: Placement | None,
        overwrite: bool,
        timeout: float | None,
    ) -> None:
        self._session, self._lines = session, lines
        self._name, self._linked = name, linked
        self._where, self._overwrite = LeafPlaces(lines, name, placement), overwrite
        self._limit, self._began = checked_timeout(timeout), time.monotonic()

    def whole(self, variable: Variable[Any] | None) -> Replica[T]:
        """One variable: that one, or that of the name."""
        # A setter is asked for each leaf by every process: so it counts the same in all.
        places = {} if variable is not None else self._where.wished(self._linked.outline)
        found = variable or self._found(self._name) or self._made(places)
        self._check(found, self._linked.outline)
        return Replica(self._name, self._linked, {"": (found, [*self._linked.outline])})

    def sharded(self) -> ShardedReplica[T]:
        """A variable for each server. Who made the first said where each leaf is."""
        outline = self._linked.outline
        wished = self._where.wished(outline)
        index = self._found(self._name, always=True)
        if index is None:
            wanted = wished or self._where.each(outline)
            with self._lines.proposing(None):
                index = self._session.variable(self._name, wanted, timeout=self._left)
        places = index.read(timeout=self._left).tree
        with said_of(f"replica '{self._name}'"):
            if not isinstance(places, dict) or not all(type(p) is str for p in places.values()):
                raise SchemaError("it is there, and not sharded")
        check(flatten(dict.fromkeys(outline, "")).layout, flatten(places).layout, self._what)
        shares: dict[str, list[str]] = {}
        for leaf, task in places.items():
            shares.setdefault(task, []).append(leaf)
        return ShardedReplica(
            self._name,
            self._linked,
            {task: (self._shard(task, leaves), leaves) for task, leaves in shares.items()},
        )

    @property
    def _what(self) -> str:
        return f"replica '{self._name}'"

    @property
    def _left(self) -> float | None:
        return left(self._limit, self._began)

    def _shard(self, task: str, names: list[str]) -> Variable[Any]:
        name = f"{self._name}@{task}"
        found = self._found(name)
        if found is None:
            leaves = self._linked.leaves(None, self._what)
            share = {leaf: leaves[leaf] for leaf in names}
            with self._lines.proposing(task):
                found = self._session.variable(
                    name, share, overwrite=self._overwrite, timeout=self._left
                )
        self._check(found, {leaf: self._linked.outline[leaf] for leaf in names})
        return found

    def _found(self, name: str, *, always: bool = False) -> Variable[Any] | None:
        if self._overwrite and not always:
            return None
        try:
            found: Variable[Any] = self._session.variable(name, timeout=0.0)
            return found
        except (TimedOut, WouldBlock):
            return None

    def _made(self, places: dict[str, str]) -> Variable[Any]:
        """The variable made where it is told, of one version for all of it."""
        leaves = self._linked.leaves(None, self._what)
        options: dict[str, Any] = {"overwrite": self._overwrite, "timeout": self._left}
        device, found = self._lines.device, None
        tasks: Any = self._where.told(leaves)
        if tasks is None and isinstance(device, str):
            found = self._session.variable(self._name, leaves, **options)
        elif tasks is None and places:
            tasks = [places[name] for name in sizes(leaves)]
            device = next(iter(tasks), None)
        if found is None:
            placement = None if tasks is None else lambda _: tasks
            with self._lines.proposing(device):
                found = self._session.spread(self._name, leaves, placement=placement, **options)
        made: Variable[Any] = found
        return made

    def _check(self, variable: Variable[Any], outline: Leaves) -> None:
        stamps = variable.first_read, variable.held
        declared = flatten(variable.read(timeout=self._left).tree).layout
        variable.first_read, variable.held = stamps
        check(flatten(outline).layout, declared, self._what)


def _note(variable: Variable[Any], version: int) -> None:
    """Have it known that this version was read, without a message."""
    variable.held = version
    if variable.first_read is None:
        variable.first_read = version
