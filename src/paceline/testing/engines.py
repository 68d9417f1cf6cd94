"""The contract of an engine, as checks that any engine can be put through."""

import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import Closed, TimedOut
from paceline.engines.base import Engine, Exit, Link, Stream, Task, TaskSpec, received

# For each thing that a check waits for; starting a task imports NumPy.
DEADLINE_SECONDS = 30.0

Steps = Generator[bool, None, None]


@dataclass(frozen=True)
class Event:
    """What a listener heard: `what` is 'received', 'stdout', 'stderr' or 'ended'."""

    task: str
    what: str
    value: object


class Recorder:
    """A listener that notes everything it hears, in order, and wakes those that wait for it.

    While it waits it drives `engine`, if that one's tasks run only then.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self._events: list[Event] = []
        self._changed = threading.Condition()

    def received(self, task: Task, message: object) -> None:
        self._note(Event(task.name, "received", message))

    def printed(self, task: Task, line: str, stream: Stream) -> None:
        self._note(Event(task.name, stream, line))

    def ended(self, task: Task, end: Exit) -> None:
        assert not task.alive, f"{task.name!r} is alive after its end"
        self._note(Event(task.name, "ended", end))

    def _note(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    @property
    def events(self) -> list[Event]:
        """All that was heard so far."""
        with self._changed:
            return list(self._events)

    def heard(self, task: str, what: str) -> list[object]:
        """The values heard so far of this kind from this task."""
        return [event.value for event in self.events if (event.task, event.what) == (task, what)]

    def wait(
        self, task: str, what: str, count: int = 1, timeout: float = DEADLINE_SECONDS
    ) -> list[object]:
        """Return the values of this kind from this task, once there are `count` of them.

        Raises:
            TimedOut: there are fewer; the message shows all that was heard.
        """
        deadline = time.monotonic() + timeout
        while self.engine is not None and not self.engine.concurrent:
            if len(self.heard(task, what)) >= count or time.monotonic() > deadline:
                break
            self.engine.drive()
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self.heard(task, what)) >= count, left):
                raise TimedOut(
                    f"wait for {count} x {what!r} from {task!r} after {timeout} s: "
                    f"heard {self._events}"
                )
            return self.heard(task, what)

    def exit(self, task: str, timeout: float = DEADLINE_SECONDS) -> Exit:
        """Return how the task ended, once it did."""
        value = self.wait(task, "ended", timeout=timeout)[-1]
        assert isinstance(value, Exit)
        return value


def check_engine(make: Callable[[], Engine]) -> None:
    """Put the engine that `make` makes through the whole contract; each check gets a fresh one.

    Raises:
        AssertionError: it breaks the contract; the traceback shows which part.
    """
    for check in ENGINE_CHECKS:
        check(make)


def check_messages_keep_their_order(make: Callable[[], Engine]) -> None:
    """What is sent before the target is there is received too, in order, both ways."""
    with make() as engine:
        recorder = Recorder(engine)
        task = engine.start(TaskSpec("echo:0", _echo), recorder)
        for number in range(100):
            task.send(number)
        assert recorder.wait("echo:0", "received", 100) == list(range(100))


def check_large_messages_arrive_whole(make: Callable[[], Engine]) -> None:
    """Megabytes go both ways at once, though neither end waits for the other to read."""
    array = np.arange(2_000_000)
    with make() as engine:
        recorder = Recorder(engine)
        task = engine.start(TaskSpec("echo:0", _echo), recorder)
        for _ in range(3):
            task.send(array)
        for received in recorder.wait("echo:0", "received", 3):
            np.testing.assert_array_equal(received, array)


def check_closures_run(make: Callable[[], Engine]) -> None:
    """The target may be a closure over values of its launcher."""
    captured = {"answer": [42]}

    def target(link: Link) -> None:
        link.send(captured["answer"])

    with make() as engine:
        recorder = Recorder(engine)
        engine.start(TaskSpec("closure:0", target), recorder)
        assert recorder.exit("closure:0") == Exit(status=0)
    assert recorder.events == [
        Event("closure:0", "received", [42]),
        Event("closure:0", "ended", Exit(status=0)),
    ]


def check_a_raising_target_ends_with_its_traceback(make: Callable[[], Engine]) -> None:
    """A crash is told with the traceback of the target, and the engine starts further tasks."""
    with make() as engine:
        recorder = Recorder(engine)
        failed = engine.start(TaskSpec("worker:0", _raise), recorder)
        end = recorder.exit("worker:0")
        assert end.status == 1
        assert end.error is not None
        assert end.error.startswith("Traceback (most recent call last):\n")
        assert "in _raise\n" in end.error
        assert end.error.endswith("ArithmeticError: the worker's own words\n")
        assert not failed.alive
        _expect_closed(
            "send to 'worker:0': it ended, exit status 1", lambda: failed.send("too late")
        )
        engine.start(TaskSpec("worker:0", _greet), recorder)
        ends = recorder.wait("worker:0", "ended", 2)
        assert ends[1] == Exit(status=0)
        assert recorder.heard("worker:0", "received") == ["hello"]


def check_an_exit_keeps_its_status(make: Callable[[], Engine]) -> None:
    """A target that calls `sys.exit` ends with that status, and with no traceback."""
    with make() as engine:
        recorder = Recorder(engine)
        engine.start(TaskSpec("worker:0", _exit), recorder)
        assert recorder.exit("worker:0") == Exit(status=3)


def check_a_receive_can_time_out(make: Callable[[], Engine]) -> None:
    """`receive(timeout=0)` does not wait, and what comes later is still received."""
    with make() as engine:
        recorder = Recorder(engine)
        task = engine.start(TaskSpec("impatient:0", _try_then_wait), recorder)
        recorder.wait("impatient:0", "received")
        task.send("late")
        assert recorder.wait("impatient:0", "received", 2) == ["timed out", "late"]


def check_a_stop_lets_a_task_end_by_itself(make: Callable[[], Engine]) -> None:
    """A stop closes the line: the task receives what was sent, then hears of it, and says bye."""
    with make() as engine:
        recorder = Recorder(engine)
        task = engine.start(TaskSpec("polite:0", _echo_then_say_bye), recorder)
        for word in ("one", "two"):
            task.send(word)
        engine.stop(task, DEADLINE_SECONDS)
        assert recorder.heard("polite:0", "received") == ["one", "two", "bye"]
        assert recorder.heard("polite:0", "ended") == [Exit(status=0)]
        assert not task.alive
        engine.stop(task, 0)
        task.kill()


def check_a_close_ends_all_tasks_and_leaves_nothing(make: Callable[[], Engine]) -> None:
    """After a close, which may be repeated, each end was told once and the threads are gone."""
    threads = set(threading.enumerate())
    names = [f"worker:{index}" for index in range(3)]
    engine = make()
    recorder = Recorder(engine)
    tasks = [engine.start(TaskSpec(name, _echo), recorder) for name in names]
    for name, task in zip(names, tasks, strict=True):
        task.send("here")
        recorder.wait(name, "received")
    begun = time.monotonic()
    engine.close(DEADLINE_SECONDS)
    assert time.monotonic() - begun < DEADLINE_SECONDS, "no task heard that its line was closed"
    engine.close()
    for name, task in zip(names, tasks, strict=True):
        assert recorder.heard(name, "ended") == [Exit(status=0)]
        assert not task.alive
    assert set(threading.enumerate()) <= threads
    _expect_closed(
        "start 'late:0': the engine is closed",
        lambda: engine.start(TaskSpec("late:0", _echo), recorder),
    )


ENGINE_CHECKS: tuple[Callable[[Callable[[], Engine]], None], ...] = (
    check_messages_keep_their_order,
    check_large_messages_arrive_whole,
    check_closures_run,
    check_a_raising_target_ends_with_its_traceback,
    check_an_exit_keeps_its_status,
    check_a_receive_can_time_out,
    check_a_stop_lets_a_task_end_by_itself,
    check_a_close_ends_all_tasks_and_leaves_nothing,
)


def _expect_closed(message: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Closed as error:
        said = str(error)
    else:
        said = "nothing"
    assert said == message, f"wanted Closed({message!r}), got {said!r}"


def _echo(link: Link) -> Steps:
    while True:
        try:
            message = yield from received(link)
        except EOFError:
            return
        link.send(message)
        yield True


def _echo_then_say_bye(link: Link) -> Steps:
    yield from _echo(link)
    link.send("bye")


def _greet(link: Link) -> None:
    link.send("hello")


def _exit(link: Link) -> None:
    sys.exit(3)


def _raise(link: Link) -> None:
    raise ArithmeticError("the worker's own words")


def _try_then_wait(link: Link) -> Steps:
    try:
        link.receive(timeout=0)
    except TimedOut:
        link.send("timed out")
    link.send((yield from received(link)))
