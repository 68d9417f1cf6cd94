"""What an engine is: it starts tasks, carries their messages and output, and ends them."""

import importlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, final

from paceline.core.closing import Closing
from paceline.core.errors import Closed, TimedOut, UnknownName, Unsupported
from paceline.engines.wishes import Ray

Stream = Literal["stdout", "stderr"]

# Where each engine's class is, as text: an engine is imported when it is used.
ENGINES = {
    "processes": "paceline.engines.processes:ProcessEngine",
    "ray": "paceline.engines.ray:RayEngine",
    "serial": "paceline.engines.serial:SerialEngine",
    "threads": "paceline.engines.threads:ThreadEngine",
}

_THREADS = (
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PJRT_NPROC",  # XLA's pools on the CPU; it has no flag for them
    "VECLIB_MAXIMUM_THREADS",
)
_OURS = f'  File "{Path(__file__).parents[1]}/'
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Link(ABC):
    """A task's private line to its launcher."""

    waits: bool = True
    """Whether `receive` can wait; else a target asks with a timeout of 0 and yields."""

    host: str = "127.0.0.1"
    """The address at which the other tasks reach what listens on this one's host."""

    remedy: str = ""
    """What to do where a module is missing, and where that is: the end of a sentence about it."""

    @abstractmethod
    def send(self, message: object) -> None:
        """Hand `message`, anything that pickles, to the launcher.

        Raises:
            EOFError: the launcher is gone.
        """

    @abstractmethod
    def receive(self, timeout: float | None = None) -> object:
        """Return the launcher's next message; messages come in the order they were sent.

        Raises:
            EOFError: the launcher closed the line or is gone: the task should end.
            TimedOut: none came; nothing is lost.
        """


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What to start: `target(link)` runs in the task, which ends with status 0 when it returns.

    A target may be a generator function, which yields whether it did something whenever another
    task may have its turn. An engine whose tasks share a thread needs that; others run it through.

    The name is put in front of the task's output. `threads` bounds those of BLAS, OpenMP and XLA.
    `devices` are the accelerators that the task sees, as in `CUDA_VISIBLE_DEVICES`; with `None` the
    engine says. `env` adds variables of the environment and wins over what the rest would set. The
    descriptors in `inherit` stay open in the task under their numbers, where the task is a process
    of this host. One that `stays` is, under its name, started again only where it was; `node` is
    where it has to be, as another task says that is there.
    """

    name: str
    target: Callable[[Link], Any]
    threads: int = 1
    devices: str | None = ""
    env: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[int, ...] = ()
    stays: bool = False
    node: str = ""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a task ended: by itself with `status`, by `signal`, or of a `cause` that is in words.

    `error` is the traceback of what its target raised, as text. If it is `hopeless`, another one
    would end in the same way.
    """

    status: int | None = None
    signal: str | None = None
    error: str | None = None
    cause: str | None = None
    hopeless: bool = False

    @classmethod
    def by(cls, error: BaseException) -> "Exit":
        """The end of a target that raised `error`, where its task has no process that tells it."""
        if isinstance(error, SystemExit):
            code = error.code
            return cls(status=code if isinstance(code, int) else int(code is not None))
        here = error.__traceback__
        lines = traceback.format_exception(error.with_traceback(here.tb_next if here else None))
        if isinstance(error, KeyboardInterrupt):
            return cls(signal="SIGINT", error="".join(lines))
        return cls(status=1, error="".join(lines))

    def __str__(self) -> str:
        if self.cause:
            return f"lost: {self.cause}"
        return f"killed by {self.signal}" if self.signal else f"exit status {self.status}"

    @property
    def told(self) -> str:
        """The same as the end of a sentence about the task."""
        return f"was {self}" if self.signal or self.cause else f"ended with {self}"


class Task(ABC):
    """A task as its launcher sees it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._exit: Exit | None = None
        self._stopping = False
        self.host = self.node = ""
        """Where it is, where the engine has several hosts and has placed it: one host may be
        several of its nodes."""

    @final
    @property
    def name(self) -> str:
        """The name it was started under."""
        return self._name

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The number of the task's process; `None` when it has none of its own."""

    @final
    @property
    def alive(self) -> bool:
        """False from the moment at which its listener is told that it ended."""
        return self._exit is None

    @final
    def send(self, message: object) -> None:
        """Hand `message`, anything that pickles, to the task, and return without waiting for it.

        What the task has not received yet is kept in memory. A message to a task that is ending is
        dropped, as it would be a moment later.

        Raises:
            Closed: the task has ended, or its line was closed by `stop`.
        """
        if self._exit or self._stopping:
            why = f"it ended, {self._exit}" if self._exit else "it is being stopped"
            raise Closed(f"send to {self._name!r}: {why}")
        self._deliver(message)

    @abstractmethod
    def _deliver(self, message: object) -> None:
        """Put `message` on the line to the task."""

    def stacks(self) -> str | None:
        """What its threads run in Python, the innermost call first; `None` if nobody can tell.

        It goes on as if nothing had been asked.
        """
        return None

    @abstractmethod
    def kill(self) -> None:
        """End the task and the processes that it started, at once; its listener hears of it."""


