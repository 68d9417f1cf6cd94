"""What runs in a worker: it waits for a function, runs it, and tells its launcher how it went."""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline import functions
from paceline.connection import Pending
from paceline.core import messages as m
from paceline.core.errors import (
    Closed,
    FunctionError,
    PacelineError,
    SchemaError,
    TimedOut,
    WouldBlock,
)
from paceline.core.versions import count_of
from paceline.engines.base import Link, received
from paceline.packing import pack
from paceline.session import Session
from paceline.transports.base import Block, Channel
from paceline.variables import Variable

QUICK = 0.002
"""Seconds: a worker that makes all the items it may have ahead in less has them ahead."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A worker's first message: who it is, and where the server is.

    `alone`: in an interpreter of its own, whose random numbers it may seed.
    """

    target: str | None
    secret: bytes
    job: str
    index: int
    seed: int
    channel: Callable[[], Channel] | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Collect:
    """Run a generator function, and offer what it yields. `payload` is (fn, resources).

    A worker with quick items may have up to `ahead` of them admitted at a time.
    """

    collection: str
    payload: bytes
    version_of: str | None
    ahead: int = 1


@dataclass(frozen=True, slots=True)
class StopJob:
    """End the function of that collection at its next step."""

    collection: str


@dataclass(frozen=True, slots=True)
class Started:
    """The worker is a member and runs."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a function ended: of itself, because its collection did, or with an error.

    `hopeless` says that it would end in the same way again.
    """

    collection: str
    items: int
    error: str | None = None
    hopeless: bool = False


class Worker:
    """What a function learns of the worker that it runs in.

    Attributes:
        job, index: its task.
        seed: for random numbers; it differs between workers, and after a restart.
        session: its session, to find other variables and queues.
    """

    def __init__(self, setup: Setup, session: Session, link: Link) -> None:
        self.job = setup.job
        self.index = setup.index
        self.seed = setup.seed
        self.session = session
        self._link = link
        self.later: list[object] = []
        self._logged: dict[str, list[float]] = {}
        self._stopped: set[str] = set()
        self._current = ""
        self._hung_up = False

    def __repr__(self) -> str:
        return f"<Worker {self.job}:{self.index}, seed {self.seed}>"

    def log(self, **metrics: float) -> None:
        """Note numbers that travel with the next item: `batch.metrics`, and the progress line.

        Under one name several values may be noted for one item. `steps` is summed up and shown as a
        rate; of other names the progress line shows the mean of the newest.
        """
        for name, value in metrics.items():
            self._logged.setdefault(name, []).append(float(value))

    def should_stop(self) -> bool:
        """Whether the trainer no longer wants items; a function that takes long can look."""
        self._listen()
        stopped = self._hung_up or self._current in self._stopped
        return stopped or not self.session.connection.alive()

    def take_logged(self) -> dict[str, list[float]] | None:
        """What was noted since the last item."""
        logged, self._logged = self._logged, {}
        return logged or None

    def begin(self, collection: str) -> None:
        """A function starts."""
        self._current = collection
        self._logged = {}

    def report(self, ended: Ended) -> None:
        """Tell the launcher how a function ended."""
        self._link.send(ended)

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive(0)
                if isinstance(message, StopJob):
                    self._stopped.add(message.collection)
                else:
                    self.later.append(message)
        except TimedOut:
            return
        except EOFError:
            self._hung_up = True


