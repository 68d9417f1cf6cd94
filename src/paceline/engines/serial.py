"""Everything in the caller's thread: tasks are generators, and go on when they are driven."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import Closed, TimedOut, WouldBlock
from paceline.engines.base import Engine, Exit, Link, Listener, Task, TaskSpec


class SerialLink(Link):
    """A line between two parts of one thread: whoever waits on it waits for itself."""

    waits = False

    def __init__(self, task: SerialTask) -> None:
        self._task = task
        self.inbox: deque[object] = deque()

    def send(self, message: object) -> None:
        self._task.heard(message)

    def receive(self, timeout: float | None = None) -> object:
        if self.inbox:
            return self.inbox.popleft()
        if self._task.hung_up:
            raise EOFError("the launcher closed the line")
        if timeout is None:
            raise WouldBlock("a task waits for its launcher, in the launcher's own thread")
        raise TimedOut("no message from the launcher yet")


class SerialTask(Task):
    """A generator that goes on each time it is driven."""

    def __init__(self, spec: TaskSpec, listener: Listener) -> None:
        super().__init__(spec.name)
        self._listener = listener
        self._link = SerialLink(self)
        self._target = spec.target
        self._steps: Iterator[Any] | None = None

    @property
    def pid(self) -> int | None:
        return None

    def _deliver(self, message: object) -> None:
        self._link.inbox.append(message)

    @property
    def hung_up(self) -> bool:
        """Whether the line was closed."""
        return self._stopping

    def heard(self, message: object) -> None:
        """Hand a message of the task to its listener."""
        self._listener.received(self, message)

    def drive(self) -> bool:
        """Go on until the task waits; whether it did something."""
        if self._exit:
            return False
        try:
            if self._steps is None:
                self._steps = iter(self._target(self._link) or ())
            return bool(next(self._steps))
        except StopIteration:
            self._end(Exit(status=0))
        except KeyboardInterrupt:
            # Ctrl-C ends the function that is at work, and is heard by whoever drives it.
            self._end(Exit(signal="SIGINT"))
            raise
        except (Exception, SystemExit) as e:
            self._end(Exit.by(e))
        return True

    def kill(self) -> None:
        if self._exit is None:
            self._close()
            self._end(Exit(signal="SIGKILL"))

    def stop(self) -> None:
        """Close the line and let the task end by itself."""
        self._stopping = True
        while self.drive():
            pass
        self.kill()

    def _close(self) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()

    def _end(self, how: Exit) -> None:
        self._exit = how
        self._listener.ended(self, how)


class SerialEngine(Engine):
    """Tasks in the caller's thread, one step at a time, in the order they were started.

    A target that has to wait is a generator function, which yields instead. What tasks print is
    printed, and breakpoints in them work as anywhere.
    """

    concurrent = False
    kills = False

    def __init__(self) -> None:
        self._tasks: list[SerialTask] = []
        self._closed = False

    def start(self, spec: TaskSpec, listener: Listener) -> Task:
        if self._closed:
            raise Closed(f"start {spec.name!r}: the engine is closed")
        task = SerialTask(spec, listener)
        self._tasks.append(task)
        return task

    def drive(self) -> bool:
        worked = [task.drive() for task in list(self._tasks)]
        self._tasks = [task for task in self._tasks if task.alive]
        return any(worked)

    def stop(self, task: Task, timeout: float) -> None:
        assert isinstance(task, SerialTask)
        task.stop()

    def close(self, timeout: float = 5.0) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.stop()
        self._tasks.clear()