class Listener(Protocol):
    """Who hears of a task. Called on the engine's own thread: be quick, never wait, never raise.

    From here tasks may be started, sent to and killed, but not stopped.
    """

    def received(self, task: Task, message: object, /) -> None: ...

    def printed(self, task: Task, line: str, stream: Stream, /) -> None:
        """Hear a line of output, without its end. Long lines come in pieces."""

    def ended(self, task: Task, end: Exit, /) -> None:
        """Hear the end: called once, after the task's last message and last line."""


class Engine(Closing):
    """Starts tasks and owns them until they ended. Closing it ends all of them."""

    @abstractmethod
    def start(self, spec: TaskSpec, listener: Listener) -> Task:
        """Start a task; return once it exists, before its target runs or has been loaded.

        Raises:
            Closed: the engine is closed.
            FunctionError: the target cannot travel to where the task runs.
            WorkerFailed: the machine refused to start it; the message says why.
        """

    def reserve(self, tasks: Sequence[str]) -> None:
        """Have room for tasks of these names, before the first is started.

        Raises:
            Refused: there is less than they take; the message has the numbers.
        """

    def forget(self, name: str) -> None:
        """No task of that name will be started again."""

    placed: Callable[[Task], None] = staticmethod(lambda task: None)
    """Hears where each task is, on the engine's own thread, as a listener does."""

    near: bool = True
    """Whether tasks are on this host, and inherit descriptors."""

    concurrent: bool = True
    """Whether tasks run beside the caller; else only while it calls `drive`."""

    kills: bool = True
    """Whether a task can be ended whatever it does; else it has to look at its line."""

    def drive(self) -> bool:
        """Let tasks that run in the caller's thread go on; whether one of them did something."""
        return False

    @abstractmethod
    def stop(self, task: Task, timeout: float) -> None:
        """Close the task's line, give it `timeout` seconds to end by itself, then kill it.

        When this returns, the task's listener has heard of the end.
        """

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Stop all tasks, which share the `timeout`; closing twice is fine.

        Afterwards no thread, process or descriptor of the engine is left.
        """


def show(task: Task, line: str, stream: Stream) -> None:
    """Print a line of a task's output, with its name in front."""
    print(f"[{task.name}] {line}", file=sys.stderr if stream == "stderr" else sys.stdout)


def readable(stacks: str) -> str:
    """Stacks as the interpreter writes them, without our own calls that lead to the user's."""
    found = []
    for part in stacks.split("\n\n"):
        if '  File "' not in part:
            continue
        lines = part.splitlines()
        kept = list(lines)
        while len(kept) > 1 and (kept[-1].startswith(_OURS) or "/threading.py" in kept[-1]):
            kept.pop()
        # Without a call of the user's, ours are all there is.
        found += kept if len(kept) > 1 else lines
    return "\n".join(found)


def received(link: Link) -> Generator[bool, None, object]:
    """Wait for the launcher's next message in a target that is a generator function.

    `message = yield from received(link)` lets other tasks go on where they share the thread.

    Raises:
        EOFError: the launcher closed the line or is gone.
    """
    while True:
        try:
            return link.receive(None if link.waits else 0)
        except TimedOut:
            yield False


def run_through(target: Callable[[Link], Any], link: Link) -> None:
    """Run a target to its end, also one that is a generator function."""
    steps = target(link)
    if isinstance(steps, Iterator):
        deque(steps, maxlen=0)


def name_of(asked: str | Ray) -> str:
    """The name of the engine that was asked for.

    Raises:
        UnknownName: there is none; the message lists those that exist.
    """
    name = asked.name if isinstance(asked, Ray) else asked
    if name not in ENGINES:
        raise UnknownName(f"no engine {name!r}; there are {sorted(ENGINES)}")
    return name


def engine(asked: str | Ray) -> Engine:
    """Make the engine of that name, or the one that was asked for more closely.

    Raises:
        UnknownName: there is none; the message lists those that exist.
        Unsupported: it cannot run on this platform, or what it needs is not installed.
    """
    name = name_of(asked)
    module, _, kind = ENGINES[name].partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("paceline"):
            raise
        raise Unsupported(
            f"engine {name!r} needs the package {e.name!r}, which is not installed:"
            f" pip install 'paceline[{name}]'"
        ) from e
    made = found() if isinstance(asked, str) else found(asked)
    assert isinstance(made, Engine)
    return made


def hygiene(spec: TaskSpec) -> dict[str, str]:
    """Return the variables that a task's environment gets beside the launcher's own.

    They must be set before NumPy or a framework is imported, which read them once.
    """
    devices = {} if spec.devices is None else dict.fromkeys(_DEVICES, spec.devices)
    return {
        **dict.fromkeys(_THREADS, str(spec.threads)),
        **devices,
        **({"JAX_PLATFORMS": "cpu"} if spec.devices == "" else {}),
        # Output is to be seen when it is printed, not when the task ends.
        "PYTHONUNBUFFERED": "1",
        **spec.env,
    }
