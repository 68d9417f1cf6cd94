"""Faults for clusters under test: dead, stopped and slow processes, cut connections, full disks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, get_args

from paceline.core.errors import SchemaError, TimedOut, UnknownName, Unsupported
from paceline.testing.relay import Relay

try:
    import resource
except ImportError:
    # Windows has no such limits.
    resource = None  # type: ignore[assignment]

Kind = Literal["kill", "freeze", "pause", "slow", "cut", "lose", "repeat", "tear", "delay"]
"""A process is killed, at once or when it was stopped for a moment; it is only stopped for one, or
slowed down. Connections are cut, lose a reply, get one that would be sent again, get half of one,
or are slow for a moment."""

OF_PROCESSES: Sequence[Kind] = ("kill", "freeze", "pause", "slow")
OF_CONNECTIONS: Sequence[Kind] = ("cut", "lose", "repeat", "tear", "delay")

FREEZE = 0.05
PAUSE, SLOW, SHARE, DELAY = 0.3, 0.5, 0.2, 0.05
PERIOD = 0.02
LOOK = 0.001


class HasProcesses(Protocol):
    """What a `Cluster` has: the processes of its tasks, as they are now."""

    def processes(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom, and the seconds until that was noticed, and until all worked again.

    Where harm lasts for a moment they are counted from its end. `noticed` is `None` where there is
    nothing that anybody should notice.
    """

    kind: str
    target: str
    noticed: float | None
    recovered: float

    @property
    def role(self) -> str:
        """The job of whom it was done to, such as `worker` or `ps`."""
        return self.target.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Report:
    """What a campaign did. Printed, it is a table of the longest times by role and kind."""

    seed: int
    faults: Sequence[Fault] = field(repr=False)

    def __str__(self) -> str:
        groups = sorted({(fault.role, fault.kind) for fault in self.faults})
        lines = [f"{len(self.faults)} faults, seed {self.seed}; longest seconds to notice, recover"]
        for role, kind in groups:
            those = [f for f in self.faults if (f.role, f.kind) == (role, kind)]
            seen = [f.noticed for f in those if f.noticed is not None]
            noticed = f"{max(seen):7.3f}" if seen else "      -"
            longest = max(f.recovered for f in those)
            lines.append(f"{role:<8} {kind:<6} {len(those):5}  {noticed} {longest:7.3f}")
        return "\n".join(lines)


