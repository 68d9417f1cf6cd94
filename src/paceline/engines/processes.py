"""Tasks as processes of this machine: fresh interpreters that die with their launcher."""

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import IO

import cloudpickle

from paceline.core.errors import Closed, FunctionError, TimedOut, Unsupported, WorkerFailed
from paceline.engines import _child
from paceline.engines._child import FAILURE, HEADER, MESSAGE, PROTOCOL, Frames
from paceline.engines._guard import Guard
from paceline.engines._link import work
from paceline.engines._loop import READ, WRITE, Loop
from paceline.engines._output import Lines
from paceline.engines._stacks import Stacks
from paceline.engines.base import Engine, Exit, Listener, Stream, Task, TaskSpec, hygiene

READ_SIZE = 64 * 1024

# More than a pipe can hold: what comes after it was not written by the task that ended.
MAX_DRAIN_READS = 64

# How often ends are looked for where the kernel does not report them.
POLL_SECONDS = 0.05

# How long a process may need to vanish after SIGKILL, which is the kernel's work.
KILL_SECONDS = 10.0


class ProcessTask(Task):
    """A process and its line. Methods with an underscore are for the loop's thread."""

    def __init__(
        self,
        spec: TaskSpec,
        listener: Listener,
        process: subprocess.Popen[bytes],
        line: socket.socket,
        stacks: Stacks,
        loop: Loop,
        on_end: Callable[["ProcessTask"], None],
    ) -> None:
        super().__init__(spec.name)
        self._listener = listener
        self._process = process
        self._line = line
        self._stacks = stacks
        self._loop = loop
        self._on_end = on_end
        self._frames = Frames()
        self._outbox: deque[memoryview] = deque()
        self._hanging_up = False
        self._error: str | None = None
        self._told = threading.Event()
        self._open: dict[int, Callable[[], None]] = {}
        self._lines: dict[Stream, Lines] = {"stdout": Lines(), "stderr": Lines()}
        line.setblocking(False)
        self._line_number = self._watch(line.fileno(), line.close, self._serve_line)
        self._outputs: dict[Stream, int] = {
            "stdout": self._watch_output("stdout", process.stdout),
            "stderr": self._watch_output("stderr", process.stderr),
        }
        self.reports_end = False
        with contextlib.suppress(AttributeError, OSError):  # not every kernel can
            number = os.pidfd_open(process.pid)
            self._watch(number, functools.partial(os.close, number), self._finish)
            self.reports_end = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def __repr__(self) -> str:
        return f"<ProcessTask {self._name!r}, pid {self.pid}, {self._exit or 'alive'}>"

    def _deliver(self, message: object) -> None:
        self.queue(pickle.dumps(message, PROTOCOL))

    def queue(self, body: bytes) -> None:
        """Send what is pickled already."""
        self._loop.post(functools.partial(self._queue, body))

    def stacks(self) -> str | None:
        return self._stacks.of(self.pid)

    def kill(self) -> None:
        self._loop.post(self._kill)

    def hang_up(self) -> None:
        """Close the line to the task once all that was sent has left."""
        self._stopping = True
        self._loop.post(self._hang_up)

    def wait(self, timeout: float) -> bool:
        """Wait until the listener was told of the end; false when it was not."""
        return self._told.wait(timeout)

    def _watch(
        self, number: int, close: Callable[[], None], on_ready: Callable[[int], object]
    ) -> int:
        self._loop.watch(number, on_ready)
        self._open[number] = close
        return number

    def _watch_output(self, stream: Stream, output: IO[bytes] | None) -> int:
        assert output is not None
        os.set_blocking(output.fileno(), False)
        return self._watch(
            output.fileno(), output.close, functools.partial(self._read_output, stream)
        )

    def _close(self, number: int) -> None:
        self._loop.unwatch(number)
        self._open.pop(number)()

    def _queue(self, body: bytes) -> None:
        self._outbox.append(memoryview(HEADER.pack(MESSAGE, len(body))))
        self._outbox.append(memoryview(body))
        self._flush()

    def _hang_up(self) -> None:
        self._hanging_up = True
        self._flush()

    def _serve_line(self, ready: int) -> None:
        if ready & READ:
            self._read_line()
        if ready & WRITE:
            self._flush()

    def _flush(self) -> None:
        if self._line_number not in self._open:
            self._outbox.clear()
            return
        while self._outbox:
            try:
                count = self._line.send(self._outbox[0])
            except BlockingIOError:
                break
            except OSError:  # the task is ending
                self._outbox.clear()
                break
            rest = self._outbox.popleft()[count:]
            if rest:
                self._outbox.appendleft(rest)
        self._loop.watch(
            self._line_number, self._serve_line, READ | WRITE if self._outbox else READ
        )
        if self._hanging_up and not self._outbox:
            # Not just closed: a process forked by this one could hold a copy of the descriptor.
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)

    def _read_line(self) -> bool:
        """Read a piece from the line; false when there is no more for now."""
        if self._line_number not in self._open:
            return False
        try:
            frame = self._frames.read(self._line)
        except BlockingIOError:
            return False
        except EOFError:
            self._close(self._line_number)
            return False
        if frame:
            self._take(*frame)
        return True

    def _take(self, kind: int, body: bytearray) -> None:
        try:
            message = pickle.loads(body)
        except Exception:
            self._error = f"a message of {self._name!r} is unreadable:\n{traceback.format_exc()}"
            self._kill()
            return
        if kind == FAILURE:
            self._error = str(message)
        else:
            self._loop.tell(self._listener.received, self, message)

    def _read_output(self, stream: Stream, ready: int = READ) -> bool:
        """Read a piece of output and report its lines; false when there is no more for now."""
        number = self._outputs[stream]
        if number not in self._open:
            return False
        try:
            data = os.read(number, READ_SIZE)
        except BlockingIOError:
            return False
        if not data:
            self._close(number)
        self._report(stream, data)
        return bool(data)

    def _report(self, stream: Stream, data: bytes, final: bool = False) -> None:
        for line in self._lines[stream].feed(data, final):
            self._loop.tell(self._listener.printed, self, line, stream)

    def _kill(self) -> None:
        # The number of an ended process is given to another one only after it was waited for and
        # its group is empty.
        if self._exit is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _finish_if_ended(self) -> None:
        if not self.reports_end and self._process.poll() is not None:
            self._finish()

    def _finish(self, ready: int = READ) -> None:
        """End what the process left, hear its last words and tell of its end."""
        self._kill()
        while self._read_line():
            pass
        for stream in self._outputs:
            for _ in range(MAX_DRAIN_READS):
                if not self._read_output(stream):
                    break
            self._report(stream, b"", final=True)
        for number in tuple(self._open):
            self._close(number)
        self._stacks.close()
        self._on_end(self)
        self._exit = _exit(self._process.wait(), self._error)
        self._loop.tell(self._listener.ended, self, self._exit)
        self._told.set()


