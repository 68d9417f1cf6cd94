"""What will not fit on this machine, told before anything is started."""

from __future__ import annotations

import os
import sys

from paceline.core.numbers import counted

DESCRIPTORS, DESCRIPTORS_PER_WORKER = 64, 16
"""Files, sockets and segments that a launcher has open, and those it adds for each worker."""


def preflight(workers: int, threads: int, cores: int, descriptors: int) -> list[str]:
    """What will not fit on this machine, with the numbers; nothing where all does."""
    found = []
    if workers * threads > cores:
        found.append(
            f"{workers} workers with {counted(threads, 'thread')} each on {cores} cores: they will"
            " take turns"
        )
    needed = DESCRIPTORS + DESCRIPTORS_PER_WORKER * workers
    if needed > descriptors:
        found.append(
            f"{workers} workers need about {needed} file descriptors, {descriptors} are allowed:"
            " raise the limit (ulimit -n)"
        )
    return found


def limits() -> tuple[int, int]:
    """The cores and file descriptors that this process may use."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores, os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else 1 << 20
