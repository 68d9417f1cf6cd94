"""The programs that Markdown pages show, as they stand there.

A comment above a block names the program that it is a part of, or whose output it shows:

    <!-- acrobot.py, part 1 -->
    <!-- acrobot.py, output -->
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Each process may import torch, which takes its time on a busy machine.
LIMIT_SECONDS = 100.0

_BLOCK = re.compile(
    r"(?:^<!-- (\S+), (part \d|output) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A page and what is found in it."""

    name: str
    text: str

    @property
    def parts(self) -> dict[tuple[str, str], str]:
        """The blocks that belong to programs, by the program's name and the part."""
        return {(name, part): text for name, part, _, text in self._blocks if name}

    @property
    def programs(self) -> dict[str, str]:
        """Each program, its parts put in order."""
        parts = self.parts
        return {
            name: "\n\n".join(parts[key] for key in sorted(parts) if key in _parts_of(name, parts))
            for name, _ in parts
        }

    @property
    def strays(self) -> list[str]:
        """The Python blocks that no program claims."""
        return [text for name, _, word, text in self._blocks if word == "python" and not name]

    @property
    def links(self) -> list[str]:
        """Where the links of its prose lead."""
        return _LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may name behind a #."""
        return {_slug(heading) for heading in _HEADING.findall(self.prose)}

    @property
    def prose(self) -> str:
        """The page without its blocks."""
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.DOTALL | re.MULTILINE)

    @property
    def _blocks(self) -> list[tuple[str, str, str, str]]:
        return _BLOCK.findall(self.text)


def page(path: Path) -> Page:
    return Page(path.relative_to(ROOT).as_posix(), path.read_text())


def run(program: str, name: str, folder: Path) -> str:
    """Run a program as a file of that name in that folder; what it printed."""
    script = folder / name
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        cwd=folder,
        # Other tests use the other cores.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def smaller(program: str, given: str, budget: str) -> str:
    """The same program with another budget in place of the given one."""
    assert given in program, f"there is no {given!r} in the program"
    return program.replace(given, budget)


def timeless(text: str) -> str:
    """What was printed, but for how long it took."""
    return re.sub(r"after \d+\.\d s", "after a while", text)


def _parts_of(name: str, parts: dict[tuple[str, str], str]) -> set[tuple[str, str]]:
    return {key for key in parts if key[0] == name and key[1] != "output"}


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
