"""Tasks as threads of this process: they share its memory, its modules and its interpreter lock."""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback

from paceline.core.errors import Closed, TimedOut
from paceline.engines.base import (
    Engine,
    Exit,
    Link,
    Listener,
    Task,
    TaskSpec,
    readable,
    run_through,
)


class _Hangup:
    """The last thing on a line."""


class ThreadLink(Link):
    """A line within one process: messages are handed over as they are."""

    def __init__(self, task: ThreadTask) -> None:
        self._task = task
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

    def send(self, message: object) -> None:
        self._task.heard(message)

    def receive(self, timeout: float | None = None) -> object:
        try:
            message = self.inbox.get(timeout != 0, timeout or None)
        except queue.Empty:
            raise TimedOut(f"receive: no message from the launcher within {timeout} s") from None
        if isinstance(message, _Hangup):
            self.inbox.put(message)
            raise EOFError("the launcher closed the line")
        return message


class ThreadTask(Task):
    """A thread that runs a target."""

    def __init__(self, spec: TaskSpec, listener: Listener) -> None:
        super().__init__(spec.name)
        self._target = spec.target
        self._listener = listener
        self._link = ThreadLink(self)
        self.thread = threading.Thread(target=self._run, name=f"paceline-{spec.name}", daemon=True)

    @property
    def pid(self) -> int | None:
        return None

    def _deliver(self, message: object) -> None:
        self._link.inbox.put(message)

    def heard(self, message: object) -> None:
        """Hand a message of the task to its listener."""
        self._listener.received(self, message)

    def stacks(self) -> str | None:
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return None
        calls = [
            f'  File "{each.f_code.co_filename}", line {line} in {each.f_code.co_name}'
            for each, line in traceback.walk_stack(frame)
        ]
        return readable("\n".join([f"{self.thread.name} (most recent call first):", *calls]))

    def kill(self) -> None:
        """Hang up: nothing can end a thread but itself, at its next look at the line."""
        self._stopping = True
        self._link.inbox.put(_Hangup())

    def _run(self) -> None:
        how = Exit(status=0)
        try:
            run_through(self._target, self._link)
        except BaseException as e:
            how = Exit.by(e)
        self._exit = how
        self._listener.ended(self, how)


class ThreadEngine(Engine):
    """Tasks as threads. One that never looks at its line cannot be ended, only left behind."""

    kills = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[ThreadTask] = []
        self._closed = False

    def start(self, spec: TaskSpec, listener: Listener) -> Task:
        with self._lock:
            if self._closed:
                raise Closed(f"start {spec.name!r}: the engine is closed")
            task = ThreadTask(spec, listener)
            self._tasks = [other for other in self._tasks if other.alive]
            self._tasks.append(task)
            task.thread.start()
        return task

    def stop(self, task: Task, timeout: float) -> None:
        assert isinstance(task, ThreadTask)
        task.kill()
        task.thread.join(timeout)

    def close(self, timeout: float = 5.0) -> None:
        with self._lock:
            self._closed = True
            tasks = list(self._tasks)
        for task in tasks:
            task.kill()
        deadline = time.monotonic() + timeout
        for task in tasks:
            task.thread.join(max(0.0, deadline - time.monotonic()))
