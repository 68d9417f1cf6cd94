"""Runs a generator in a worker and offers what it yields."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.calling import keywords
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core.account import ADMISSION, BUSY, HANDING
from paceline.core.errors import Disconnected, FunctionError, PacelineError, SchemaError, TimedOut
from paceline.core.versions import count_of
from paceline.handles import PATIENCE, lasting
from paceline.packing import Made, pack_item, pack_made
from paceline.pending import Pending
from paceline.session import Session
from paceline.transports.base import Block
from paceline.variables import Variable
from paceline.worker.handle import Worker
from paceline.worker.line import Collect

QUICK = 0.002
"""Seconds: a worker that makes all the items it may have ahead in less has them ahead."""

SOON = 0.05
"""Seconds: a worker whose items take less is admitted to the next while it makes one. Where they
take longer, another one could have begun it, and the round trip is nothing beside them."""


class Collector:
    """Runs one generator function and offers its items, starting each only when admitted."""

    def __init__(
        self,
        worker: Worker,
        job: Collect,
        line: Connection,
        fn: Any,
        resources: tuple[Any, ...],
        *,
        waits: bool,
    ) -> None:
        self.items = 0
        self._waits = waits
        self._worker = worker
        self._account = worker.account
        self._job = job
        self._name = getattr(fn, "__name__", "the function")
        self._connection = line
        self._stamp = _stamping(resources, job.version_of)
        if self._stamp is not None:
            self._stamp.first_read = None
        self._make = partial(_generator, fn, resources, worker)
        self._lockstep = job.schedule == "lockstep"
        # In lockstep what is no generator function, and reads when called, does so in a round too.
        self._made: Iterator[Any] = iter(()) if self._lockstep else self._make()
        self._credits = 0
        self._longest = QUICK
        self._held: list[Made] = []
        self._pending: Pending | None = None
        self._thread = threading.get_ident()
        self._conduct = worker.session.lines.conduct
        self._conduct.before_wait = self.step_back
        self._conduct.worked_off = False
        self._conduct.in_lockstep = self._lockstep

    def steps(self) -> Generator[bool, None, None]:
        """Go on until the function or its collection has ended."""
        try:
            yield from self._admitted()
            if self._lockstep:
                self._made = self._make()
            while True:
                yield from self._admitted()
                began = time.perf_counter()
                self._account.enter(BUSY)
                try:
                    item = next(self._made)
                except StopIteration:
                    break
                finally:
                    self._account.enter(HANDING)
                took = time.perf_counter() - began
                self._longest = max(took, 0.9 * self._longest)
                # It may have been given back while the function waited.
                yield from self._admitted()
                self._hold(item)
                if self._credits == 0 or len(self._held) >= self._ahead // 2:
                    self._offer(self._ahead)
                if not self._waits:
                    self._account.enter(ADMISSION)
                yield True
        finally:
            self._conduct.before_wait = None
            self._conduct.in_lockstep = False
            close = getattr(self._made, "close", None)
            if close is not None:
                close()
            with suppress(PacelineError):
                self.step_back()
        if self.items == 0 and not self._conduct.worked_off:
            raise FunctionError(
                f"{self._name} returned without yielding an item; it should yield items for as long"
                " as it is asked (`while True: ... yield item`)"
            )

    @property
    def _ahead(self) -> int:
        """How many items to have admitted at a time; one where items take long."""
        quick = min(self._job.ahead, int(QUICK / self._longest))
        if quick > 1:
            return quick
        return 2 if self._longest < SOON and self._waits and not self._lockstep else 1

    def _admitted(self) -> Generator[bool, None, None]:
        if not self._held and not self._connection.alive():
            # What it had granted has ended with it.
            self._credits = 0
        if self._credits == 0:
            self._settle()
        while self._credits == 0:
            self._offer(self._ahead)
            self._settle()
            if self._credits == 0 and not self._waits:
                yield False

    def _hold(self, item: Any) -> None:
        version = self._stamped()
        what = f"item {self.items} of {self._name}"
        arena, logged = self._connection.arena, self._worker.take_logged()
        try:
            self._held.append(pack_item(arena, item, what, version, logged))
        except SchemaError as e:
            raise SchemaError(f"{e} (yielded at {_place(self._made)})") from None
        self._worker.box.made(self._held[-1].flat.layout)
        self.items += 1
        self._credits -= 1

    def _asks(self) -> Connection:
        return self._connection

    def _move(self, timeout: float | None) -> bool:
        """Go over to its server after that was started again.

        What was held and admitted has ended with the one before.
        """
        line = self._connection.succeeded(timeout)
        if line is None:
            return False
        self._credits, self._held, self._pending = 0, [], None
        line.tell(m.Free())
        line.call(m.Offer(self._job.collection, [], 0, 0, 0.0))
        self._connection = line
        return True

    @lasting
    def _offer(self, ahead: int) -> None:
        """Hand in what is held, and ask for more; without waiting for the answer."""
        self._settle()
        want = max(0, ahead - self._credits)
        limit = None if self._waits and self._credits == 0 else 0.0
        heads, blocks = self._take_held()
        request = m.Offer(self._job.collection, heads, want, 0, limit, self._worker.news())
        self._pending = self._connection.post(request, blocks, limit)

    @lasting
    def step_back(self) -> None:
        """Hand in what is held and give back what was admitted, as the function is about to wait.

        It may wait for what comes of its own items, or of other workers'.

        Raises:
            Closed: the collection has ended, and with it all waits for it.
        """
        if threading.get_ident() != self._thread:
            return
        self._settle()
        heads, blocks = self._take_held()
        request = m.Offer(self._job.collection, heads, 0, self._credits, 0.0)
        self._credits = 0
        self._connection.call(request, blocks)

    def _take_held(self) -> tuple[list[m.RunHead], list[Block | None]]:
        held, self._held = self._held, []
        runs = pack_made(self._connection.arena, held)
        return [head for head, _ in runs], [block for _, block in runs]

    @lasting
    def _settle(self) -> None:
        """Take the answer to the last offer, if there is one to come."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with suppress(TimedOut):
            reply, _ = pending.result()
            self._credits += reply.items

    def _stamped(self) -> int:
        if self._stamp is None:
            return m.NO_VERSION
        first, self._stamp.first_read = self._stamp.first_read, None
        version = self._stamp.held if first is None else first
        if version is None:
            raise FunctionError(
                f"{self._name} yielded an item without ever reading {self._stamp.called}, so nobody"
                " knows with which version it was made; read it first (read or read_into), or say"
                " version_of=None to collect"
            )
        return version

    def where(self) -> str:
        """How far it got, as part of a message."""
        held = "none" if self._stamp is None else self._stamp.held
        version = count_of(held) if isinstance(held, int) else held
        return f"seed {self._worker.seed}, item {self.items}, parameters' version {version}"


