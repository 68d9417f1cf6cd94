"""The main job beside peers: steps per second, and the time until an environment is solved.

python benchmarks/main_job.py [PEER ...] [--environment LunarLander-v3] [--seeds 5] [--quick]

Each peer is in an environment of its own and has hyper-parameters of its own. Steps per second are
those of paceline with the same ones, in turns with the peer's. To solve it, each has its own.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
JOB = HERE / "main_job"
sys.path[:0] = [str(HERE / "peers"), str(JOB)]

from environments import NotInstalled, interpreter, pinned  # noqa: E402
from programs import Failed, Program  # noqa: E402
from results import keep  # noqa: E402
from settings import GOALS, JOBS  # noqa: E402

OURS = "paceline"
PEERS = {
    "sb3": "sb3",
    "sb3_subproc": "sb3",
    "rllib_ppo": "rllib",
    "rllib_impala": "rllib",
    "torchrl": "torchrl_ppo",
    "sample_factory": "sample_factory_appo",
    "tensorflow": "tensorflow_graphs",
}
"""The program of each; `PINS` has its file of pins, where that is called otherwise."""

PINS = {"torchrl_ppo": "torchrl", "sample_factory_appo": "sample_factory"}

TARGETS = {
    "sb3": 1.6, "sb3_subproc": 4.0, "rllib_impala": 10.0, "torchrl": 5.0, "sample_factory": 4.0,
}  # fmt: skip
"""How many times as many steps per second are wanted; more than the peer, where it is not said."""

COLLECTING = {"sb3": 3.0}
"""The same, of collecting alone."""

LIMITS = {"CartPole-v1": 300.0, "LunarLander-v3": 900.0}
"""Seconds that an environment may take until it is solved."""


@click.command()
@click.argument("peers", nargs=-1)
@click.option("--environment", type=click.Choice(list(GOALS)), default="CartPole-v1")
@click.option("--seeds", default=5, help="How often each solves it.")
@click.option("--rounds", default=5, help="How often each is timed.")
@click.option("--window", default=10.0, help="Seconds that are timed, after half as many.")
@click.option("--limit", type=float, help="Seconds that an environment may take to be solved.")
@click.option("--measure", type=click.Choice(["all", "rate", "collect", "solve"]), default="all")
@click.option("--quick", is_flag=True, help="Show that it works: the figures mean nothing.")
@click.option("--here", is_flag=True, help="Use this Python instead of paceline's environment.")
def main(peers: tuple[str, ...], environment: str, quick: bool, **options: Any) -> None:
    """Compare with PEERS, or with all of them."""
    for name in peers:
        if name not in (*PEERS, OURS):
            raise click.BadParameter(f"no peer {name!r}; there are {[*PEERS, OURS]}")
    if quick:
        options |= {"seeds": min(1, options["seeds"]), "rounds": 1, "window": 1.0}
    chosen = [name for name in peers or PEERS if name in (*JOBS[environment], OURS)]
    job = Comparison(environment, options)
    for name in chosen:
        job.compare(name)
        if not quick:
            keep(f"main_job_{environment}", job.report())
    job.solve(OURS)
    if not quick:
        keep(f"main_job_{environment}", job.report())
    Console().print(table(job.report()))


class Comparison:
    """What was measured of each peer, in one environment."""

    def __init__(self, environment: str, options: dict[str, Any]) -> None:
        self._environment = environment
        self._options = options
        self._limit = options["limit"] or LIMITS[environment]
        self._measured: dict[str, dict[str, Any]] = {}
        self._versions: dict[str, list[str]] = {}
        self._pythons: dict[str, str] = {}

    def report(self) -> dict[str, Any]:
        """All of it as plain data; seconds are `null` where it was not solved within the limit."""
        return {
            "environment": self._environment,
            "goal": GOALS[self._environment],
            "limit": self._limit,
            "versions": self._versions,
            "peers": self._measured,
        }

    def compare(self, name: str) -> None:
        """Steps per second of a peer and of paceline in turns; then how soon it solves."""
        try:
            self._python(name)
        except NotInstalled as e:
            self._note(name, "failed", f"could not be installed: {e}")
            return
        try:
            for measure in ("rate", "collect"):
                if self._wanted(measure) and (measure == "rate" or name in COLLECTING):
                    self._turns(name, measure)
        except Failed as e:
            self._note(name, "failed", str(e))
            return
        self.solve(name)

    def solve(self, name: str) -> None:
        """Seconds from the start of its process until it has solved the environment, by seed."""
        if not self._wanted("solve"):
            return
        for seed in range(self._options["seeds"]):
            try:
                said = self._run(name, name, "solve", seed, self._limit)
            except Failed:
                said = {"seconds": None, "steps": None}
            self._measured.setdefault(name, {}).setdefault("solve", []).append(said)
            click.echo(f"{name} seed {seed}: {said}", err=True)

    def _turns(self, name: str, measure: str) -> None:
        pairs = []
        for number in range(self._options["rounds"]):
            both = [name, OURS] if number % 2 else [OURS, name]
            rates = {who: self._run(who, name, measure, number, 240.0) for who in both}
            pairs.append({"theirs": rates[name]["rate"], "ours": rates[OURS]["rate"]})
            click.echo(f"{name} {measure}: {pairs[-1]}", err=True)
        self._note(name, measure, pairs)

    def _note(self, name: str, what: str, value: Any) -> None:
        self._measured.setdefault(name, {})[what] = value
        if what == "failed":
            click.echo(f"{name}: {value}", err=True)

    def _wanted(self, measure: str) -> bool:
        return self._options["measure"] in ("all", measure)

    def _run(self, name: str, job: str, measure: str, seed: int, limit: float) -> dict[str, Any]:
        window = self._options["window"]
        words = {
            "job": job, "environment": self._environment, "measure": measure, "seed": seed,
            "warm": window / 2, "window": window, "began": time.monotonic(),
        }  # fmt: skip
        given = [word for key, value in words.items() for word in (f"--{key}", str(value))]
        extra = {"PYTHONPATH": str(HERE.parent / "src") if name == OURS else ""}
        program = JOB / f"{PEERS.get(name, 'paceline_ppo')}.py"
        with Program(self._python(name), program, *given, limit=limit, extra=extra) as running:
            return running.answer()

    def _python(self, name: str) -> str:
        if name not in self._pythons:
            program = PEERS.get(name, "paceline_ppo")
            pins = JOB / f"{PINS.get(program, program)}.txt"
            here = self._options["here"] and name == OURS
            self._pythons[name] = sys.executable if here else str(interpreter(pins))
            self._versions[name] = pinned(pins)
        return self._pythons[name]


def table(report: dict[str, Any]) -> Table:
    """A report for people."""
    made = Table(title=f"{report['environment']}, solved at a mean return of {report['goal']:g}")
    for heading in ("peer", "steps/s", "paceline's", "ratio", "wanted", "solved after", "solved"):
        made.add_column(heading, justify="left" if heading == "peer" else "right")
    for name, measured in report["peers"].items():
        for measure, targets in (("rate", TARGETS), ("collect", COLLECTING)):
            if measure == "rate" or measure in measured:
                made.add_row(
                    name if measure == "rate" else f"{name}, collecting alone",
                    *rates(measured.get(measure), targets.get(name, 1.0)),
                    *(solving(measured.get("solve", [])) if measure == "rate" else ("", "")),
                )
        if "failed" in measured:
            made.add_row(f"{name}: {measured['failed']}"[:60])
    return made


def rates(pairs: list[dict[str, float]] | None, wanted: float) -> tuple[str, str, str, str]:
    """Medians, and the median ratio, beside what is wanted."""
    if not pairs:
        return ("", "", "", "")
    ratio = statistics.median(pair["ours"] / pair["theirs"] for pair in pairs)
    theirs, ours = (statistics.median(p[who] for p in pairs) for who in ("theirs", "ours"))
    colour = "green" if ratio >= wanted else "yellow"
    return (f"{theirs:,.0f}", f"{ours:,.0f}", f"[{colour}]{ratio:.2f}[/]", f">= {wanted:g}")


def solving(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """The median of the seconds, an unsolved run counting as the longest; and how many solved."""
    if not runs:
        return ("", "")
    seconds = [float("inf") if run["seconds"] is None else run["seconds"] for run in runs]
    solved = sum(run["seconds"] is not None for run in runs)
    return (f"{statistics.median(seconds):.1f} s", f"{solved} of {len(runs)}")


if __name__ == "__main__":
    main()
