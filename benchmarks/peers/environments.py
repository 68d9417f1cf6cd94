"""A virtual environment for each peer, made once from exact pins and kept while these are the same.

`interpreter(Path("benchmarks/peers/ray.txt"))` is the Python of one that has what that file names.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venvs" / "peers"
LIMIT = 1200.0
"""Seconds that pip may take."""
PIN = re.compile(r"[A-Za-z0-9._-]+(\[[a-z0-9,_-]+\])?==[^\s;]+")


class NotInstalled(Exception):
    """A peer could not be installed here; the message is what pip said last."""


def interpreter(pins: Path, folder: Path = FOLDER) -> Path:
    """The Python of the environment that has exactly what `pins` names; made if it is not there.

    Raises:
        NotInstalled: pip failed, or took longer than `LIMIT`.
        ValueError: a line of `pins` is not of the form `name==version`.
    """
    wanted = f"# Python {platform.python_version()}\n{pins.read_text()}"
    for line in pinned(pins):
        if not PIN.fullmatch(line):
            raise ValueError(f"{pins.name}: {line!r} is no pin; wanted is name==version")
    home = folder / pins.stem
    python, made = home / "bin" / "python", home / "made.txt"
    if made.exists() and made.read_text() == wanted:
        return python
    print(f"{pins.stem}: installing {', '.join(pinned(pins))}, once", file=sys.stderr, flush=True)
    made_by_venv([sys.executable, "-m", "venv", "--clear", str(home)])
    made_by_venv([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(pins)])
    made.write_text(wanted)
    return python


def pinned(pins: Path) -> list[str]:
    """The lines of a file of pins, without comments."""
    lines = (line.partition("#")[0].strip() for line in pins.read_text().splitlines())
    return [line for line in lines if line]


def made_by_venv(command: list[str]) -> None:
    """Run a step of the installation, and tell what it printed if it fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
            stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise NotInstalled(f"not done after {LIMIT:.0f} s: {' '.join(command[1:])}") from e
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise NotInstalled(" ".join(said) or f"status {done.returncode} of {command}")


VERSIONS = """
import importlib.metadata, json, platform, sys
made = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        made[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(made))
"""


def versions(python: Path, *names: str) -> dict[str, str]:
    """What the environment of an interpreter has of these, and its Python."""
    said = subprocess.run(
        [str(python), "-c", VERSIONS, *names], stdout=subprocess.PIPE, text=True, timeout=60,
        check=True,
    ).stdout  # fmt: skip
    known: dict[str, str] = json.loads(said)
    return known