def entered(session: Session, collection: str) -> Connection:
    """Make items for a collection from now on; the line to its home.

    This session's waits go on as long as there is one.

    Raises:
        Closed: it has ended.
        TimedOut: a server that is started again is not there in time.
    """
    lines = session.lines
    lines.greet = lambda other: other.call(m.Make(collection))
    while True:
        line = lines.home("collection", collection, make=False, timeout=PATIENCE)
        try:
            for other in lines.again():
                if other is not line:
                    lines.greet(other)
            line.call(m.Offer(collection, [], 0, 0, 0.0))
        except Disconnected:
            if not lines.lasting:
                raise
        else:
            return line


def let_go(session: Session) -> None:
    """Make items for no collection any more."""
    session.lines.greet = lambda other: None
    for line in session.lines.all:
        with suppress(PacelineError):  # whoever asks next hears of a lost server
            line.tell(m.Free())


def goes_on(line: Connection, collection: str) -> bool:
    """Whether a collection has not ended."""
    try:
        line.call(m.Offer(collection, [], 0, 0, 0.0))
    except PacelineError:
        return False
    return True


def _generator(fn: Any, resources: tuple[Any, ...], worker: Worker) -> Iterator[Any]:
    made = fn(*resources, **keywords(fn, worker))
    if not hasattr(made, "__next__"):
        raise FunctionError(
            f"{getattr(fn, '__name__', fn)} returned a {type(made).__name__}; to be collected from,"
            " a function yields its items (a generator function)"
        )
    iterator: Iterator[Any] = made
    return iterator


def _place(made: Iterator[Any]) -> str:
    """Where a generator stands, as part of a message."""
    frame = getattr(made, "gi_frame", None)
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _stamping(resources: tuple[Any, ...], version_of: str | None) -> Variable[Any] | None:
    for resource in resources:
        if isinstance(resource, Variable) and resource.key == version_of:
            return resource
    return None
