"""How many threads the linear algebra of this process works with.

With several, a library may cut a large product or sum into other parts, and round it otherwise,
than it does with one.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

_LIBRARY = re.compile(r"/[^/]*(?:blas|blis|mkl)[^/]*\.so[^/]*$", re.IGNORECASE)

_COUNTS = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
    "MKL_Get_Max_Threads",
    "bli_thread_get_num_threads",
)


def threads() -> dict[str, int]:
    """The threads of each BLAS library that is loaded, and of torch if it is, by name.

    Libraries are found on Linux only; of what cannot be asked nothing is said.
    """
    found: dict[str, int] = {}
    for path in _loaded():
        count = _count(path)
        if count is not None:
            found[Path(path).name.partition(".")[0].partition("-")[0]] = count
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        found["torch"] = int(torch.get_num_threads())
    return found


def several(who: str, counts: dict[str, int]) -> str | None:
    """What is to be said of `who` in lockstep, where a library has more than one thread."""
    many = {name: count for name, count in counts.items() if count > 1}
    if not many:
        return None
    said = ", ".join(f"{name} {count}" for name, count in sorted(many.items()))
    return (
        f"lockstep with several threads in {who} ({said}): they may round large products and sums"
        " otherwise in another run, so equal bits are not promised; set OPENBLAS_NUM_THREADS=1"
        " before NumPy is imported, torch.set_num_threads(1), and for workers worker_threads=1"
    )


def _loaded() -> list[str]:
    """The files of the BLAS libraries in this process."""
    if sys.platform != "linux":
        return []
    paths = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[5:]
        if name and _LIBRARY.search(name[0]):
            paths.add(name[0])
    return sorted(paths)


def _count(path: str) -> int | None:
    try:
        # What is mapped but not loaded as a library stays so.
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    for name in _COUNTS:
        ask = getattr(library, name, None)
        if ask is not None:
            return int(ask())
    return None
