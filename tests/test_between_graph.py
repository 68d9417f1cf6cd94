"""The question about between-graph replication: its programs show what they say, or fail."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import LIMIT
from pages import ROOT, page
from programs import EXAMPLES, run

FOLDER = EXAMPLES / "between_graph"
PAGE = page(ROOT / "docs" / "between-graph.md")

# What each must have seen, by a line of what it prints.
SHOWN = {
    "q1": (
        r"a session each; the server knows \['worker:0', 'worker:1'\]",
        r"worker:1 \(process \d+\) reads \[1\. 2\.\]",
        r"worker:0 reads \[11\. 22\.\], version 2: the sessions share the variable",
        r"sum, 33\.0; on the server is \['weights'\]",
        r"private session has weights \[0\. 0\.\], the cluster's stay \[11\. 22\.\]",
        r"another private session in the same process: no \['weights'\]",
        r"worker:1's private session knows nothing of them: no \['weights'\]",
        r"worker:1 takes \['a', 'b'\]",
        r"worker:0 takes what is left: \['c'\]",
        r"opens another: weights are still \[11\. 22\.\]",
    ),
    "q2": (
        *(
            rf"worker:{n} .* has its own session; uninitialized: \['hidden/kernel', "
            for n in (0, 1)
        ),
        r"master:0 \(process \d+\) initialises 4 variables",
        r"live at ps:0 \(hidden/kernel\), ps:1 \(hidden/bias\), ps:0 \(out/kernel\), ps:1 \(out/b",
        *(rf"worker:{n}: uninitialized: \[\]; it reads 58 ones" for n in (0, 1)),
        *(rf"worker:{n} would .* stays: \[1\. 1\. 1\.\]..., version 1, at ps:0" for n in (0, 1)),
    ),
    "q3": (
        r"ps:0 \(process \d+\) gives weights \[3\. 4\.\]",
        *(rf"worker:{n} \(process \d+\) finds weights \[3\. 4\.\], init" for n in range(3)),
        r"shares: another session on the server, in the same process",
        r"does not: a session in another container of that server",
        r"does not: a private session, though in the server's own process",
        r"does not: a session on another server in the same process",
        r"shares: a session on the server's address, whatever its task",
        r"does not: a private session in the worker",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SHOWN)
def test_a_question_is_answered_by_what_was_seen(name: str) -> None:
    said = run("between_graph", name)
    assert said.startswith(f"{name}: ")
    assert "NOT SO" not in said
    assert [line for line in SHOWN[name] if not re.search(line, said)] == []
    assert _numbered(said.partition("\n")[2].strip("\n")) == _numbered(_shown(name))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", ["q4", "q4_elegant"])
def test_the_model_learns_with_any_number_of_workers(name: str, workers: int) -> None:
    said = run(f"between_graph/{name}.py", "--workers", workers)
    (first, last) = re.findall(r"mean return (\d+\.\d) at first, (\d+\.\d) after \d+ steps", said)[
        0
    ]
    assert float(first) < 50 < 100 <= float(last)
    if workers == 2:
        assert re.sub(r"\d+(\.\d+)?", "n", said.strip("\n")) == re.sub(
            r"\d+(\.\d+)?", "n", _shown(name)
        )


def test_initialised_in_the_server_means_in_its_process() -> None:
    said = run("between_graph", "q3")
    process = re.search(r"ps:0 \(process (\d+)\)", said)
    assert process
    found = re.findall(r"worker:\d \(process (\d+)\).* by ps:0, process (\d+)", said)
    assert {by for _, by in found} == {process[1]}
    assert len({own for own, _ in found} - {process[1]}) == 3


@pytest.mark.timeout(120)
def test_what_is_not_so_is_said_and_the_program_fails(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "between_graph")
    text = (folder / "q1.py").read_text()
    assert "weights.assign_add(ADDED)" in text
    (folder / "q1.py").write_text(text.replace("assign_add(ADDED)", "assign_add(2 * ADDED)"))
    done = subprocess.run(
        [sys.executable, folder, "q1"], capture_output=True, text=True, timeout=2 * LIMIT
    )
    assert done.returncode == 1
    assert "NOT SO: worker:0 reads [21. 42.], version 2" in done.stdout
    assert done.stderr == "failed: worker:0\nfailed: q1\n"


def test_a_question_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    done = subprocess.run([sys.executable, FOLDER, "q9"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("no question 'q9'; there are ['q1', ")


@pytest.mark.timeout(120)
def test_no_process_of_a_question_outlives_its_launcher() -> None:
    program = subprocess.Popen(
        [sys.executable, "-u", FOLDER / "q3.py"], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout
    with program.stdout:
        assert "ps:0" in program.stdout.readline()
        program.send_signal(signal.SIGKILL)
        program.wait(LIMIT)
        # Its processes had this pipe, too: it ends with the last of them.
        program.stdout.read()


def test_make_questions_runs_them_all() -> None:
    recipe = "\nquestions: $(VENV)/test.stamp\n\t@$(BIN)/python examples/between_graph $(ARGS)\n"
    assert recipe in (ROOT / "Makefile").read_text()


def test_every_question_is_run_by_a_test() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test*between*.py"))
    names = sorted(path.stem for path in FOLDER.glob("q*.py"))
    assert len(names) >= 3
    assert [name for name in names if f'"{name}"' not in tests] == []


def _shown(name: str) -> str:
    """What the page says that the question's program prints."""
    shown = PAGE.text.split(f"<!-- shown by {name} -->\n```text\n")[1]
    return shown.partition("```")[0].strip("\n")


def _numbered(said: str) -> str:
    """The same with processes numbered in the order of their tasks."""
    tasks = dict(re.findall(r"(\w+:\d) \(process (\d+)\)", said))
    for place, task in enumerate(sorted(tasks)):
        said = re.sub(rf"process {tasks[task]}\b", f"process {place}", said)
    return said
