"""The demo, killed at random moments and gone on with: is it solved, and does anything go back?

python benchmarks/killed.py [--times 20] [--seed 0] [--who chief]

Each time a new demo saves to a folder of its own, twice a second, and `--who` of it is killed by
SIGKILL, up to half a second after one of its first checkpoints, or after its start. A chief is then
started again with the same folder; a server (`ps:0`) is started again by its launcher. All
checkpoints that are seen meanwhile are checked in the order of their writing: versions grow,
counters do not go back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline import checkpoints

DEMO = "import sys; from paceline.cli import main; main(['demo', *sys.argv[1:]])"
LIMIT = 300.0


@dataclass
class Seen:
    """What the checkpoints in a folder said, one after the other."""

    folder: Path
    saved: int = 0
    back: int = 0
    last: tuple[int, dict[str, int], dict[str, int]] = field(default=(0, {}, {}))

    def look(self) -> None:
        """Look at those that have come."""
        for number, path in checkpoints.found(self.folder):
            if number <= self.last[0]:
                continue
            try:
                found = json.loads((path / "manifest.json").read_text())
            except OSError:
                # It was one too many.
                continue
            versions = {name: each["version"] for name, each in found["variables"].items()}
            counters = {name: each["value"] for name, each in found["counters"].items()}
            _, before, counted = self.last
            self.back += any(versions.get(name, -1) < version for name, version in before.items())
            self.back += any(counters.get(name, -1) < value for name, value in counted.items())
            self.saved, self.last = self.saved + 1, (number, versions, counters)


def demo(folder: Path, seed: int) -> subprocess.Popen[str]:
    """Start one."""
    words = ["--seed", str(seed), "--progress", "quiet", "--checkpoint", str(folder / "saved")]
    return subprocess.Popen(
        [sys.executable, "-c", DEMO, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(program: subprocess.Popen[str], seen: Seen, until: Callable[[], object]) -> bool:
    """Look at its checkpoints until it has ended, or that holds; whether it has ended."""
    deadline = time.monotonic() + LIMIT
    while program.poll() is None and not until():
        if time.monotonic() > deadline:
            program.kill()
        seen.look()
        time.sleep(0.01)
    seen.look()
    return program.poll() is not None


def process(task: str, launcher: int, found: list[int]) -> bool:
    """Put the process of a task of a launcher into `found`, if there is one yet; whether it is."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            if task in Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0"):
                found.append(child)
    return bool(found)


def once(
    folder: Path, seed: int, who: str, saved: int, more: float
) -> tuple[bool, bool, float, Seen, str]:
    """Kill it once; whether it was killed, and solved, the seconds from then on, what was seen."""
    seen = Seen(folder / "saved")
    program = demo(folder, seed)
    wait(program, seen, lambda: seen.saved >= saved)
    until = time.monotonic() + more
    wait(program, seen, lambda: time.monotonic() > until)
    victims = [program.pid] if who == "chief" else []
    killed = not wait(program, seen, lambda: victims or process(who, program.pid, victims))
    began = time.monotonic()
    if killed:
        os.kill(victims[0], signal.SIGKILL)
        if who == "chief":
            program.communicate()
            program = demo(folder, seed)
    wait(program, seen, lambda: False)
    said, _ = program.communicate()
    return killed, program.returncode == 0, time.monotonic() - began, seen, said


def main() -> int:
    """Do it so many times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--who", default="chief", help="chief, or a server such as ps:0")
    parser.add_argument("--checkpoints", type=int, default=7, help="the last to be killed after")
    options = parser.parse_args()
    draws = random.Random(options.seed)
    solved = killed = saved = back = 0
    times = []
    for number in range(options.times):
        saves, more = draws.randint(0, options.checkpoints), draws.uniform(0.0, 0.5)
        # A server that dies before there is anything to bring back ends the launch.
        saves = saves if options.who == "chief" else max(1, saves)
        with tempfile.TemporaryDirectory() as folder:
            was_killed, was_solved, seconds, seen, said = once(
                Path(folder), options.seed + number, options.who, saves, more
            )
        killed, solved = killed + was_killed, solved + was_solved
        saved, back = saved + seen.saved, back + seen.back
        times.append(seconds)
        how = f"{options.who} killed" if was_killed else "ended before"
        what = f"checkpoint {saves}" if saves else "its start"
        print(f"{number:2} {how} {more:.2f} s after {what}, {seconds:.1f} s more", flush=True)
        if not was_solved:
            print(said)
    print(
        f"{options.times} demos, {killed} killed, {solved} solved, at most {max(times):.1f} s more;"
        f" {saved} checkpoints seen, {back} with a version or a counter that went back"
    )
    return 0 if solved == options.times and not back else 1


if __name__ == "__main__":
    sys.exit(main())
