"""Results that are kept: JSON files with the machine, the versions, the date and the command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

import paceline

FOLDER = Path(__file__).parents[1] / "results"


def keep(name: str, content: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write `name.json`: what was measured, and where, when and how."""
    folder.mkdir(exist_ok=True)
    place = folder / f"{name}.json"
    place.write_text(json.dumps({**circumstances(), **content}, indent=1) + "\n")
    return place


def kept(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """What `keep` has written."""
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def circumstances() -> dict[str, Any]:
    """What figures depend on, beside the peers' versions."""
    script = Path(sys.argv[0])
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", f"benchmarks/{script.name}", *sys.argv[1:]]),
        "machine": platform.machine(),
        "cpu": field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int((field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 1e6, 1),
        "kernel": platform.release(),
        "load": [round(one, 2) for one in os.getloadavg()],
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def field(file: str, name: str) -> str | None:
    """The first value of a name in a file of `name : value` lines."""
    found = re.search(rf"^{name}\s*:\s*(.+)$", Path(file).read_text(), re.MULTILINE)
    return found[1].strip() if found else None
