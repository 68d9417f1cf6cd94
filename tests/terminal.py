"""A program in a terminal of its own, to see what it shows and to press its keys."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Self

LIMIT_SECONDS = 30.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

# The first terminal that the leader of a new session opens is the one whose keys it hears.
START = """
import os, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
exec(sys.argv.pop(1))
"""


class Terminal:
    """Runs Python text with `columns` by 24 characters to write on. A context manager."""

    def __init__(self, text: str, *args: str, columns: int, cwd: Path) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, text, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""},
        )
        os.close(slave)
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def lines(self) -> list[str]:
        """All lines that were ever shown, without colours and movements."""
        return re.split(r"[\r\n]+", ESCAPES.sub("", self.output))

    def wait_for(self, words: str) -> None:
        """Read until `words` were shown."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while words not in self.output:
            assert self._read(deadline), f"{words!r} was not shown: {self.lines}"

    def press(self, keys: bytes) -> None:
        """Type, as a person would."""
        os.write(self._master, keys)

    def wait(self) -> int:
        """Read until the program has ended; return its exit status."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(LIMIT_SECONDS)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
        try:
            found = os.read(self._master, 1 << 16) if ready else b""
        except OSError:  # Linux says so when nobody has the terminal open any more
            found = b""
        self.output += found.decode(errors="replace")
        return bool(found)
