"""The benchmarks run and report; how fast anything is, is not asserted."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "run.py"
SOAK = ROOT / "benchmarks" / "soak.py"


def run(*arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("call", 4),
        ("variable", 4),
        ("rows", 4),
        ("items", 5),
        ("small", 1),
        pytest.param("tcp", 5, marks=pytest.mark.slow),
        pytest.param("collect", 2, marks=pytest.mark.slow),
        pytest.param("start", 1, marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_shows_each_figure_beside_its_limit(
    name: str, figures: int, tmp_path: Path
) -> None:
    written = tmp_path / "figures.json"
    shown = run(name, "--quick", "--json", str(written))
    report: dict[str, Any] = json.loads(written.read_text())
    assert report["quick"] is True
    assert len(report["figures"]) == figures
    for figure in report["figures"]:
        assert figure["low"] <= figure["ratio"] <= figure["high"]
        assert figure["what"].split()[0] in shown


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_checkpoint_is_measured_and_comes_back() -> None:
    shown = run("checkpoint", "--quick")
    assert re.search(r"^pause +[\d.]+ ms, at most", shown, re.MULTILINE)
    assert "every bit is equal" in shown


def test_an_unknown_benchmark_is_refused_with_those_there_are() -> None:
    assert "no benchmark 'speed'; there are ['call', 'variable'," in run("speed", status=2)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_soak_shows_what_each_process_has_and_fails_when_it_grows() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.1", "--slack", "-500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1
    for name in ("chief", "ps:0", "ps:1", "actor:0", "actor:1", "caller:0"):
        assert re.search(rf"^{name} +[\d.]+ -> [\d.]+ +\d+ -> \d+ ", done.stdout, re.MULTILINE)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert sum(": memory " in line for line in failed) == 6
    assert all(" -> " in line for line in failed), failed


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_what_more_workers_cost() -> None:
    words = "--workers 1 2 --seconds 0.2 --wait 0.005 --megabytes 8".split()
    done = subprocess.run(
        [sys.executable, str(SOAK.with_name("scaling.py")), *words],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^│ +(\d+) │ +[\d,]+ │ +\d+ % │ +\d+ │$", done.stdout, re.MULTILINE)
    assert rows == ["1", "2"]
    assert re.search(r"^-?\d+ MB for each worker more", done.stdout, re.MULTILINE)


MAIN_JOB = ROOT / "benchmarks" / "main_job"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("job", ["sb3", "torchrl", "sample_factory"])
@pytest.mark.parametrize("measure", ["rate", "collect"])
def test_the_main_job_says_how_fast_it_trains_and_collects(job: str, measure: str) -> None:
    words = f"--job {job} --measure {measure} --warm 0.5 --window 0.5".split()
    done = subprocess.run(
        [sys.executable, str(MAIN_JOB / "paceline_ppo.py"), *words],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    said = json.loads(line)
    assert said["measure"] == measure
    assert said["steps"] > 0
    assert said["rate"] == pytest.approx(said["steps"] / said["window"])


def test_an_unknown_peer_is_refused_with_those_there_are() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "main_job.py"), "stable"],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no peer 'stable'; there are ['sb3', 'sb3_subproc'," in done.stderr
