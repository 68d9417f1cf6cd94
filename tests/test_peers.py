"""The comparison with peers runs and keeps its results; how fast anyone is, is not asserted."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers import environments, programs, results  # type: ignore[import-not-found]  # noqa: E402

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
