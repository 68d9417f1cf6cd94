"""Run benchmarks, each figure beside a limit measured in the same run: take the ratios.

python benchmarks/run.py [NAME ...] [--quick] [--large] [--json FILE]
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from measure import Effort, Figure
from rich.console import Console
from rich.table import Table

import paceline

HERE = Path(__file__).parent

BENCHMARKS = ["call", "variable", "rows", "items", "small", "tcp", "collect", "start"]
"""Modules of this folder with a function `measure(effort)`."""

PROGRAMS = {
    "checkpoint": ["--megabytes", "8", "--rounds", "1"],
    "readers": ["--readers", "2", "--megabytes", "8", "--rounds", "1"],
}
"""Programs of this folder that print figures of their own, and what makes them quick."""


def programs() -> list[str]:
    """Those of `PROGRAMS` that are there."""
    return [name for name in PROGRAMS if (HERE / f"{name}.py").exists()]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--quick", is_flag=True, help="Show that they work: the figures mean nothing.")
@click.option("--large", is_flag=True, help="Also what takes about 10 GB of memory.")
@click.option("--json", "to", type=click.Path(path_type=Path), help="Write the figures here too.")
def main(names: tuple[str, ...], quick: bool, large: bool, to: Path | None) -> None:
    """Run the benchmarks NAMES, or all of them."""
    known = BENCHMARKS + programs()
    for name in names:
        if name not in known:
            raise click.BadParameter(f"no benchmark {name!r}; there are {known}")
    chosen = list(names) or known
    effort = Effort(quick, large)
    console = Console()
    figures = list(measured([name for name in chosen if name in BENCHMARKS], effort, console))
    if figures:
        console.print(table(figures))
    printed = {name: output(name, quick) for name in chosen if name in PROGRAMS}
    for name, text in printed.items():
        console.print(f"\n{name}\n{text}", markup=False, highlight=False)
    if to is not None:
        to.write_text(json.dumps(report(figures, printed, quick), indent=2) + "\n")


def measured(names: list[str], effort: Effort, console: Console) -> Iterator[Figure]:
    """The figures of benchmarks, one after the other."""
    for name in names:
        with console.status(f"measuring {name}"):
            yield from importlib.import_module(name).measure(effort)


def table(figures: list[Figure]) -> Table:
    """A report for people."""
    made = Table(caption=f"medians; paceline {paceline.__version__}, {os.cpu_count()} cores")
    for heading in ("what", "figure", "beside", "ratio", "from - to", "wanted"):
        made.add_column(heading, justify="left" if heading in ("what", "beside") else "right")
    for one in figures:
        colour = "green" if one.good else "yellow"
        made.add_row(
            one.what,
            f"{number(one.value)} {one.unit}",
            f"{one.beside}: {number(one.limit)} {one.unit}",
            f"[{colour}]{one.ratio:.2f}[/]",
            f"{one.low:.2f} - {one.high:.2f}",
            one.wanted,
        )
    return made


def number(value: float) -> str:
    """Three digits that count, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def output(name: str, quick: bool) -> str:
    """What a program prints."""
    command = [sys.executable, str(HERE / f"{name}.py"), *(PROGRAMS[name] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise click.ClickException(f"{name}.py ended with status {done.returncode}\n{done.stdout}")
    return done.stdout


def report(figures: list[Figure], printed: dict[str, str], quick: bool) -> dict[str, Any]:
    """All of it as plain data."""
    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "quick": quick,
        "figures": [{**asdict(one), "good": one.good} for one in figures],
        "printed": printed,
    }


if __name__ == "__main__":
    main()
