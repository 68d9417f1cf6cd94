"""The pages in docs: their programs run, their links lead somewhere, no public name is left out."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from items import run as run_of
from pages import ROOT, Page, page, run, smaller, timeless

import paceline
from paceline.core.collection_state import CollectionState
from paceline.core.queue_state import QueueState
from paceline.core.waiting import NOT_YET

DOCS = ROOT / "docs"
PAGES = {file.name: page(file) for file in sorted(DOCS.glob("*.md"))}
# By name: a program may import another one, also of another page.
PROGRAMS = {name: text for found in PAGES.values() for name, text in found.programs.items()}
OUTPUTS = {
    name: text
    for found in PAGES.values()
    for (name, part), text in found.parts.items()
    if part == "output"
}

# Where the program of a page is run with less to do.
BUDGETS = {
    "cheap.py": ("BATCHES = 100", "BATCHES = 10"),
    "strategy.py": ("GENERATIONS = 8, 0.5, 0.5, 12", "GENERATIONS = 8, 0.5, 0.5, 2"),
    "pole.py": ("STEPS, UPDATES, RATE = 256, 50,", "STEPS, UPDATES, RATE = 256, 5,"),
}

# Programs that need what `make test` does not install; they are compiled at least.
FOREIGN = {"jax": "with_jax.py", "ray": "with_ray.py", "stable_baselines3": "with_sb3.py"}

# What has no underscore and is still not for users: other parts of the library call it.
INTERNAL = {
    "Batch": {"layout"},
    "Collection": {"drain", "fail"},
    "Session": {"connection", "handle", "key", "lines"},
    "Variable": {"last_read"},
    "Worker": {"account", "begin", "news", "take_logged", "tell", "turn_to"},
}

each_page = pytest.mark.parametrize("name", PAGES)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_docs_runs_and_prints_what_they_say(name: str, tmp_path: Path) -> None:
    for package, theirs in FOREIGN.items():
        if name == theirs and find_spec(package) is None:
            compile(PROGRAMS[name], name, "exec")
            pytest.skip(f"{package} is not installed")
    for needed in _needed(name) - {name}:
        (tmp_path / needed).write_text(_budgeted(needed))
    printed = run(_budgeted(name), name, tmp_path)
    assert name not in OUTPUTS or timeless(printed) == timeless(OUTPUTS[name])


def test_the_programs_of_the_docs_have_different_names() -> None:
    assert len(PROGRAMS) == sum(len(found.programs) for found in PAGES.values())
    assert OUTPUTS.keys() <= PROGRAMS.keys()
    assert PROGRAMS.keys() >= BUDGETS.keys() | set(FOREIGN.values())


@each_page
def test_every_python_block_of_a_page_belongs_to_a_program(name: str) -> None:
    assert PAGES[name].strays == []


@each_page
def test_the_links_of_a_page_lead_to_pages_and_headings_that_exist(name: str) -> None:
    assert [link for link in PAGES[name].links if not _leads(PAGES[name], link)] == []


@each_page
def test_the_files_tests_and_targets_that_a_page_names_exist(name: str) -> None:
    text = PAGES[name].text
    files = re.findall(r"\b(?:examples|benchmarks|tests)/[\w/]+\.\w+|\b[A-Z]{2,}\.md", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    for file, test in re.findall(r"`(?:tests/)?(test_\w+\.py)::(test_\w+)`", text):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"
    targets = re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert [target for target in targets if f"\n{target}:" not in makefile] == []


def test_the_table_of_failures_has_every_role_at_every_moment() -> None:
    moments = "starting idle mid-assign mid-enqueue waiting checkpointing stopping".split()
    section = PAGES["failures.md"].text.split("\n## At each moment\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if " | " in line][1:]
    pairs = [(who, when) for who, when, *_ in rows]
    assert pairs == [(who, when) for who in ("worker", "chief", "ps") for when in moments]
    for row in rows:
        assert len(row) == 7
        assert all(row)
        assert re.fullmatch(r"(`test_\w+\.py::test_\w+`(, )?)+", row[-1])


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = PAGES["index.md"].text.split("```{toctree}")[1].split("```")[0].split()[1:]
    assert sorted(f"{name}.md" for name in listed) == sorted(PAGES.keys() - {"index.md"})


def test_the_reference_has_every_public_name_and_method() -> None:
    reference = PAGES["api.md"].text
    for name in paceline.__all__:
        thing = getattr(paceline, name)
        if not inspect.isclass(thing):
            assert f"`paceline.{name}`" in reference
            continue
        kind = "exception" if issubclass(thing, Exception) else "class"
        entry = re.search(
            rf"^\.\. auto{kind}:: paceline\.{name}\n((?:   .+\n)*)", reference, re.MULTILINE
        )
        assert entry, f"{name} is not in the reference"
        listed = set(re.findall(r"\w+", entry[1])) - {"members"}
        assert listed == _public(thing), f"the members of {name}"


def test_every_public_name_and_method_has_a_docstring() -> None:
    for name in paceline.__all__:
        thing = getattr(paceline, name)
        if inspect.isclass(thing):
            assert thing.__doc__, name
            without = [m for m in _public(thing) if not inspect.getdoc(getattr(thing, m))]
            assert without == [], name


def test_no_property_has_a_colon_where_the_reference_would_see_a_type() -> None:
    for name in paceline.__all__:
        for member, found in inspect.getmembers(getattr(paceline, name)):
            if isinstance(found, property) and not member.startswith("_"):
                assert ": " not in str(found.__doc__).partition("\n")[0], f"{name}.{member}"


def test_the_table_of_the_pace_is_what_the_state_of_a_collection_says() -> None:
    table = PAGES["concepts.md"].text.split("<!-- pacing, table -->\n")[1].split("\n\n")[0]
    version = 1
    state = CollectionState(QueueState("table", 12, 1 << 20), 4, 2, lambda: version)
    worker = object()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert len(rows) == 7
    for asked, assigned, finished, most_assigned, ahead, formula in rows:
        if asked != "not yet":
            version += 0 if assigned == "-" else int(assigned)
            _take_a_batch(state, worker, version)
        assert (state.finished, state.depth) == (int(finished), int(ahead))
        assert formula == (
            f"({ahead} + 1 + {finished}) * 4 = {(state.depth + 1 + state.finished) * 4}"
        )
        assert int(ahead) == 2 // int(most_assigned)


@pytest.mark.skipif(find_spec("sphinx") is None, reason="needs the extra docs")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_the_docs_build_without_a_warning(tmp_path: Path) -> None:
    options = ["--quiet", "--fail-on-warning", "--keep-going"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    built = "".join(file.read_text() for file in tmp_path.rglob("*.html"))
    assert re.findall(r'(?:src|<link[^>]*href)="https?:[^"]*"', built) == []


def _budgeted(name: str) -> str:
    text = PROGRAMS[name]
    return smaller(text, *BUDGETS[name]) if name in BUDGETS else text


def _needed(name: str) -> set[str]:
    """A program, and those that it imports."""
    imported = re.findall(r"^(?:from|import) (\w+)", PROGRAMS[name], re.MULTILINE)
    others = {f"{module}.py" for module in imported} & PROGRAMS.keys()
    return {name}.union(*map(_needed, others))


def _leads(found: Page, link: str) -> bool:
    if link.startswith("https://"):
        return True
    file, _, anchor = link.partition("#")
    target = PAGES.get(file) if file else found
    return target is not None and (not anchor or anchor in target.anchors)


def _public(thing: type) -> set[str]:
    """The methods and properties that users call."""
    own = {
        name
        for kind in thing.__mro__
        if kind.__module__.startswith("paceline")
        for name, member in vars(kind).items()
        if inspect.isfunction(member) or isinstance(member, property | classmethod)
    }
    return {name for name in own if not name.startswith("_")} - INTERNAL.get(thing.__name__, set())


def _take_a_batch(state: CollectionState, worker: object, version: int) -> None:
    """The trainer asks; what it lacks is made with that version, and handed over."""
    items = state.next(retry=False)
    if items is NOT_YET:
        granted = state.admit(worker, 4)
        assert granted == 4
        state.offer(worker, [run_of(0, 1, 2, 3, stamp=version, producer="worker:0")], 0)
        items = state.next(retry=True)
    assert items is not NOT_YET
    state.queue.receipt(state.queue.hand_out(items[0], "chief"), "chief")
