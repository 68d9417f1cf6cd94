"""The comparison with peers runs and keeps its results; how fast anyone is, is not asserted."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import (  # type: ignore[import-not-found]  # noqa: E402
    environments,
    plan,
    programs,
    report,
    results,
    rounds,
    targets,
)

TALKS = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], start_new_session=True,
                         stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
for line in sys.stdin:
    asked = json.loads(line)
    print("noise", flush=True)
    if asked.get("fail"):
        sys.exit("could not " + asked["fail"])
    print(json.dumps({"got": asked, "child": child.pid}), flush=True)
os._exit(0)
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "program.py"
    file.write_text(text)
    return file


def test_a_program_answers_in_lines_of_json_and_leaves_no_process(tmp_path: Path) -> None:
    with programs.Program(sys.executable, script(tmp_path, TALKS), limit=30) as program:
        said = program.ask({"work": 1})
        assert said["got"] == {"work": 1}
        assert said["child"] in program.processes()
        assert all(nbytes > 0 for nbytes in program.memory().values())
    assert program.processes() == []


def test_a_program_that_ends_early_fails_with_its_last_words(tmp_path: Path) -> None:
    with programs.Program(sys.executable, script(tmp_path, TALKS), limit=30) as program:
        with pytest.raises(
            programs.Failed, match=r"^program\.py: ended with status 1: .*could not sing$"
        ):
            program.ask({"fail": "sing"})


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with programs.Program(sys.executable, script(tmp_path, "input()"), limit=0.2) as program:
        with pytest.raises(
            programs.Failed, match=r"^program\.py: no answer, \d+ s after its start$"
        ):
            program.answer()


def test_pins_that_are_not_exact_are_refused(tmp_path: Path) -> None:
    pins = tmp_path / "loose.txt"
    pins.write_text("numpy>=2\n")
    with pytest.raises(
        ValueError, match=r"^loose\.txt: 'numpy>=2' is no pin; wanted is name==version$"
    ):
        environments.interpreter(pins, tmp_path)


def test_all_pins_of_peers_are_exact_and_torch_is_one_version() -> None:
    files = sorted((ROOT / "benchmarks").rglob("peers/*.txt"))
    assert files
    for file in files:
        for line in environments.pinned(file):
            assert environments.PIN.fullmatch(line), (file, line)
            if re.match("torch==", line):
                assert line == "torch==2.13.0", file


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_environment_is_made_once_and_again_when_its_pins_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = tmp_path / "nothing.txt"
    pins.write_text("# nothing\n")
    python = environments.interpreter(pins, tmp_path)
    assert environments.versions(python, "numpy").keys() == {"python"}
    assert environments.interpreter(pins, tmp_path) == python
    assert capsys.readouterr().err.count("installing") == 1
    pins.write_text("# nothing else\n")
    environments.interpreter(pins, tmp_path)
    assert capsys.readouterr().err.count("installing") == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_cannot_be_installed_says_so_in_pips_words(tmp_path: Path) -> None:
    pins = tmp_path / "absent.txt"
    pins.write_text("numpy==0.0.0.1\n")
    with pytest.raises(environments.NotInstalled, match=r"^ERROR: .*numpy==0\.0\.0\.1"):
        environments.interpreter(pins, tmp_path)


def test_results_say_where_when_and_how(tmp_path: Path) -> None:
    results.keep("one", {"figures": [1, 2]}, tmp_path)
    said: dict[str, Any] = json.loads((tmp_path / "one.json").read_text())
    assert said == results.kept("one", tmp_path)
    assert said["figures"] == [1, 2]
    assert {"date", "command", "cpu", "cores", "paceline", "python", "load"} <= said.keys()


def measured(
    work: str, peer: str, ours: float, theirs: float, key: str = "seconds", **config: Any
) -> dict[str, Any]:
    pairs = [({key: ours * factor}, {key: theirs}) for factor in (1.0, 0.5, 2.0)]
    made: dict[str, Any] = {**rounds.record(work, peer, config, pairs), "load": 0.5}
    return made


def test_a_ratio_above_one_says_that_paceline_is_better() -> None:
    faster = measured("call", "ray", 1.0, 30.0, cores="free")
    assert faster["ratio"]["seconds"] == {"median": 30.0, "low": 15.0, "high": 60.0}
    more = measured("queue", "ray", 30.0, 1.0, "rate", nbytes=64)
    assert more["ratio"]["rate"] == {"median": 30.0, "low": 15.0, "high": 60.0}


def test_a_target_is_reached_at_its_bound_and_not_below() -> None:
    for theirs, reached in ((20.0, "yes"), (19.9, "no")):
        found = targets.targets([measured("call", "ray", 1.0, theirs, cores="free")])
        said = [row for row in found if row.work == "scalar read" and row.beside == "Ray"]
        assert [row.reached for row in said] == [reached]
    assert {row.reached for row in found if row.beside != "Ray"} == {"not measured"}


def test_every_figure_that_a_target_is_about_is_measured() -> None:
    """Each work with each peer in each size, as the plan has it, leaves no target unmeasured."""
    records = []
    for name, peer in plan.PEERS.items():
        for work in peer.works.split():
            for config in plan.configs(work, name, quick=False):
                keys = ("seconds", "publish", "read", "rate", "bytes", "resident")
                value = dict.fromkeys(keys, 1.0)
                records.append(rounds.record(work, name, config, [(value, value)]))
    unmeasured = [row for row in targets.targets(records) if row.found is None]
    assert unmeasured == []


def test_the_report_goes_between_its_marks_and_names_where_a_peer_is_better(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    records = [
        measured("call", "ray", 1.0, 30.0, cores="free"),
        measured("queue", "zmq", 1.0, 4.0, "rate", nbytes=64, producers=2, at_once=1, kind="items"),
        rounds.failure("start", "torch_rpc", {}, "it would not"),
    ]
    records[-1]["load"] = 1.0
    content = {
        **results.circumstances(),
        "seconds": 61,
        "peers": {"ray": {"python": "3.11.0", "ray": "2.60.0"}},
        "absent": {"reverb": "no wheel"},
        "figures": records,
    }
    for _ in range(2):
        report.write(content, tmp_path)
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert "| scalar read | Ray | 30 | 15 - 60 | >= 20 | yes |" in text
        better = text.partition("### Where a peer is better")[2].partition("###")[0]
        assert "| queue | 64 B, 2 producers, 1 at once | ZeroMQ | 0.25 | 0.12 - 0.5 |" in better
        assert "Ray" not in better
        assert "Reverb could not be installed: no wheel" in text
        assert "- torch.distributed.rpc, start: it would not" in text
    assert len(list((tmp_path / "benchmarks").glob("*.png"))) == 3


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_peers_that_need_no_installation_are_measured_and_kept(tmp_path: Path) -> None:
    program = ROOT / "benchmarks" / "beside_peers.py"
    done = subprocess.run(
        [sys.executable, str(program), "--quick", "--rounds", "1", "--to", str(tmp_path)],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = results.kept("peers", tmp_path)["figures"]
    assert {each["peer"] for each in figures} == {"nothing", "multiprocessing"}
    assert {each["work"] for each in figures} == set(plan.WORKS)
    assert [each for each in figures if "failed" in each] == []
    assert "scalar read" in done.stdout