class Chaos:
    """Does harm to the processes of a cluster, and to connections that go through relays.

    Args:
        cluster: a `Cluster`; or a function that returns the processes of tasks by name, as they are
            now, for a cluster by hand.
        relays: by the task whose connections each carries.
        seed: of what is drawn in a campaign; by default another one each time.

    Raises:
        Unsupported: on Windows.
    """

    def __init__(
        self,
        cluster: HasProcesses | Callable[[], Mapping[str, int]],
        *,
        relays: Mapping[str, Relay] | None = None,
        seed: int | None = None,
    ) -> None:
        if os.name != "posix":
            raise Unsupported("processes are stopped and killed as Linux and macOS do it: use WSL")
        self._processes = cluster if callable(cluster) else cluster.processes
        self._relays = dict(relays or {})
        self.seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        self._draw = random.Random(self.seed)

    def kill(self, task: str) -> int:
        """End a task's process by SIGKILL; the number it had."""
        pid = self._pid(task)
        os.kill(pid, signal.SIGKILL)
        return pid

    def freeze(self, task: str, seconds: float = FREEZE) -> int:
        """Stop a task's process, and kill it after so many seconds; the number it had.

        So it dies in the middle of something: with requests in hand, and with replies on their way
        to it that it never reads.
        """
        pid = self._pid(task)
        with _held(pid) as send:
            send(signal.SIGSTOP)
            time.sleep(seconds)
            send(signal.SIGKILL)
        return pid

    @contextmanager
    def paused(self, task: str) -> Iterator[None]:
        """Stop a task's process within the block (SIGSTOP): it lives and does nothing."""
        with _held(self._pid(task)) as send:
            send(signal.SIGSTOP)
            try:
                yield
            finally:
                send(signal.SIGCONT)

    @contextmanager
    def slowed(self, task: str, share: float = SHARE) -> Iterator[None]:
        """Let a task's process run for that share of the time only within the block."""
        if not 0 < share < 1:
            raise SchemaError(f"slowed: share is a number between 0 and 1, not {share!r}")
        over = threading.Event()
        with _held(self._pid(task)) as send:

            def slow() -> None:
                while not over.wait(PERIOD * share):
                    send(signal.SIGSTOP)
                    over.wait(PERIOD * (1 - share))
                    send(signal.SIGCONT)

            thread = threading.Thread(target=slow, name="paceline-chaos", daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()

    @contextmanager
    def delayed(self, task: str, seconds: float = DELAY) -> Iterator[None]:
        """Delay all that a task's relay carries by so many seconds, each way, within the block."""
        relay = self._relay(task)
        relay.delay = seconds
        try:
            yield
        finally:
            relay.delay = 0.0

    def cut(self, task: str) -> None:
        """Cut the connections that a task's relay carries."""
        self._relay(task).cut()

    def lose(self, task: str) -> None:
        """Have the next reply on each connection to a task lost, and with it the connection."""
        self._relay(task).lose()

    def repeat(self, task: str) -> None:
        """Have the next reply on each connection arrive, without its server hearing so."""
        self._relay(task).repeat()

    def tear(self, task: str) -> None:
        """Have each connection to a task cut in the middle of its next reply."""
        self._relay(task).tear()

    def strike(
        self, kind: Kind, task: str, work: Callable[[], object], *, limit: float = 60.0
    ) -> Fault:
        """Do one harm, and see it through: `work` is called until all goes on.

        A process that was killed is then another one. `work` does a step of what the cluster is
        for, such as `batches.next`; what it raises is raised. It is called while the harm lasts,
        too.

        Raises:
            TimedOut: it was not noticed, or did not go on, within `limit` seconds.
            UnknownName: there is no such task, or no relay to it.
        """
        began = time.monotonic()
        noticed = None
        if kind in ("kill", "freeze"):
            before = self.kill(task) if kind == "kill" else self.freeze(task)
            began = time.monotonic()
            while self._processes().get(task) == before:
                self._check(began, limit, f"the end of {task} was not noticed")
                time.sleep(LOOK)
            noticed = time.monotonic() - began
            work()
            while task not in self._processes():
                self._check(began, limit, f"{task} was not started again")
                work()
        else:
            began = self._disturb(kind, task, work)
        work()
        self._check(began, limit, f"{task} did not recover from '{kind}'")
        return Fault(kind, task, noticed, time.monotonic() - began)

    def campaign(
        self,
        work: Callable[[], object],
        *,
        faults: int = 100,
        kinds: Sequence[Kind] | None = None,
        targets: Sequence[str] | None = None,
        every: float = 0.0,
        check: Callable[[Fault], object] = lambda fault: None,
        limit: float = 60.0,
    ) -> Report:
        """Do harm again and again: each time to a task that is drawn, as `strike` does.

        The same seed draws the same faults, as long as there are the same tasks.

        Args:
            kinds: by default all that there is a way to do.
            targets: tasks, or jobs for all tasks of them; by default all.
            every: seconds of work between two faults.
            check: called after each; what it raises ends the campaign, and says after which fault.
        """
        chosen = self._possible(kinds)
        done: list[Fault] = []
        for number in range(faults):
            until = time.monotonic() + every
            work()
            while time.monotonic() < until:
                work()
            kind = self._draw.choice(chosen)
            there = self._processes() if kind in OF_PROCESSES else self._relays
            task = self._draw.choice(sorted(_wanted(there, targets)))
            try:
                done.append(self.strike(kind, task, work, limit=limit))
                check(done[-1])
            except BaseException as e:
                e.add_note(f"fault {number} of seed {self.seed}: '{kind}' of {task}")
                raise
        return Report(self.seed, tuple(done))

    def _disturb(self, kind: Kind, task: str, work: Callable[[], object]) -> float:
        """Do harm that ends by itself; when it did."""
        lasting: dict[str, tuple[Callable[[str], AbstractContextManager[None]], float]] = {
            "pause": (self.paused, PAUSE),
            "slow": (self.slowed, SLOW),
            "delay": (self.delayed, SLOW),
        }
        if kind in lasting:
            disturbed, seconds = lasting[kind]
            return _during(disturbed(task), seconds, work)
        began = time.monotonic()
        {"cut": self.cut, "lose": self.lose, "repeat": self.repeat, "tear": self.tear}[kind](task)
        work()
        return began

    def _possible(self, kinds: Sequence[Kind] | None) -> list[Kind]:
        if kinds is None:
            ways = (OF_PROCESSES, self._processes()), (OF_CONNECTIONS, self._relays)
            return [kind for kinds, there in ways if there for kind in kinds]
        for kind in kinds:
            if kind not in get_args(Kind):
                raise UnknownName(f"no fault {kind!r}; there are {list(get_args(Kind))}")
            if kind in OF_CONNECTIONS and not self._relays:
                raise UnknownName(f"'{kind}' takes relays between the sessions and a server")
        return list(kinds)

    def _pid(self, task: str) -> int:
        there = self._processes()
        if task not in there:
            raise UnknownName(f"no process {task!r}; there are {sorted(there)}")
        return there[task]

    def _relay(self, task: str) -> Relay:
        if task not in self._relays:
            raise UnknownName(f"no relay to {task!r}; there are {sorted(self._relays)}")
        return self._relays[task]

    def _check(self, began: float, limit: float, what: str) -> None:
        if time.monotonic() - began > limit:
            raise TimedOut(f"{what} within {limit} s; there are {dict(self._processes())}")


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond `room` bytes within the block, as on a full disk.

    Whoever writes more gets an OSError. It holds for every thread of the process, for shared memory
    that it makes, and for processes that it starts.

    Raises:
        Unsupported: on Windows.
    """
    if resource is None:
        raise Unsupported("the size of files is limited as Linux and macOS do it: use WSL")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal that comes with it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _wanted(there: Mapping[str, object], targets: Sequence[str] | None) -> list[str]:
    found = [
        task
        for task in there
        if targets is None or task in targets or task.partition(":")[0] in targets
    ]
    if not found:
        raise UnknownName(f"none of {list(targets or ())} is among {sorted(there)}")
    return found


@contextmanager
def _held(pid: int) -> Iterator[Callable[[int], None]]:
    """What sends signals to that process, and after its end to no other that has its number."""
    with ExitStack() as steps:
        send = partial(os.kill, pid)
        if hasattr(signal, "pidfd_send_signal"):
            descriptor = os.pidfd_open(pid)
            steps.callback(os.close, descriptor)
            send = partial(signal.pidfd_send_signal, descriptor)

        def sent(number: int) -> None:
            with suppress(ProcessLookupError):
                send(number)

        yield sent


def _during(
    harm: AbstractContextManager[None], seconds: float, work: Callable[[], object]
) -> float:
    """Work while harm is done for so many seconds, and until it is over; when it was."""
    with ExitStack() as steps:
        steps.enter_context(harm)
        ends: list[float] = []

        def end() -> None:
            try:
                steps.close()
            finally:
                ends.append(time.monotonic())

        # Work that waits for whoever is stopped must not keep this from ending.
        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            while not ends:
                work()
        finally:
            timer.join()
    return ends[0]
