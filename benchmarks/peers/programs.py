"""A peer's program: a process that says what it measured as lines of JSON, within a time limit.

What libraries print goes to standard error. When a program ends, all that it has started ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MARK = "PACELINE_BENCHMARK_PROGRAM"
"""In the environment of a program and so of all that it starts."""


class Failed(Exception):
    """A program ended too early, or took too long; the message has its last words."""


class Program:
    """`python script arguments`, which is asked and answers in lines of JSON; a context manager.

    `limit` is the seconds that the program may take altogether: then, at its next answer, it is
    ended and `Failed` is raised. `extra` is added to its environment.
    """

    def __init__(
        self,
        python: str | Path,
        script: Path,
        *arguments: str,
        limit: float,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.name = " ".join([script.name, *arguments])
        self._until = time.monotonic() + limit
        self._limit = limit
        self._mark = uuid.uuid4().hex
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [str(python), str(script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **(extra or {}), MARK: self._mark},
        )  # fmt: skip
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._heard = b""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Send a line, and take the next line that the program writes."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self.answer(timeout)

    def answer(self, timeout: float | None = None) -> dict[str, Any]:
        """The next line that the program writes.

        Raises:
            Failed: it ended, or the time is over.
        """
        for line in self.lines(timeout):
            return line
        raise Failed(f"{self.name}: ended with status {self._status()}: {self.last_words()}")

    def lines(self, timeout: float | None = None) -> Iterator[dict[str, Any]]:
        """All lines that the program writes, until its output ends.

        Raises:
            Failed: the next line took longer than `timeout`, or all of it more than the limit.
        """
        while (line := self._line(timeout)) is not None:
            if line.startswith(b"{"):
                yield json.loads(line)

    def _line(self, timeout: float | None) -> bytes | None:
        until = self._until if timeout is None else min(self._until, time.monotonic() + timeout)
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            left = until - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                spent = time.monotonic() - (self._until - self._limit)
                raise Failed(f"{self.name}: no answer, {spent:.0f} s after its start")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def processes(self) -> list[int]:
        """The program and whatever it has started that still runs, wherever these now belong."""
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._owns(pid)
        ]

    def _owns(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"{MARK}={self._mark}".encode() in environment.split(b"\0")

    def memory(self) -> dict[int, int]:
        """Bytes of each of its processes, what is shared counted in parts (PSS)."""
        return {pid: nbytes for pid in self.processes() if (nbytes := proportional(pid))}

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-4:])

    def _status(self) -> int | None:
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Hang up; whatever of the program runs 10 s later is killed."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        until = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._selector.close()
        self._errors.close()


def proportional(pid: int) -> int:
    """Bytes of a process, what is shared counted in parts; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
