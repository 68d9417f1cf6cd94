"""Rounds of paceline and of a peer in alternation, and what comes of them."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.plan import LIKE, Config, configs
from peers.programs import Failed, Program

HERE = Path(__file__).parent
LONG = 8.0
"""Seconds of a peer's round from which on it is made once only, and nothing larger is tried."""
TIMEOUT = 60.0
"""Seconds that one round may take; the first, which prepares, four times as many."""
LIMIT = 900.0
"""Seconds that the programs of one work may take altogether."""


def program(name: str, work: str, python: str | Path) -> Program:
    """A peer's program for a work."""
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]
    extra = {"PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore"}
    return Program(python, HERE / f"with_{name}.py", work, limit=LIMIT, extra=extra)


def compared(
    work: str, name: str, python: str | Path, *, rounds: int, quick: bool
) -> Iterator[dict[str, Any]]:
    """A record for each size of a work; one with `failed` where the peer could not do it."""
    wanted = configs(work, name, quick=quick)
    with program("paceline", work, sys.executable) as ours:
        ours.answer()
        with program(name, LIKE.get(work, work), python) as theirs:
            try:
                theirs.answer(TIMEOUT * 2)
                if work == "memory":
                    yield record(work, name, {}, [(resident(ours), resident(theirs))])
                    return
                for config in wanted:
                    pairs = pairs_of(config, ours, theirs, rounds)
                    yield record(work, name, config, pairs)
                    if spent(pairs) > LONG and config is not wanted[-1]:
                        yield failure(work, name, config, "nothing larger: it would take too long")
                        return
            except Failed as e:
                # Ours is not to fail.
                if e.args[0].startswith("with_paceline.py"):
                    raise
                yield failure(work, name, config if work != "memory" else {}, str(e))


def pairs_of(config: Config, ours: Program, theirs: Program, rounds: int) -> list[Any]:
    """What both say, in turn, after a round that does not count; whoever is first changes."""
    ours.ask(config, 4 * TIMEOUT)
    theirs.ask(config, 4 * TIMEOUT)
    pairs = []
    for number in range(rounds):
        began = time.perf_counter()
        if number % 2:
            value = theirs.ask(config, TIMEOUT)
            pairs.append((ours.ask(config, TIMEOUT), value))
        else:
            value = ours.ask(config, TIMEOUT)
            pairs.append((value, theirs.ask(config, TIMEOUT)))
        if time.perf_counter() - began > LONG:
            break
    if config.get("mode") == "view" and config["readers"] > 1:
        for program, value in zip((ours, theirs), pairs[-1], strict=True):
            value["resident"] = sum(program.memory().values())
    return pairs


def spent(pairs: list[Any]) -> float:
    """Seconds of the peer's shortest round."""
    return float(min(value.get("seconds", 0.0) for _, value in pairs))


def resident(program: Program) -> dict[str, float]:
    """Memory of all processes of a program, what is shared counted in parts."""
    found = sorted(program.memory().values())
    return {"bytes": float(sum(found)), "processes": float(len(found))}


def record(work: str, name: str, config: Config, pairs: list[Any]) -> dict[str, Any]:
    """Medians of both, and of the ratios: above 1 paceline is the better one."""
    keys = [key for key in pairs[0][0] if key in pairs[0][1]]
    return {
        "work": work,
        "peer": name,
        "config": {key: value for key, value in config.items() if key != "seconds"},
        "rounds": len(pairs),
        "ours": middle([ours for ours, _ in pairs]),
        "theirs": middle([theirs for _, theirs in pairs]),
        "ratio": {key: ratio(key, pairs) for key in keys if key != "processes"},
    }


def middle(values: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: statistics.median(one[key] for one in values if key in one) for key in keys}


def ratio(key: str, pairs: list[Any]) -> dict[str, float]:
    """How many times better paceline is: the median of the rounds, the smallest and the largest."""
    found = [
        ours[key] / theirs[key] if key == "rate" else theirs[key] / ours[key]
        for ours, theirs in pairs
    ]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def failure(work: str, name: str, config: Config, why: str) -> dict[str, Any]:
    """What a peer could not do."""
    return {"work": work, "peer": name, "config": config, "failed": why}