def _exit(returncode: int, error: str | None) -> Exit:
    if returncode >= 0:
        return Exit(status=returncode, error=error)
    try:
        return Exit(signal=signal.Signals(-returncode).name, error=error)
    except ValueError:  # a real-time signal
        return Exit(signal=f"signal {-returncode}", error=error)


class ProcessEngine(Engine):
    """Starts each task as a fresh interpreter in a process group of its own.

    However the launcher ends, its tasks and what they started end with it.

    Raises:
        Unsupported: on Windows.
    """

    def __init__(self) -> None:
        if os.name != "posix":
            raise Unsupported(
                "engine 'processes' needs Linux or macOS; "
                f"on {sys.platform} use it inside WSL, or engine='serial'"
            )
        self._tasks: set[ProcessTask] = set()
        self._guard = Guard()
        self._closing = False
        # The kernel ends a task when the thread that started it ends: here, all are started by
        # the loop's thread, which lasts.
        self._loop = Loop("paceline-processes", self._look_for_ends, self._end_all)

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._tasks)} tasks"
        return f"<ProcessEngine, {state}>"

    def start(self, spec: TaskSpec, listener: Listener) -> ProcessTask:
        self._loop.raise_kept()
        try:
            target = cloudpickle.dumps(spec.target, PROTOCOL)
        except Exception as error:
            raise FunctionError(f"the target of {spec.name!r} cannot be sent: {error}") from error
        what = f"start {spec.name!r}"
        return self._loop.call(what, lambda: self._start(what, spec, listener, target))

    def stop(self, task: Task, timeout: float) -> None:
        assert isinstance(task, ProcessTask)
        assert not self._loop.is_here, "a listener may kill a task, not stop it"
        task.hang_up()
        try:
            task.wait(timeout)
        finally:
            task.kill()
            if not task.wait(KILL_SECONDS):
                raise TimedOut(f"stop {task!r}: still there {KILL_SECONDS} s after SIGKILL")

    def close(self, timeout: float = 5.0) -> None:
        assert not self._loop.is_here, "a listener may kill a task, not close the engine"
        deadline = time.monotonic() + timeout
        try:
            self._loop.post(self._wind_down)
            self._loop.join(deadline - time.monotonic())
        finally:
            self._loop.post(self._kill_all)
            if not self._loop.join(KILL_SECONDS):
                raise TimedOut(
                    f"close: {sorted(map(repr, self._tasks))} still there "
                    f"{KILL_SECONDS} s after SIGKILL"
                )
        self._loop.raise_kept()

    # The rest runs on the loop's thread.

    def _start(self, what: str, spec: TaskSpec, listener: Listener, target: bytes) -> ProcessTask:
        if self._closing:
            raise Closed(f"{what}: the engine is closed")
        try:
            self._guard.start()
            process, line, stacks = _open_process(spec)
        except OSError as error:
            raise WorkerFailed(
                f"{what}: {error}; {len(self._tasks)} tasks run, a process may "
                f"have {os.sysconf('SC_OPEN_MAX')} descriptors"
            ) from error
        self._guard.add(process.pid)
        task = ProcessTask(spec, listener, process, line, stacks, self._loop, self._forget)
        self._tasks.add(task)
        task.queue(pickle.dumps((sys.path, sys.argv), PROTOCOL))
        task.queue(pickle.dumps(work, PROTOCOL))
        task.queue(target)
        return task

    def _look_for_ends(self) -> float | None:
        """Find the ends that the kernel does not report; return when to look again."""
        for task in tuple(self._tasks):
            task._finish_if_ended()
        return None if all(task.reports_end for task in self._tasks) else POLL_SECONDS

    def _forget(self, task: ProcessTask) -> None:
        self._guard.discard(task.pid)
        self._tasks.discard(task)
        if self._closing and not self._tasks:
            self._loop.end()

    def _wind_down(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.hang_up()
        if not self._tasks:
            self._loop.end()

    def _kill_all(self) -> None:
        for task in self._tasks:
            task._kill()

    def _end_all(self) -> None:
        self._closing = True
        self._kill_all()
        for task in tuple(self._tasks):
            task._finish()
        self._guard.close()


def _open_process(spec: TaskSpec) -> tuple[subprocess.Popen[bytes], socket.socket, Stacks]:
    """Start the interpreter of a task; return it with the launcher's ends of what ties them."""
    ours, theirs = socket.socketpair()
    number = str(theirs.fileno())
    stacks: Stacks | None = None
    try:
        stacks = Stacks()
        place = str(stacks.descriptor)
        process = subprocess.Popen(
            [sys.executable, "-P", _child.__file__, spec.name, number, str(os.getpid()), place],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **hygiene(spec)},
            pass_fds=(theirs.fileno(), stacks.descriptor, *spec.inherit),
            process_group=0,  # a Ctrl-C in the terminal is for the launcher
        )
    except BaseException:
        ours.close()
        if stacks is not None:
            stacks.close()
        raise
    finally:
        theirs.close()
    return process, ours, stacks
