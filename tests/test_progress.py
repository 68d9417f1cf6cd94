"""What is shown while a run goes on: words, lines, and a terminal that stays tidy."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from terminal import Terminal

from paceline import Cluster, Collection, TimedOut, Variable, Worker
from paceline.progress import METRICS, Line, Live, Plain, Progress, Quiet, progress, wrapped


def counting(policy: Variable[Any], worker: Worker) -> Iterator[int]:
    while True:
        policy.read()
        worker.log(steps=10, score=worker.index)
        yield 0


def plain_items() -> Iterator[int]:
    while True:
        yield 0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2, engine="serial", progress="quiet") as made:
        yield made


@pytest.fixture
def collection(cluster: Cluster) -> Collection[int]:
    return cluster.collect(counting, cluster.variable("policy", 0.0), batch_size=2)


def words(line: Line) -> str:
    line.sample()
    return "  ".join(line.words())


def test_a_line_names_rates_metrics_version_lag_queue_and_who_waits(
    collection: Collection[int],
) -> None:
    line = Line(collection, 10.0)
    for _ in range(4):
        collection.next()
    number = r"[\d,.e+]+"
    assert_match(
        rf"counting-1  {number} steps/s  {number} batches/s  score 0\.5  version 1  lag 0"
        r"  queue 0/4  trainer waits for workers \d+%  workers wait for trainer 0%",
        words(line),
    )


def test_the_summary_counts_from_the_first_batch_to_the_last(collection: Collection[int]) -> None:
    line = Line(collection, 10.0)
    for _ in range(3):
        collection.next()
    line.sample()
    number = r"[\d,.e+]+"
    assert_match(
        rf"counting-1: 3 batches in 0\.\d s  {number} steps/s  {number} batches/s  score 0\.5"
        r"  lag <= 0  trainer waited \d+%",
        "  ".join(line.summary()),
    )


def test_where_no_steps_are_logged_items_are_counted(cluster: Cluster) -> None:
    collection = cluster.collect(plain_items, batch_size=2)
    line = Line(collection, 10.0)
    collection.next()
    shown = words(line)
    assert " items/s  " in shown
    assert "steps/s" not in shown
    assert "version" not in shown


def test_without_a_batch_a_line_says_for_how_long(collection: Collection[int]) -> None:
    line = Line(collection, 0.25)
    assert_match(r"counting-1  no batch yet, 0 s  version 1  lag 0  queue 0/4  .*", words(line))
    collection.next()
    line.sample()
    assert_match(r"counting-1  no batch for 0 s  score 0\.5  .*", words(line))


@contextmanager
def ahead() -> Iterator[tuple[Variable[float], Collection[int]]]:
    """A collection that has handed over a batch and already holds items for the next."""
    with Cluster(2, progress="quiet") as cluster:
        policy = cluster.variable("policy", 0.0)
        collection = cluster.collect(counting, policy, batch_size=1)
        collection.next()
        while collection.stats()["stored"] == 0:
            """They are on their way; the limit of the test holds."""
        yield policy, collection


def test_what_was_too_old_is_shown_with_its_reason() -> None:
    with ahead() as (policy, collection):
        line = Line(collection, 10.0)
        for value in range(3):
            policy.assign(float(value))
        collection.next()
        assert_match(r".*  dropped \d stale  .*", words(line))
        assert_match(r".*  dropped \d stale  .*", "  ".join(line.summary()))


def test_what_is_left_over_at_the_end_does_not_count_as_dropped() -> None:
    with ahead() as (_, collection):
        line = Line(collection, 10.0)
        collection.close()
        assert collection.stats()["dropped"]["closed"] > 0
        assert "dropped" not in words(line)


@pytest.mark.parametrize(("logged", "more"), [(METRICS, None), (METRICS + 1, "+1 more")])
def test_of_many_metrics_the_first_are_shown(
    cluster: Cluster, logged: int, more: str | None
) -> None:
    def many(worker: Worker) -> Iterator[int]:
        while True:
            worker.log(**{f"metric{number}": number for number in range(logged)})
            yield 0

    collection = cluster.collect(many, batch_size=1)
    line = Line(collection, 10.0)
    collection.next()
    line.sample()
    assert f"metric{METRICS - 1} {METRICS - 1}" in line.words()
    assert [word for word in line.words() if word.startswith("+")] == ([more] if more else [])


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (12, ["ab cd  ef  g"]),
        (11, ["ab cd  ef", "g"]),
        (5, ["ab cd", "ef  g"]),
        (4, ["ab cd", "ef", "g"]),
    ],
)
def test_lines_are_broken_between_words_only(width: int, lines: list[str]) -> None:
    assert wrapped(["ab cd", "ef", "g"], width) == lines


def test_nothing_makes_no_lines() -> None:
    assert wrapped([], 10) == []


def run_serial(shown: str) -> None:
    with Cluster(engine="serial", progress=shown) as cluster:  # type: ignore[arg-type]
        collection = cluster.collect(plain_items, batch_size=1)
        for _ in range(3):
            collection.next()
    cluster.close()


def test_plain_says_once_how_it_went(capfd: pytest.CaptureFixture[str]) -> None:
    run_serial("plain")
    out, err = capfd.readouterr()
    assert out == ""
    assert_match(r"plain_items-1: 3 batches in 0\.\d s  .* items/s  .*\n", err)
    assert err.count("\n") == 1


def test_a_collection_that_ends_first_says_how_it_went_before_the_next_begins(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Cluster(engine="serial", progress="plain") as cluster:
        for _ in range(2):
            for _ in cluster.collect(plain_items, batch_size=1):
                break
            sys.stderr.write("ended\n")
        cluster.collect(plain_items, batch_size=1)  # hands over nothing: nothing is said
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "plain_items-1",
        "ended",
        "plain_items-2",
        "ended",
    ]


def test_plain_says_that_nothing_comes_while_the_trainer_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def waiting(policy: Variable[Any]) -> Iterator[int]:
        version = policy.read().version
        while True:
            version = policy.read(newer_than=version, timeout=None).version
            yield 0

    with Cluster(progress="plain") as cluster:
        collection = cluster.collect(waiting, cluster.variable("policy", 0.0), batch_size=1)
        with pytest.raises(TimedOut):
            collection.next(timeout=1.6)
    err = capfd.readouterr().err
    assert_match(r"waiting-1  no batch yet, \d+ s  .*  trainer waits for workers \d+%  .*\n", err)


def test_quiet_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run_serial("quiet")
    assert capfd.readouterr() == ("", "")


def test_progress_is_plain_where_there_is_no_terminal() -> None:
    kinds: dict[str, type[Progress]] = {"auto": Plain, "plain": Plain, "live": Live, "quiet": Quiet}
    for mode, kind in kinds.items():
        shown = progress(mode)  # type: ignore[arg-type]
        assert type(shown) is kind
        shown.close()
        shown.close()


def test_an_unknown_mode_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"^progress='loud'; there are 'auto', 'live', 'plain', 'quiet'$"
    ):
        Cluster(progress="loud")  # type: ignore[arg-type]


LIVE = """
import sys, paceline

