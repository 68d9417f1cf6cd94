"""docs/tf1.md: whatever it names of paceline exists, and can be called so."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import click
import pytest
from pages import ROOT, page

import paceline
from paceline.cli import main
from paceline.resources import Resources

PAGE = page(ROOT / "docs" / "tf1.md")

# What a name at the front of an expression stands for.
ROOTS: dict[str, Any] = {
    "paceline": paceline,
    "session": paceline.Session,
    "cluster": paceline.Cluster,
    "server": paceline.Server,
    "spec": paceline.ClusterSpec,
    "variable": paceline.Variable,
    "queue": paceline.Queue,
    "batch": paceline.Batch,
    "accumulator": paceline.Accumulator,
    "mean": paceline.Mean,
    "counter": paceline.Counter,
    "barrier": paceline.Barrier,
    "reader": paceline.Reader,
    "piece": paceline.Piece,
    "replica": paceline.Replica,
    "sv": paceline.Supervisor,
    "worker": paceline.Worker,
}
# Instance attributes that the class does not have, and modules of others.
SET_WHEN_MADE = {"server.target", "sv.restored"}
FOREIGN = {"torch", "optax", "concurrent", "numpy", "glob"}
# Words of the second column that are not Python, or no call.
WORDS = {"chief", "master", "timeout=", "unix:/path", "host:port", "..."}


def rows() -> Iterator[tuple[str, list[str]]]:
    """The cells of each row of the tables, under the heading that they stand under."""
    heading = ""
    for line in PAGE.text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|") and not line.startswith(("|--", "| --", "| TensorFlow", "| |")):
            yield heading, [cell.strip() for cell in line.strip("|").split("|")]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


COUNTERPARTS = sorted(
    {span for heading, cells in rows() if len(cells) == 3 or heading == "Errors"
     for span in spans(cells[1])}
)  # fmt: skip


@pytest.mark.parametrize("span", COUNTERPARTS)
def test_a_counterpart_exists_and_can_be_called_so(span: str) -> None:
    if span.startswith("paceline "):
        _command(span)
    elif span not in WORDS:
        assert _wrong(ast.parse(span, mode="eval")) == []


def test_what_is_said_of_ours_in_passing_exists_too() -> None:
    notes = [cells[2] for _, cells in rows() if len(cells) == 3]
    text = [line for line in PAGE.prose.splitlines() if not line.startswith("|")]
    ours = re.compile(rf"(?:{'|'.join(ROOTS)})\.\w")
    found = [span for cell in [*notes, *text] for span in spans(cell) if ours.match(span)]
    assert len(found) >= 5
    assert [_wrong(ast.parse(span, mode="eval")) for span in found] == [[]] * len(found)


def test_every_row_has_a_counterpart_or_says_that_there_is_none() -> None:
    found = list(rows())
    assert len(found) > 100
    assert {len(cells) for heading, cells in found if heading == "Errors"} == {2}
    without = [cells for _, cells in found if not spans(cells[1]) and len(cells) == 3]
    said = ("none", "the same", "the jobs", "a line")
    assert [cells for cells in without if not cells[1].startswith(said)] == []


def test_every_public_name_that_users_hold_is_somebodys_counterpart() -> None:
    text = PAGE.text
    for name in ("ClusterSpec", "Server", "Session", "Cluster"):
        assert f"paceline.{name}" in text
    made = [name for name in vars(Resources) if not name.startswith("_")]
    assert len(made) >= 6
    assert [name for name in made if f"session.{name}(" not in text] == []
    errors = [n for n in paceline.__all__ if inspect.isclass(getattr(paceline, n))
              and issubclass(getattr(paceline, n), paceline.PacelineError)]  # fmt: skip
    foreign = {"PacelineError", "TooStale", "FunctionError", "WouldBlock"}
    assert [name for name in errors if name not in text and name not in foreign] == []


@pytest.mark.parametrize(
    "span",
    [
        "session.variabel('policy')",
        "session.variable('policy', value, overwritten=True)",
        "session.should_stop('now')",
        "paceline.Sessions()",
        "Sessions()",
        "sess.run()",
    ],
)
def test_a_name_that_does_not_exist_is_found(span: str) -> None:
    assert _wrong(ast.parse(span, mode="eval"))


def _wrong(tree: ast.AST) -> list[str]:
    """What of an expression does not exist, or cannot be called so."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found += _missing(node)
        elif isinstance(node, ast.Call):
            found += _miscalled(node)
        elif isinstance(node, ast.Name) and node.id[:1].isupper():
            found += [] if node.id in paceline.__all__ else [f"no {node.id}"]
    return found


def _missing(node: ast.Attribute) -> list[str]:
    text = ast.unparse(node)
    root = text.partition(".")[0]
    if root in FOREIGN or text in SET_WHEN_MADE:
        return []
    return [] if _resolved(node) is not None else [f"no {text}"]


def _miscalled(node: ast.Call) -> list[str]:
    made = _resolved(node.func)
    if made is None or ast.unparse(node.func) in SET_WHEN_MADE:
        return []
    method = inspect.isfunction(made) and "." in made.__qualname__
    given = [None] * (len(node.args) + method)
    try:
        inspect.signature(made).bind(*given, **{str(word.arg): None for word in node.keywords})
    except TypeError as e:
        return [f"{ast.unparse(node)}: {e}"]
    return []


def _resolved(node: ast.AST) -> Any:
    """What an expression of names and dots stands for; nothing if it does not exist."""
    if isinstance(node, ast.Name):
        return ROOTS.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolved(node.value)
        fields = getattr(owner, "__dataclass_fields__", {})
        return getattr(owner, node.attr, fields.get(node.attr))
    if isinstance(node, ast.Call):
        owner = _resolved(node.func)
        # A session's method is called as what it gives.
        return owner if inspect.isclass(owner) else ROOTS.get(getattr(owner, "__name__", ""))
    return None


def _command(span: str) -> None:
    command, *words = span.split()[1:]
    found: click.Command = main.commands[command]
    options = {name for option in found.params for name in option.opts}
    assert [word for word in words if word.startswith("--") and word not in options] == []
