"""A small process that outlives a launcher by a moment, to end the tasks it leaves."""

import subprocess
import sys

# Kills the groups it was told of (+) and not told to forget (-), once its launcher is gone. A task
# alone could not: the kernel may kill it before it has killed the processes that it started.
_GUARD = """\
# paceline: ends the tasks of a launcher that died
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Knows the process groups of the living tasks; used by one thread."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._write(f"+{group}\n")

    def discard(self, group: int) -> None:
        self._groups.discard(group)
        self._write(f"-{group}\n")

    def start(self) -> None:
        """Start the process unless it runs; tell it of all groups."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,
            )
            self._write("".join(f"+{group}\n" for group in self._groups))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipe, waits for the end
                self._process = None

    def _write(self, text: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
        except BrokenPipeError:  # someone killed it
            self.close()
            self.start()
