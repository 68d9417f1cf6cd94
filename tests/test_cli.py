"""The command line: what it says, its exit statuses, and Ctrl-C in the middle."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from clusters import until
from terminal import Terminal

import paceline
from paceline.cli import main

DEMO = "import sys; from paceline.cli import main; main(['demo', *sys.argv[1:]])"
UNREACHABLE = ["--target-return", "501", "--budget-steps", "100000000"]
LIMIT_SECONDS = 30.0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def demo(*args: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--engine", "serial", "--progress", "quiet", *args])


def module(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )


def check_files(folder: Path) -> None:
    """Every file is whole."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in lines] == list(range(1, len(lines) + 1))
    with np.load(folder / "parameters.npz") as parameters:
        assert all(np.isfinite(parameters[name]).all() for name in parameters)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_version_is_that_of_the_package() -> None:
    done = module("--version")
    assert (done.returncode, done.stdout) == (0, f"paceline {paceline.__version__}\n")


def test_help_names_the_commands_and_needs_nothing_of_the_demo() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'matplotlib', 'torch']));"
        "from paceline.cli import main; main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^  demo +Train CartPole-v1", done.stdout, re.MULTILINE)


def test_a_solved_demo_exits_with_0_and_says_in_one_line_how_and_where(here: Path) -> None:
    done = demo("--seed", "7", "--target-return", "1")
    assert done.exit_code == 0
    assert re.fullmatch(
        r"CartPole-v1 solved after \d+\.\d s: mean return \d+\.\d over the last 100 episodes,"
        r" [\d,]+ steps, seed 7; see runs/cartpole/\n",
        done.output,
    )
    check_files(here / "runs/cartpole")


def test_an_unsolved_demo_exits_with_1_and_writes_the_same_files(here: Path) -> None:
    done = demo("--budget-steps", "1", "--name", "short", "--workers", "1")
    assert done.exit_code == 1
    assert re.fullmatch(
        r"CartPole-v1 not solved after \d+\.\d s: mean return \d+\.\d over the last \d\d episodes,"
        r" 1,024 steps, seed \d+; see runs/short/\n",
        done.output,
    )
    check_files(here / "runs/short")


def test_a_second_run_of_one_name_gets_a_folder_of_its_own(here: Path) -> None:
    for _ in range(2):
        demo("--budget-steps", "1", "--seed", "0")
    assert sorted(folder.name for folder in Path("runs").iterdir()) == ["cartpole", "cartpole-2"]


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "..", ".hidden", "-x"])
def test_a_name_that_is_no_folder_is_refused(here: Path, name: str) -> None:
    done = demo(f"--name={name}")
    assert done.exit_code == 2
    assert f"{name!r} is not the name of a folder" in done.output
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("option", ["--seed=-1", "--workers=0", "--budget-steps=0"])
def test_numbers_below_the_least_are_refused(here: Path, option: str) -> None:
    done = demo(option)
    assert done.exit_code == 2
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        (["gymnasium"], "gymnasium"),
        (["matplotlib"], "matplotlib"),
        (["gymnasium", "matplotlib"], "gymnasium and matplotlib"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, absent: list[str], named: str
) -> None:
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    done = demo()
    assert done.exit_code == 1
    assert done.output == f'Error: the demo needs {named}: pip install "paceline[demo]"\n'
    assert list(here.iterdir()) == []


def test_a_place_that_cannot_be_written_is_said_in_one_line(here: Path) -> None:
    Path("runs").write_text("a file")
    done = demo()
    assert done.exit_code == 1
    assert re.fullmatch(r"Error: cannot write to runs/cartpole: .*Not a directory.*\n", done.output)


def test_python_m_runs_processes_and_shows_plain_lines_where_there_is_no_terminal(
    here: Path,
) -> None:
    done = module("demo", "--budget-steps", "4096", "--seed", "1")
    assert done.returncode == 1
    assert re.search(r"(?m)^rollouts-1: 4 batches in .* steps/s .* lag <= [01] ", done.stderr)
    assert done.stdout.startswith("CartPole-v1 not solved after ")
    check_files(here / "runs/cartpole")


def test_ctrl_c_at_the_terminal_ends_every_process_and_keeps_the_files(tmp_path: Path) -> None:
    with Terminal(DEMO, *UNREACHABLE, columns=80, cwd=tmp_path) as terminal:
        terminal.wait_for("batches/s")
        until(lambda: (tmp_path / "runs/cartpole/metrics.jsonl").read_text())
        terminal.press(b"\x03")
        assert terminal.wait() == 130
    assert "CartPole-v1 interrupted after " in " ".join(terminal.lines)
    assert "Traceback" not in terminal.output
    check_files(tmp_path / "runs/cartpole")


def test_an_interrupt_of_the_chief_alone_ends_every_process_and_keeps_the_files(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", "demo", *UNREACHABLE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stderr is not None
        while "batches/s" not in process.stderr.readline():
            """The first lines may say that no batch came yet."""
        until(lambda: (tmp_path / "runs/cartpole/metrics.jsonl").read_text())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out.startswith("CartPole-v1 interrupted after ")
    check_files(tmp_path / "runs/cartpole")
