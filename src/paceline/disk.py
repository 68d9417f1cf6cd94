"""What is on the disk when it returns: files with their digests, names in a folder, and who writes.

Who writes in a folder holds a lock on its file `.lock`, which ends with its process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import SchemaError, TimedOut, Unsupported
from paceline.core.manifest import FileEntry

try:
    import fcntl
except ImportError:
    # Windows has no such locks.
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("paceline")

EPOCH = "epoch"
"""The file that has the last epoch in which anything was brought back."""

PAUSE = 0.02
_PART = 4 << 20


def checked_folder(folder: Any, what: str = "checkpoint") -> str:
    """`folder`, if it can be the path of one.

    Raises:
        SchemaError: it cannot; the message begins with `what`.
    """
    path = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise SchemaError(f"{what}: the path of a folder, not {folder!r:.80}")
    return path


def stored(path: Path, parts: list[Any]) -> FileEntry:
    """Write a new file of these parts; its size and digest."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            size += left.nbytes
            while left.nbytes:
                # A disk that is nearly full may take less than it is given.
                taken = file.write(left[:_PART]) or 0
                digest.update(left[:taken])
                left = left[taken:]
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def synced(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(root: Path, timeout: float) -> Iterator[None]:
    """Be the only one who writes in a folder.

    Raises:
        TimedOut: for `timeout` seconds another process was writing there.
    """
    if fcntl is None:
        raise Unsupported("checkpoints are locked as Linux and macOS do it: use WSL")
    deadline = time.monotonic() + timeout
    with (root / ".lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimedOut(
                        f"write a checkpoint in {root}, after {timeout:.1f} s: another process is"
                        " writing there; its end, or another folder, ends the wait"
                    ) from None
            time.sleep(PAUSE)
        yield


def new_epoch(folder: Path, least: int = 0) -> int:
    """An epoch that was never given out here before, `least` or more, noted on the disk.

    Where nothing can be written, as in a folder of somebody else's, it is not noted.
    """
    epoch = max(least, last_epoch(folder) + 1)
    made = folder / f".{EPOCH}-{os.getpid()}"
    try:
        # One that died may have had the same number, as in containers, and left such a file.
        with made.open("w") as file:
            file.write(f"{epoch}\n")
            file.flush()
            os.fsync(file.fileno())
        made.rename(folder / EPOCH)
        synced(folder)
    except OSError as e:
        _log.warning("epoch %d is not noted in %s: %s", epoch, folder, e)
        with suppress(OSError):
            made.unlink()
    return epoch


def last_epoch(folder: Path) -> int:
    """The last that was given out here; -1 if none was."""
    with suppress(OSError, ValueError):
        return int((folder / EPOCH).read_text())
    return -1
