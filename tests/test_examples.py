"""Every example runs, with 1, 2 and 4 workers."""

import json
import re
from pathlib import Path

import pytest
from programs import EXAMPLES, WORKERS, run, steps_taken


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "name", [pytest.param("cartpole_torch.py", marks=pytest.mark.slow), "session_loop.py"]
)
def test_an_example_runs_with_any_number_of_workers(name: str, workers: int) -> None:
    assert steps_taken(run(name, "--workers", workers, "--steps", 3000)) >= 3000


def test_the_session_loop_solves_its_task() -> None:
    assert run("session_loop.py", "--seed", 1).startswith("solved: ")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", WORKERS)
def test_settings_changed_in_mid_run_reach_the_workers(workers: int) -> None:
    said = run("settings.py", "--workers", workers, "--goal", 60)
    lines = said.splitlines()
    for gravity in (15.0, 22.0):
        (assigned,) = [i for i, line in enumerate(lines) if f"gravity becomes {gravity}" in line]
        (arrived,) = [i for i, line in enumerate(lines) if line.endswith(f"gravity {gravity}")]
        assert assigned < arrived
    assert re.fullmatch(
        r"solved: mean return \d+\.\d with gravity 22.0 after \d+ batches", lines[-1]
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_policy_trained_in_lockstep_is_the_same_on_every_engine(workers: int) -> None:
    *lines, last = run("lockstep.py", "--workers", workers, "--batches", 4).splitlines()
    digests = {line.split()[1] for line in lines}
    assert (len(lines), len(digests)) == (3, 1)
    assert last == "the same bits on serial, threads, processes"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("name", "options", "last"),
    [
        ("es_map.py", ("--goal", 50), r"mean return \d+\.\d after \d+ generations"),
        (
            "scipy_search.py",
            ("--generations", 8, "--goal", 0.2),
            r"cost \d+\.\d{4} % above the optimum after \d+ simulations",
        ),
        (
            "selfplay.py",
            ("--generations", 2, "--batches", 8, "--goal", 0.65),
            r"win rate 0\.\d\d against gen-0 after 2 generations",
        ),
    ],
)
def test_an_example_reaches_its_goal_with_any_number_of_workers(
    name: str, options: tuple[object, ...], last: str, workers: int
) -> None:
    said = run(name, "--workers", workers, *options)
    assert re.fullmatch(f"solved: {last}", said.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_digits_are_learned_with_any_number_of_workers(workers: int, mode: str) -> None:
    pytest.importorskip("sklearn")
    # A step of workers in step has a gradient of each of them.
    steps = 150 if mode == "sync" else 450
    options = ("--mode", mode, "--workers", workers, "--steps", steps, "--goal", 0.9)
    said = run("digits.py", *options).splitlines()
    made = re.match(r"(\d+) steps in \d+\.\d s; gradients: (\d+) taken, dropped: (.*)", said[0])
    oldest = re.fullmatch(r"the oldest gradient: (\d) versions; workers killed: 0", said[1])
    assert made, said
    assert oldest, said
    if mode == "sync":
        assert (int(made[2]), made[3], int(oldest[1])) == (steps * workers, "none", 0)
    else:
        assert int(made[2]) == steps
        assert int(oldest[1]) <= 4
    assert int(made[1]) == steps
    assert re.fullmatch(r"solved: test accuracy \d+\.\d %", said[2])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("workers", WORKERS)
def test_factors_are_learned_by_rows_on_two_servers(workers: int) -> None:
    *lines, last = run("matrix_factorisation.py", "--workers", workers).splitlines()
    errors = [float(re.findall(r"error (\d\.\d+) on", line)[0]) for line in lines]
    assert len(errors) == 8
    assert errors == sorted(errors, reverse=True)
    said = re.fullmatch(r"solved: error (\d\.\d+) became (\S+) with rows on ps:0, ps:1", last)
    assert said, last
    assert float(said[2]) == errors[-1] < 0.3 < errors[0] < float(said[1])


@pytest.mark.parametrize("workers", WORKERS)
def test_one_server_acts_for_many_workers_in_batches(workers: int) -> None:
    said = run("inference_server.py", workers)
    found = re.fullmatch(r"(\d+) observations of (\d) workers in batches of up to (\d)\n", said)
    assert found, said
    assert (int(found[1]), int(found[2])) == (200 * workers, workers)
    assert int(found[3]) == workers


def test_an_example_that_misses_its_goal_says_so_and_fails() -> None:
    with pytest.raises(AssertionError):
        run("scipy_search.py", "--engine", "serial", "--generations", 1, "--goal", 0)


@pytest.mark.slow
def test_the_oldest_member_but_the_first_leaves_a_full_league() -> None:
    said = run("selfplay.py", "--generations", 6, "--batches", 1, "--goal", 0)
    (line,) = [line for line in said.splitlines() if line.startswith("generation 6")]
    assert re.findall(r"gen-\d", line) == ["gen-0", "gen-2", "gen-3", "gen-4", "gen-5"]


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_an_example_runs_within_one_process(engine: str) -> None:
    last = run("settings.py", "--engine", engine, "--batches", 2).splitlines()[-1]
    assert re.fullmatch(r"not solved: mean return \d+\.\d with gravity 9.8 after 2 batches", last)


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"]] == []


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test*_examples.py"))
    there = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".ipynb")}
    assert len(there) >= 5
    assert [name for name in sorted(there) if f'"{name}"' not in tests] == []
