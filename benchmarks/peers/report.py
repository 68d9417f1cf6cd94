"""What is reported of kept results: targets, all ratios, where a peer is better, plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers.plan import KB, MB, PEERS
from peers.targets import NAMES, Target, targets
from rich.table import Table

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- peers: written by benchmarks/beside_peers.py --report -->", "<!-- /peers -->"


def line(record: dict[str, Any]) -> str:
    """One figure, for who waits."""
    head = f"{record['work']:8} {NAMES[record['peer']]:22} {size_of(record):32}"
    if "failed" in record:
        return f"{head} {record['failed']}"
    ratios = ", ".join(f"{key} {each['median']:.3g}" for key, each in record["ratio"].items())
    ours = ", ".join(f"{key} {each:.3g}" for key, each in record["ours"].items())
    return f"{head} {ratios}  (paceline: {ours})"


def size_of(record: dict[str, Any]) -> str:
    """What was measured of the work, in words."""
    config = record["config"]
    words = [amount(config["nbytes"])] if "nbytes" in config else []
    if "producers" in config:
        words += [f"{config['producers']} producers", f"{config['at_once']} at once"]
        words += ["stacked"] if config["kind"] == "stacked" else []
    if "readers" in config:
        words += [f"{config['readers']} readers", config["mode"]]
    if "cores" in config and config["cores"] != "free":
        words.append({"one": "on one core", "two": "across cores"}[config["cores"]])
    return ", ".join(words)


def amount(nbytes: int) -> str:
    """In words."""
    for unit, name in ((1024 * MB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def number(value: float | None) -> str:
    """Two digits that count, and no exponent."""
    return "" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


HEADINGS = ("work", "beside", "ratio", "from - to", "target", "reached")


def cells(row: Target) -> tuple[str, ...]:
    """A row of the table of targets."""
    span = "" if row.low is None else f"{number(row.low)} - {number(row.high)}"
    return row.work, row.beside, number(row.found), span, row.bound, row.reached


def targets_table(records: list[dict[str, Any]]) -> Table:
    """For people at a terminal: what was measured of them."""
    made = Table(caption="above 1, paceline is the better one; medians of rounds in alternation")
    for heading in HEADINGS:
        made.add_column(heading)
    colours = {"yes": "green", "no": "yellow"}
    for row in [each for each in targets(records) if each.found is not None]:
        *plain, reached = cells(row)
        made.add_row(*plain, f"[{colours.get(reached, 'default')}]{reached}[/]")
    return made


def write(content: dict[str, Any], docs: Path = DOCS) -> None:
    """Put tables between the marks of benchmarks.md, and plots beside it."""
    from peers.plots import plot  # Not everybody who measures has matplotlib.

    page = docs / "benchmarks.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    images = plot(content["figures"], docs / "benchmarks")
    section = "\n".join(sections(content, images))
    page.write_text(f"{before}{BEGIN}\n{section}\n{END}{after}")


def sections(content: dict[str, Any], images: list[str]) -> Iterator[str]:
    """The text of the report."""
    where = f"{content['cpu']}, {content['cores']} cores, {content['memory_gb']} GB"
    yield (
        f"\nMeasured on {content['date'][:10]} on {where}, Linux {content['kernel']}, in"
        f" {content['seconds'] // 60} minutes, at a load of"
        f" {min(each['load'] for each in content['figures']):.1f} to"
        f" {max(each['load'] for each in content['figures']):.1f}, with paceline"
        f" {content['paceline']}, Python {content['python']}, NumPy {content['numpy']}:\n"
    )
    for name, versions in content["peers"].items():
        known = ", ".join(f"{key} {value}" for key, value in versions.items() if key != "python")
        if known:
            yield f"- {NAMES[name]}: {known}, Python {versions['python']}"
    for name, why in content["absent"].items():
        yield f"- {NAMES[name]} could not be installed: {why}"
    yield ""
    yield from markdown(HEADINGS, [cells(row) for row in targets(content["figures"])])
    for image in images:
        yield f"\n![{image}](benchmarks/{image}.png)"
    yield "\n### Where a peer is better\n"
    yield from markdown(
        ("work", "size", "beside", "ratio", "from - to"), list(better(content["figures"]))
    )
    yield "\n### All ratios\n"
    yield from markdown(
        ("work", "size", *(NAMES[name] for name in PEERS)), list(matrix(content["figures"]))
    )
    failed = [each for each in content["figures"] if "failed" in each]
    if failed:
        yield "\nNot measured:\n"
    for each in failed:
        size = f" from {size_of(each)} on" if size_of(each) else ""
        yield f"- {NAMES[each['peer']]}, {each['work']}{size}: {each['failed']}"


def markdown(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A table."""
    yield "| " + " | ".join(headings) + " |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def main_ratio(record: dict[str, Any]) -> dict[str, float]:
    """The ratio of the whole work."""
    ratios = record["ratio"]
    found: dict[str, float] = next(
        ratios[key] for key in ("seconds", "rate", "bytes") if key in ratios
    )
    return found


def better(records: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Figures below 1, but for those beside limits."""
    for each in records:
        if "failed" not in each and each["peer"] != "nothing":
            ratio = main_ratio(each)
            if ratio["median"] < 1:
                span = f"{number(ratio['low'])} - {number(ratio['high'])}"
                beside, median = NAMES[each["peer"]], number(ratio["median"])
                yield each["work"], size_of(each), beside, median, span


def matrix(records: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each size of a work, a column for each peer."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in records:
        if "failed" not in each:
            row = rows.setdefault((each["work"], size_of(each)), {})
            row[each["peer"]] = number(main_ratio(each)["median"])
    for key, row in rows.items():
        yield *key, *(row.get(name, "") for name in PEERS)
