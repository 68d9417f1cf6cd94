"""Plots of kept results, as PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from peers.plan import KB, MB
from peers.targets import NAMES, targets

REACHED = {"yes": "tab:green", "no": "tab:orange"}


def plot(records: list[dict[str, Any]], folder: Path) -> list[str]:
    """Write all plots; their names."""
    folder.mkdir(exist_ok=True)
    whole = [each for each in records if "failed" not in each]
    made = {
        "peers-targets": aimed(records),
        "peers-publish": published(whole),
        "peers-queue": queued(whole),
    }
    for name, figure in made.items():
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
        plt.close(figure)
    return list(made)


def aimed(records: list[dict[str, Any]]) -> Any:
    """Each ratio, as a part or a multiple of what is aimed at."""
    rows = [row for row in targets(records) if row.found is not None][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.28 * len(rows) + 1))
    for place, row in enumerate(rows):
        sign, bound = row.bound.split()
        found = row.found or 0.0
        part = found / float(bound) if sign == ">=" else float(bound) / found
        axes.barh(place, part, color=REACHED[row.reached])
        axes.text(part, place, f" {found:.3g} ({row.bound})", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_yticks(
        range(len(rows)), [f"{row.work}, beside {row.beside}" for row in rows], fontsize=7
    )
    axes.set_xlabel("ratio / target")
    return figure


def published(records: list[dict[str, Any]]) -> Any:
    """Seconds until one reader, and until eight, have what was published in memory of their own."""
    figure, both = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, readers in zip(both, (1, 8), strict=True):
        lines: dict[str, dict[int, float]] = {}
        for each in records:
            config = each["config"]
            if each["work"] != "publish" or config["mode"] != "own":
                continue
            if config["readers"] == readers:
                name = NAMES[each["peer"]]
                lines.setdefault(name, {})[config["nbytes"]] = each["theirs"]["seconds"]
                if each["peer"] == "nothing":
                    ours = lines.setdefault("paceline", {})
                    ours[config["nbytes"]] = each["ours"]["seconds"]
        for name, points in lines.items():
            style = {"linewidth": 3, "color": "black"} if name == "paceline" else {}
            xs = [nbytes / MB for nbytes in points]
            axes.plot(xs, list(points.values()), marker="o", label=name, **style)
        axes.set(xscale="log", yscale="log", xlabel="MB", title=f"{readers} readers")
    both[0].set_ylabel("seconds until the last has it")
    if both[0].lines:
        both[0].legend(fontsize=7)
    return figure


def queued(records: list[dict[str, Any]]) -> Any:
    """Items per second of two producers, several at once."""
    sizes = [(64, 100), (4 * KB, 32), (256 * KB, 8), (4 * MB, 1)]
    figure, several = plt.subplots(1, 4, figsize=(12, 3.2))
    for axes, (nbytes, at_once) in zip(several, sizes, strict=True):
        rates: dict[str, float] = {}
        wanted = {"nbytes": nbytes, "producers": 2, "at_once": at_once, "kind": "items"}
        for each in records:
            if each["work"] == "queue" and wanted.items() <= each["config"].items():
                rates.setdefault("paceline", each["ours"]["rate"])
                rates[NAMES[each["peer"]]] = each["theirs"]["rate"]
        axes.barh(list(rates), list(rates.values()))
        axes.set(xscale="log", title=f"{nbytes} B, {at_once} at once", xlabel="items/s")
        axes.tick_params(labelsize=6)
    figure.tight_layout()
    return figure
