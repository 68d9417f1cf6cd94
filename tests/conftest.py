"""What every test is held to: it ends with no thread, process, descriptor or segment left."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.testing import Serving, serving
from paceline.testing.serving import Carrier

# Started in the background, a shell has its children ignore Ctrl-C, and theirs; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a test closed may still be on its way out: a child being reaped, a peer noticing an end.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.01

# Kept open for the life of the process by libraries, not by us: matplotlib's fonts, CUDA's devices.
FOREIGN_SUFFIXES = (".ttf", ".otf", ".afm")
FOREIGN_PREFIXES = ("/dev/nvidia", "/dev/urandom")

# Every process started by the tests inherits this mark, so a grandchild whose parent died is found.
MARK_NAME = "PYTEST_LEAK_MARK"
MARK = uuid.uuid4().hex
os.environ[MARK_NAME] = MARK

ON_LINUX = sys.platform == "linux"
FAILED = pytest.StashKey[bool]()

# How long an example takes depends on who else uses the machine; the limit of the test holds.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


@dataclass(frozen=True)
class Holdings:
    """What this process and its descendants hold, each thing with the words that describe it."""

    threads: dict[object, str]
    processes: dict[object, str]
    descriptors: dict[object, str]
    segments: dict[object, str]

    def beyond(self, baseline: "Holdings") -> list[str]:
        """Name what is held here and was not held in `baseline`."""
        return [
            f"{kind}: {text}"
            for kind, now, before in (
                ("thread", self.threads, baseline.threads),
                ("process", self.processes, baseline.processes),
                ("descriptor", self.descriptors, baseline.descriptors),
                ("segment", self.segments, baseline.segments),
            )
            for key, text in now.items()
            if key not in before
        ]


def holdings() -> Holdings:
    """Look at the four kinds of things once, without waiting."""
    return Holdings(_threads(), _processes(), _descriptors(), _segments())


def _threads() -> dict[object, str]:
    # The number of a thread is reused after its end, the object is not.
    return {thread: repr(thread) for thread in threading.enumerate()}


def _processes() -> dict[object, str]:
    return {pid: f"{pid} {_command(pid)}" for pid in _children() | _marked()}


def _children() -> set[int]:
    if not ON_LINUX:
        return _children_by_ps()
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _children_by_ps() -> set[int]:
    with subprocess.Popen(
        ["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True
    ) as listing:
        lines, _ = listing.communicate()
    pairs = (map(int, line.split()) for line in lines.splitlines())
    return {pid for pid, parent in pairs if parent == os.getpid() and pid != listing.pid}


def _marked() -> set[int]:
    if not ON_LINUX:
        return set()
    wanted = f"{MARK_NAME}={MARK}".encode()
    found: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.add(int(entry))
    return found - {os.getpid()}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip() or "(ended, not reaped)"
    return ""


def _descriptors() -> dict[object, str]:
    folder = "/proc/self/fd" if ON_LINUX else "/dev/fd"
    found: dict[object, str] = {}
    for entry in os.listdir(folder):
        # The descriptor that lists the folder is gone by now and drops out here.
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{entry}") if ON_LINUX else _identity(int(entry))
            if not target.startswith(FOREIGN_PREFIXES) and not target.endswith(FOREIGN_SUFFIXES):
                found[entry, target] = f"{entry} -> {target}"
    return found


def _identity(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"device {status.st_dev} inode {status.st_ino} mode {status.st_mode:o}"


def _segments() -> dict[object, str]:
    if not ON_LINUX:
        return {}
    found: dict[object, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:paceline" in line:
            span, mode, _, _, inode, name = line.split(maxsplit=5)
            found[inode] = f"{name} inode {inode} mapped {mode} at {span}"
    return found


def pytest_collection_finish() -> None:
    """Leave what imports made out of the collection after each test: it would take the longest."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same of what the tests of a module imported, and of their reports."""
    if nextitem is not None and nextitem.path != item.path:
        pytest_collection_finish()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Fail a test that leaves a thread, a process, a descriptor or a mapped segment behind.

    The message names each. Processes left by the test are then killed, lest they outlive the run.
    """
    before = holdings()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    # The traceback of a failed test keeps its locals alive: what they hold says nothing new.
    failed = request.node.stash.get(FAILED, False)
    while (
        (left := (now := holdings()).beyond(before)) and not failed and time.monotonic() < deadline
    ):
        gc.collect()
        time.sleep(POLL_SECONDS)
    for pid in now.processes.keys() - before.processes.keys():
        assert isinstance(pid, int)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left and not failed:
        pytest.fail(f"still there {GRACE_SECONDS} s after the test: " + "; ".join(left))


@pytest.fixture(params=["memory", "unix", "tcp"])
def server(request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A server in a thread, reached in each way that there is."""
    carrier: Carrier = request.param
    with serving(carrier, where="thread") as made:
        yield made
