"""What sessions share, by name: found or made on the server that is its home."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal, TypeVar, overload

from paceline.accumulators import CAPACITY, Accumulator
from paceline.barriers import Barrier
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import spreading
from paceline.core.clock import checked_timeout, left
from paceline.core.errors import SchemaError
from paceline.core.names import quoted, text
from paceline.core.numbers import int64, whole
from paceline.core.queue_orders import Definition
from paceline.core.spreading import Placement
from paceline.core.tree import Flat
from paceline.counters import Counter
from paceline.handles import Handle, lasting
from paceline.lines import Lines
from paceline.mirrors import Mirror
from paceline.packing import pack_flat, taken
from paceline.pending import limited
from paceline.queues import Queue
from paceline.readers import Reader, packed, seconds
from paceline.spread import Spread, initialised
from paceline.stores import OneServer, hinted
from paceline.transports.base import Buffers
from paceline.variables import Variable

T = TypeVar("T")
H = TypeVar("H", bound=Handle)

CAPACITY_BYTES = 1 << 30
_UNSET: Any = object()


class Resources:
    """A session's way to what all sessions share."""

    _lines: Lines
    _mirror: Mirror

    def _asks(self) -> list[Connection]:
        return self._lines.all

    def _held(self, handle: H) -> H:
        self._lines.held.add(handle)
        return handle

    def _move(self, timeout: float | None) -> bool:
        """Have all servers again that were away; whether there was one, and it is back."""
        return self._lines.recover(timeout)

    def _find(
        self,
        kind: str,
        name: Any,
        timeout: float | None,
        *,
        make: bool,
        near: Connection | None = None,
        nbytes: int = 0,
    ) -> tuple[str, Connection, float | None]:
        """The resource's key, the line to its home, and how long to wait for it there.

        Where there are several servers, its home is chosen now, at the other end of `near` if that
        is given; or, unless it is to be made, waited for.
        """
        limit, began = checked_timeout(timeout), time.monotonic()
        if isinstance(name, Handle):
            key = name.key
        else:
            key = self._lines.key(text(name, f"the name of a {kind}"), limit)
        spare = left(limit, began)
        home = self._lines.home(kind, key, make=make, near=near, nbytes=nbytes, timeout=spare)
        return key, home, limit if make else left(limit, began)

    @overload
    def variable(self, name: str, *, timeout: float | None = 60.0) -> Variable[Any]: ...

    @overload
    def variable(
        self,
        name: str,
        value: T,
        *,
        overwrite: bool = False,
        memory: int | None = None,
        timeout: float | None = 60.0,
    ) -> Variable[T]: ...

    @limited
    def variable(
        self,
        name: str,
        value: Any = _UNSET,
        *,
        overwrite: bool = False,
        memory: int | None = None,
        timeout: float | None = 60.0,
    ) -> Variable[Any]:
        """The variable of that name. Whoever first gives it a value initialises it.

        A value given later is not taken, unless told to `overwrite`; its structure must agree.
        Without a value this waits until somebody has initialised the variable.

        With `memory`, the versions that are stored, and the one about to be, take that many bytes
        at most: the current version, tagged ones, and those that a reader on the server's host
        still looks at. `assign` and `assign_add` then wait until there is room. Not counted are
        what a process has copied for itself, a new tree while it waits for room, and the memory
        that a writer keeps to use it again.

        Raises:
            SchemaError: it exists with another structure or bound, the message says where they
                differ; or the bound is too small for two versions.
            TimedOut: nobody initialised it, or made room, within `timeout` seconds.
            OutOfMemory: as `Variable.assign`.
        """
        return self._variable(name, value, overwrite, memory, timeout)

    @lasting
    def _variable(
        self, name: str, value: Any, overwrite: bool, memory: int | None, timeout: float | None
    ) -> Variable[Any]:
        if value is _UNSET and memory is not None:
            raise SchemaError(f"variable '{name}': memory={memory!r} comes with a first value")
        if value is _UNSET:
            key, home, limit = self._find("variable", name, timeout, make=False)
            defined, buffers = home.exchange(m.Await(key, limit), timeout=limit)
        else:
            flat = taken(value, f"variable '{name}'")
            key, home, limit = self._find("variable", name, timeout, make=True, nbytes=flat.size)
            defined, buffers = _defined(home, key, flat, overwrite, memory, limit)
        found = self._stored(key, home, defined, buffers)
        if defined.spread is not None and value is not _UNSET and overwrite:
            found.assign(value, timeout=limit)
        return found

    @lasting
    @limited
    def spread(
        self,
        name: str,
        value: Any = _UNSET,
        *,
        placement: Placement | None = None,
        overwrite: bool = False,
        timeout: float | None = 60.0,
    ) -> Variable[Any]:
        """The variable of that name, its arrays spread over all servers, with one version for all.

        It is a variable as any other: `variable(name)` finds it, and a read gives one version,
        never parts of two, whoever dies. Its home is where `device` says; it alone numbers and
        commits, and has all that is no array. Where the arrays are is decided by who makes it: by
        default each goes, in the order of the tree, to the server with the fewest bytes so far.
        `placement` is given a list of their paths and bytes, and returns for each the task that has
        it, written as for `device`, or a list of tasks that share its rows, evenly and in order.
        Where there is one server, it is all there. It has no bound.

        Raises:
            SchemaError: it exists with another structure; or the placement names no servers.
            TimedOut: nobody initialised it, or a server that died was not started again.
            OutOfMemory: as `Variable.assign`.
        """
        if value is _UNSET:
            return self.variable(name, timeout=timeout)
        limit, began = checked_timeout(timeout), time.monotonic()
        spreading.check_placement(placement, f"spread '{name}'")
        flat = taken(value, f"spread '{name}'")
        key, home, _ = self._find("variable", name, limit, make=True, nbytes=flat.size)
        task, tasks = self._lines.task(home), self._lines.tasks
        if task is not None and len(tasks) > 1:
            plan = spreading.spread(flat.layout, task, tasks, placement, f"spread '{name}'")
            made = initialised(self._lines, key, plan, flat, left(limit, began))
            if made is not None:
                found = self._stored(key, *made)
                if overwrite and not made[1].fresh:
                    found.assign(value, timeout=left(limit, began))
                return found
        spare = left(limit, began)
        return self.variable(name, value, overwrite=overwrite, timeout=spare)

    def _stored(
        self, key: str, home: Connection, defined: m.Defined, buffers: Buffers
    ) -> Variable[Any]:
        """The handle of a variable that is there."""
        seen = hinted(home, defined, buffers)
        if defined.spread is None:
            store = OneServer(home, key, seen, bounded=defined.bounded, near=self._mirror)
            return Variable(key, store)
        return Variable(key, Spread(self._lines, key, home, defined.spread, seen, self._mirror))

    @lasting
    @limited
    def queue(
        self,
        name: str,
        capacity: int | None = None,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        per_producer: int | None = None,
        order: Literal["fifo", "shuffle", "priority"] | None = None,
        min_after_dequeue: int | None = None,
        seed: int | None = None,
        timeout: float | None = 60.0,
    ) -> Queue[Any]:
        """The queue of that name: made with `capacity`, or waited for without one.

        It holds at most `capacity` items and `capacity_bytes` bytes. With `per_producer`, each
        session may have at most that many items in it that were accepted and are not delivered
        yet: its next enqueue waits for a consumer, and no other session waits behind it.

        The order is `"fifo"` unless told. With `"shuffle"` each dequeue draws from the items that
        are in it, while `min_after_dequeue` of them stay behind; once it is closed, all can be
        taken. With a `seed` the same order of events draws the same items. With `"priority"` the
        item of the lowest priority is next, and of equal ones the oldest.

        Raises:
            SchemaError: it exists with another definition, the message shows both; or that is no
                definition of a queue.
            TimedOut: nobody made it within `timeout` seconds.
        """
        if capacity is None and (order, min_after_dequeue, seed) != (None, None, None):
            raise SchemaError(
                f"queue '{name}': order, min_after_dequeue and seed come with a capacity"
            )
        key, home, limit = self._find("queue", name, timeout, make=capacity is not None)
        if capacity is None:
            found = home.call(m.FindQueue(key, limit), timeout=limit).content
            return self._held(Queue(home, key, Definition(*found)))
        capacity = whole(capacity, f"queue '{name}': capacity")
        capacity_bytes = whole(capacity_bytes, f"queue '{name}': capacity_bytes")
        if per_producer is not None:
            per_producer = whole(per_producer, f"queue '{name}': per_producer", hint=", or None")
        if min_after_dequeue is not None:
            min_after_dequeue = whole(min_after_dequeue, f"queue '{name}': min_after_dequeue", 0)
        if seed is not None:
            seed = int64(seed, f"queue '{name}': seed")
        order = "fifo" if order is None else order
        definition = Definition(
            capacity, capacity_bytes, per_producer, order, min_after_dequeue or 0, seed
        )
        definition.check(name)
        home.call(m.DefineQueue(key, *definition))
        return self._held(Queue(home, key, definition))

    @lasting
    @limited
    def counter(self, name: str, start: int | None = 0, *, timeout: float | None = 60.0) -> Counter:
        """The counter of that name, made at `start` unless it is there.

        With `start=None` it is waited for, and found wherever it started.

        Raises:
            SchemaError: it exists and started elsewhere; the message shows both.
            TimedOut: nobody made it within `timeout` seconds.
        """
        key, home, limit = self._find("counter", name, timeout, make=start is not None)
        if start is not None:
            start = int64(start, f"counter '{name}': start")
        found = home.call(m.DefineCounter(key, start, limit), timeout=limit).content
        return self._held(Counter(home, key, found["start"]))

    @lasting
    @limited
    def barrier(self, name: str, n: int | None = None, *, timeout: float | None = 60.0) -> Barrier:
        """The barrier of that name: made for `n`, or waited for without a number.

        Raises:
            SchemaError: it exists for another number; the message shows both.
            TimedOut: nobody made it within `timeout` seconds.
        """
        key, home, limit = self._find("barrier", name, timeout, make=n is not None)
        if n is not None:
            n = whole(n, f"barrier '{name}': n")
        found = home.call(m.DefineBarrier(key, n, limit), timeout=limit).content
        return self._held(Barrier(home, key, found["n"]))

    @lasting
    @limited
    def reader(
        self,
        name: str,
        pieces: Iterable[Any] | None = None,
        *,
        epochs: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        lease: float | None = None,
        stream: bool = False,
        timeout: float | None = 60.0,
    ) -> Reader:
        """The reader of that name: made of `pieces`, or waited for without any.

        A piece is plain values, or dicts, lists and tuples of them, such as the name of a file.
        There may be 1,048,576 of them, of 256 MB, and 64 MB in one call. Each is handed out once
        in each of `epochs`, without end if that is `None`; with `shuffle` in another order each
        epoch, the same for the same `seed`. A piece that is not done `lease` seconds after it was
        handed out is handed out again, although its holder lives. To a `stream` pieces may be
        added until it is closed; it has one epoch.

        Raises:
            SchemaError: it exists with other pieces or otherwise, the message shows both; or a
                piece may not travel.
            TimedOut: nobody made it within `timeout` seconds.
        """
        key, home, limit = self._find("reader", name, timeout, make=pieces is not None)
        if pieces is None and (epochs, shuffle, seed, lease, stream) != (1, False, 0, None, False):
            raise SchemaError(f"reader '{name}': how to hand out pieces comes with the pieces")
        if epochs is not None:
            epochs = whole(epochs, f"reader '{name}': epochs", hint=", or None")
        request = m.DefineReader(
            key,
            None if pieces is None else packed(name, pieces),
            epochs,
            bool(shuffle),
            int64(seed, f"reader '{name}': seed"),
            seconds(name, lease),
            bool(stream),
            limit,
        )
        return Reader(home, key, home.call(request, timeout=limit).content)

    @lasting
    @limited
    def accumulator(
        self,
        name: str,
        *,
        variable: Variable[Any] | str | None = None,
        like: Any = None,
        max_lag: int | None = 0,
        capacity: int = CAPACITY,
        timeout: float | None = 60.0,
    ) -> Accumulator:
        """The accumulator of that name: made for `variable` or `like`, or waited for without both.

        With a `variable`, gradients are applied with the version of it that they were made with,
        and the accumulator is on the variable's server. Those with a lag above `max_lag` are
        dropped; `None` drops none. Their structure is that of `like`, else the variable's: floats,
        and arrays of floats or complexes. Without a variable nothing is ever too old. It holds at
        most `capacity` gradients that were not taken.

        Raises:
            SchemaError: it exists with another definition, the message shows both; or there is a
                leaf of which no mean is taken, which it names.
            UnknownName: there is no such variable where the accumulator is.
            TimedOut: nobody made it within `timeout` seconds.
        """
        what = f"accumulator '{name}'"
        linked = near = None
        if variable is not None:
            linked, near, timeout = self._find("variable", variable, timeout, make=False)
        make = near is not None or like is not None
        # Only the structure counts.
        flat = None if like is None else taken(like, what)
        nbytes = 0 if flat is None else flat.size
        key, home, limit = self._find(
            "accumulator", name, timeout, make=make, near=near, nbytes=nbytes
        )
        if max_lag is not None:
            max_lag = whole(max_lag, f"{what}: max_lag", 0, ", or None")
        capacity = whole(capacity, f"{what}: capacity")
        head = None if flat is None else m.Head(flat.layout, list(flat.values))
        request = m.DefineAccumulator(key, head, linked, max_lag, capacity, limit)
        found = home.call(request, timeout=limit).content
        known = found["variable"], found["max_lag"], found["capacity"]
        return self._held(Accumulator(home, key, *known, request))


def _defined(
    home: Connection,
    key: str,
    flat: Flat,
    overwrite: bool,
    bound: int | None,
    limit: float | None,
) -> tuple[m.Defined, Buffers]:
    if bound is not None:
        bound = whole(bound, f"variable {quoted(key)}: memory", hint=" bytes")
    # Only what replaces another version may have to wait for room.
    patience = limit if overwrite else 0.0
    with home.interrupts:
        head, block = pack_flat(home.arena, flat)
        request = m.Define(key, head, overwrite, bound, limit)
        return home.exchange(request, [block], patience)
