"""The first code in a task's process, and the frames of the line to its launcher.

`processes` runs this file as a script, by its path. It imports the standard library only: whatever
takes long to import comes after the task is tied to its launcher.
"""

import _thread
import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys

PROTOCOL = 5

# What is in a frame, and the bytes of its body, a pickle: launcher and task trust each other.
HEADER = struct.Struct("!BQ")
MESSAGE, FAILURE = 0, 1

_PR_SET_PDEATHSIG = 1

# Has a process write down its Python stacks, whatever it is at. Not one of those that programs use
# for themselves; where there is no such, one that does nothing by default.
STACKS: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGINFO", 0)

# What the file of the stacks begins with: the thread that is to write them, or 0.
SCRIBE = struct.Struct("!Q")


class Frames:
    """Puts frames together from the pieces in which a socket gives them."""

    def __init__(self) -> None:
        self._kind: int | None = None
        self._buffer = bytearray(HEADER.size)
        self._filled = 0

    def read(self, line: socket.socket) -> tuple[int, bytearray] | None:
        """Read one piece; return the kind and body of a frame if it is complete with it.

        Raises:
            BlockingIOError: nothing is there, and the socket does not block.
            EOFError: the other end has closed the line.
        """
        try:
            count = line.recv_into(memoryview(self._buffer)[self._filled :])
        except ConnectionError as error:
            raise EOFError("the line was cut off") from error
        if not count:
            raise EOFError("the line is closed")
        self._filled += count
        if self._filled < len(self._buffer):
            return None
        kind, body = self._kind, self._buffer
        self._filled = 0
        if kind is None:
            self._kind, length = HEADER.unpack(body)
            self._buffer = bytearray(length)
            return None
        self._kind, self._buffer = None, bytearray(HEADER.size)
        return kind, body


def main() -> None:
    """Tie this process to its launcher, look for modules where it does, and run what it sends."""
    _, _, descriptor, launcher, stacks = sys.argv
    _die_with(int(launcher))
    line = socket.socket(fileno=int(descriptor))
    line.set_inheritable(False)
    faulthandler.enable()
    _be_ready_to_show_stacks(int(stacks))
    # Ctrl-C is for the launcher to handle. Were it ignored instead of caught, the programs that
    # this task starts would ignore it too.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    sys.path[:], sys.argv[:] = pickle.loads(_next_body(line))
    work = pickle.loads(_next_body(line))
    work(line)


def _die_with(launcher: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it ended before that took effect
        sys.exit(1)


def _be_ready_to_show_stacks(file: int) -> None:
    """Have `STACKS` write all stacks to a file, also while another thread's code never returns."""
    os.set_inheritable(file, False)
    scribe = 0
    if sys.platform == "linux":
        # One that always waits: a signal to it cuts short nobody's call in the kernel. All others
        # stay those of the main thread.
        never = _thread.allocate_lock()
        never.acquire()
        others = set(signal.valid_signals()) - {STACKS}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, others)
        _thread.start_new_thread(never.acquire, ())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(OSError, ValueError):
            [scribe] = {int(n) for n in os.listdir("/proc/self/task")} - {os.getpid()}
    os.write(file, SCRIBE.pack(scribe))
    if STACKS:
        faulthandler.register(STACKS, file, all_threads=True)


def _next_body(line: socket.socket) -> bytearray:
    frames = Frames()
    while (frame := frames.read(line)) is None:
        pass
    return frame[1]


if __name__ == "__main__":
    main()
