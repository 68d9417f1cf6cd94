"""The launcher's end of how a process shows its Python stacks, whatever it is at."""

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from paceline.engines._child import SCRIBE, STACKS
from paceline.engines.base import readable

WITHIN = 2.0
"""Seconds that a process has to write them."""

_LOOK = 0.02
_QUIET_LOOKS = 3


class Stacks:
    """A file without a name that a process writes its stacks to when it gets a signal.

    The process's handler is C code, which needs no interpreter lock. Any thread may ask.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("stacks")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._closed = False
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)

    def of(self, pid: int) -> str | None:
        """The stacks of the process, which has this file too; `None` if it cannot tell them."""
        with self._asking:
            with self._lock:
                if self._closed:
                    return None
                file = os.dup(self.descriptor)
            try:
                return _asked(pid, file)
            except OSError:  # it has ended
                return None
            finally:
                os.close(file)


def _asked(pid: int, file: int) -> str | None:
    start = os.pread(file, SCRIBE.size, 0)
    if len(start) < SCRIBE.size or not STACKS:
        return None
    thread = pid
    if sys.platform == "linux":
        status = Path(f"/proc/{pid}/status").read_text()
        state, caught = _field(status, "State"), int(_field(status, "SigCgt"), 16)
        if not caught >> (STACKS - 1) & 1:
            # It would die of it: a function of the user's gave the signal another meaning.
            return None
        if state[0] in "tT":
            return f"its process is stopped ({state}); SIGCONT lets it go on"
        # One that computes is asked itself, so that its stack is not changed meanwhile; one that
        # waits in the kernel is not disturbed.
        thread = pid if state[0] == "R" else SCRIBE.unpack(start)[0] or pid
    os.ftruncate(file, SCRIBE.size)
    # The place where both ends write is one and the same.
    os.lseek(file, SCRIBE.size, os.SEEK_SET)
    _signal(pid, thread)
    text = _settled(file)
    return readable(text) or None


def _settled(file: int) -> str:
    """What is in the file once nothing has been added for a moment."""
    deadline, size, looks = time.monotonic() + WITHIN, SCRIBE.size, 0
    while looks < _QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(_LOOK)
        now = os.fstat(file).st_size
        looks = looks + 1 if now == size > SCRIBE.size else 0
        size = now
    return os.pread(file, size - SCRIBE.size, SCRIBE.size).decode(errors="replace").rstrip()


def _signal(pid: int, thread: int) -> None:
    with suppress(AttributeError):  # a C library without it
        if thread != pid or sys.platform == "linux":
            if ctypes.CDLL(None).tgkill(pid, thread, STACKS):
                raise ProcessLookupError(f"no thread {thread} of process {pid}")
            return
    os.kill(pid, signal.Signals(STACKS))


def _field(status: str, name: str) -> str:
    return status.partition(f"{name}:")[2].partition("\n")[0].strip()
