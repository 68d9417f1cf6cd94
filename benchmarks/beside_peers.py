"""paceline beside what one would use instead, work by work: take the ratios.

python benchmarks/beside_peers.py [--works call ...] [--peers ray ...] [--quick]

Each peer has an environment of its own in `.venvs/peers`, which is made when it is first needed.
Of each work a round of paceline's and one of the peer's are made in turn, with nothing else of ours
running. Results are kept in `benchmarks/results/peers.json`; what was not measured again stays.
`--report` writes the tables and plots of docs/benchmarks.md from there, and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.environments import NotInstalled, interpreter, pinned, versions
from peers.plan import NO_INSTALLATION, PEERS, WORKS
from peers.report import line, targets_table, write
from peers.results import circumstances, keep, kept
from peers.rounds import compared
from rich.console import Console

PINS = Path(__file__).parent / "peers"


def main() -> None:
    """Measure, keep, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="show that it works; unless --peers says so, only with what needs no pip",
    )
    parser.add_argument("--report", action="store_true", help="only write docs/benchmarks.md")
    parser.add_argument("--to", type=Path, help="keep the results in this folder instead")
    options = parser.parse_args()
    folder = {} if options.to is None else {"folder": options.to}
    if options.report:
        write(kept("peers", **folder))
        return
    if options.peers is None:
        options.peers = NO_INSTALLATION if options.quick else list(PEERS)
    figures: list[dict[str, Any]] = []
    for content in measured(options):
        figures = content["figures"]
        if not options.quick or options.to is not None:
            keep("peers", content, **folder)
    Console().print(targets_table(figures))


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All that is known after each work with each peer; each figure is printed when it is there."""
    began = time.monotonic()
    pythons, absent = installed(options.peers)
    peers = {
        name: versions(python, *PEERS[name].versions.split()) for name, python in pythons.items()
    }
    figures = earlier(options)
    for work in options.works:
        for name, python in pythons.items():
            if work in PEERS[name].works.split():
                for record in compared(
                    work, name, python, rounds=options.rounds, quick=options.quick
                ):
                    record["at"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                    record["load"] = circumstances()["load"][0]
                    figures.append(record)
                    print(line(record), flush=True)
                seconds = round(time.monotonic() - began)
                yield {"seconds": seconds, "peers": peers, "absent": absent, "figures": figures}


def installed(names: list[str]) -> tuple[dict[str, str | Path], dict[str, str]]:
    """The interpreters of peers; and why others are left out."""
    pythons: dict[str, str | Path] = {}
    absent = {}
    for name in names:
        pins = PEERS[name].pins
        try:
            pythons[name] = interpreter(PINS / f"{pins}.txt") if pins else sys.executable
        except NotInstalled as e:
            absent[name] = str(e)
            print(f"{name}: could not be installed: {e}", flush=True)
            print(f"  it was asked for {', '.join(pinned(PINS / f'{pins}.txt'))}", flush=True)
    return pythons, absent


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures that are kept and not measured again now."""
    if options.quick or options.to is not None:
        return []
    try:
        content = kept("peers")
    except FileNotFoundError:
        return []
    return [
        each
        for each in content["figures"]
        if each["work"] not in options.works or each["peer"] not in options.peers
    ]


if __name__ == "__main__":
    main()