class Collector:
    """Runs one generator function and offers its items, starting each only when admitted."""

    def __init__(
        self, worker: Worker, job: Collect, fn: Any, resources: tuple[Any, ...], *, waits: bool
    ) -> None:
        self.items = 0
        self._waits = waits
        self._worker = worker
        self._job = job
        self._name = getattr(fn, "__name__", "the function")
        self._connection = worker.session.connection
        self._stamp = _stamping(resources, job.version_of)
        self._made = _generator(fn, resources, worker)
        self._credits = 0
        self._longest = QUICK
        self._held: list[tuple[m.Head, Block | None]] = []
        self._pending: Pending | None = None
        self._thread = threading.get_ident()
        self._connection.before_wait = self.step_back

    def steps(self) -> Generator[bool, None, None]:
        """Go on until the function or its collection has ended."""
        try:
            while True:
                yield from self._admitted()
                began = time.perf_counter()
                try:
                    item = next(self._made)
                except StopIteration:
                    break
                took = time.perf_counter() - began
                self._longest = max(took, 0.9 * self._longest)
                # It may have been given back while the function waited.
                yield from self._admitted()
                self._hold(item)
                if self._credits == 0 or len(self._held) >= self._ahead // 2:
                    self._offer(self._ahead)
                yield True
        finally:
            self._connection.before_wait = None
            close = getattr(self._made, "close", None)
            if close is not None:
                close()
            with suppress(PacelineError):
                self.step_back()
        if self.items == 0:
            raise FunctionError(
                f"{self._name} returned without yielding an item; it should yield items for as long"
                " as it is asked (`while True: ... yield item`)"
            )

    @property
    def _ahead(self) -> int:
        """How many items to have admitted at a time; one where items take long."""
        return self._job.ahead if self._longest * self._job.ahead < QUICK else 1

    def _admitted(self) -> Generator[bool, None, None]:
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
            self._held.append(pack(arena, item, what, version, logged))
        except SchemaError as e:
            raise SchemaError(f"{e} (yielded at {_place(self._made)})") from None
        self.items += 1
        self._credits -= 1

    def _offer(self, ahead: int) -> None:
        """Hand in what is held, and ask for more; without waiting for the answer."""
        self._settle()
        want = max(0, ahead - self._credits)
        limit = None if self._waits and self._credits == 0 else 0.0
        heads, blocks = self._take_held()
        request = m.Offer(self._job.collection, heads, want, 0, limit)
        self._pending = self._connection.post(request, blocks, limit)

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

    def _take_held(self) -> tuple[list[m.Head], list[Block | None]]:
        held, self._held = self._held, []
        return [head for head, _ in held], [block for _, block in held]

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
                f"{self._name} yielded an item without ever reading '{self._stamp.name}', so nobody"
                " knows with which version it was made; read it first (read or read_into), or say"
                " version_of=None to collect"
            )
        return version

    def where(self) -> str:
        """How far it got, as part of a message."""
        held = "none" if self._stamp is None else self._stamp.held
        version = count_of(held) if isinstance(held, int) else held
        return f"seed {self._worker.seed}, item {self.items}, parameters' version {version}"


def run(link: Link) -> Generator[bool, None, None]:
    """A worker's life. It yields whether it did something, whenever another could have its turn."""
    session: Session | None = None
    try:
        setup = yield from received(link)
        assert isinstance(setup, Setup)
        if setup.alone:
            random.seed(setup.seed)
            np.random.seed(setup.seed % (1 << 32))
        channel = setup.channel() if setup.channel is not None else None
        session = Session(
            setup.target, secret=setup.secret, job=setup.job, index=setup.index, channel=channel
        )
        worker = Worker(setup, session, link)
        link.send(Started())
        while True:
            job = worker.later.pop(0) if worker.later else (yield from received(link))
            if isinstance(job, Collect):
                yield from _collect(worker, job, setup.alone, link.waits)
    except EOFError:
        # The launcher is gone, or wants no more of us.
        return
    finally:
        if session is not None:
            session.close()


def _collect(worker: Worker, job: Collect, alone: bool, waits: bool) -> Generator[bool, None, None]:
    collector: Collector | None = None
    error: str | None = None
    hopeless = False
    worker.begin(job.collection)
    try:
        # From now on it waits for this collection, and as long as there is one.
        worker.session.connection.call(m.Offer(job.collection, [], 0, 0, 0.0))
        # One handle for each name, so that a read through any of its mentions stamps.
        loaded: Any = functions.load(job.payload, functools.cache(worker.session.handle))
        fn, resources = loaded
        if alone:
            _seed_framework(worker.seed)
        collector = Collector(worker, job, fn, resources, waits=waits)
        yield from collector.steps()
    except Closed:
        # The collection has ended; a queue of the user's that was closed ends the function too.
        pass
    except FunctionError as e:
        error, hopeless = f"FunctionError: {e}", True
    except (WouldBlock, SchemaError):
        error, hopeless = traceback.format_exc().rstrip(), True
    except Exception:
        if not worker.session.connection.alive():
            # Whatever else it says: without a server this process is of no use.
            raise
        where = f"\n({collector.where()})" if collector else ""
        error, hopeless = traceback.format_exc().rstrip() + where, collector is None
    worker.report(Ended(job.collection, collector.items if collector else 0, error, hopeless))
    yield True


def _generator(fn: Any, resources: tuple[Any, ...], worker: Worker) -> Iterator[Any]:
    made = fn(*resources, worker=worker) if takes_worker(fn) else fn(*resources)
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


def takes_worker(fn: Callable[..., Any]) -> bool:
    """Whether `fn` has a parameter named `worker`."""
    try:
        return "worker" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


def _stamping(resources: tuple[Any, ...], version_of: str | None) -> Variable[Any] | None:
    for resource in resources:
        if isinstance(resource, Variable) and resource.name == version_of:
            return resource
    return None


def _seed_framework(seed: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