def rollouts(policy, worker):
    print("hello from a worker")
    while True:
        policy.read()
        worker.log(steps=10, episode_return=1.0)
        yield 0

with paceline.Cluster(workers=1) as cluster:
    policy = cluster.variable("policy", 0.0)
    for batch in cluster.collect(rollouts, policy, batch_size=4):
        policy.assign(0.0)
        if sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
            break
    print("printed by the chief")
"""


@pytest.mark.parametrize("columns", [200, 80, 30])
def test_a_live_line_fits_the_terminal_and_ends_with_a_summary(
    columns: int, tmp_path: Path
) -> None:
    with Terminal(LIVE, columns=columns, cwd=tmp_path) as terminal:
        for words in ("steps/s", "batches/s", "episode_return 1", "lag ", "queue ", " for trainer"):
            if columns > 30 or words != " for trainer":
                terminal.wait_for(words)
        terminal.press(b"\n")
        assert terminal.wait() == 0
    lines = terminal.lines
    assert [line for line in lines if len(line) > columns] == []
    assert "[worker:0] hello from a worker" in lines
    assert "printed by the chief" in lines
    shown = " ".join(lines)
    assert "rollouts-1: " in shown
    assert "trainer waited" in shown[shown.index("rollouts-1: ") :]
    # The cursor is there again.
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")


def assert_match(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text, re.DOTALL), text
