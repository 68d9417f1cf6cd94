"""Calls that end oddly: whatever users' code does, its own call fails and the cluster goes on."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from clusters import LIMIT, beside, every_engine, quiet, until

import paceline

pytestmark = pytest.mark.timeout(120)


def same(x: Any) -> Any:
    return x


def fails(x: Any) -> None:
    raise ValueError("no")


def _not_here() -> None:
    raise RuntimeError("not here")


class Unloadable:
    def __reduce__(self) -> Any:
        return _not_here, ()


# A name by which reprlib takes it for another type.
array = type("array", (), {"__module__": __name__})


@every_engine
@pytest.mark.parametrize("odd", [Unloadable(), array(), 10**5000], ids=["load", "name", "digits"])
def test_an_input_that_cannot_be_shown_fails_its_own_call_alone(engine: str, odd: Any) -> None:
    with quiet(1, engine) as cluster:
        with pytest.raises(
            paceline.TaskFailed,
            match=r"^fails\(<an input that cannot be shown: \w+>\) raised in worker:0:\nTraceback",
        ):
            cluster.submit(fails, odd).result(LIMIT)
        assert cluster.map(same, [3]) == [3]


class Panic(BaseException):
    """As those that extension modules in Rust raise."""


@every_engine
@pytest.mark.parametrize("kind", [Panic, GeneratorExit])
def test_what_is_no_exception_by_its_class_fails_its_call_all_the_same(
    engine: str, kind: type[BaseException]
) -> None:
    def panics(x: int) -> None:
        raise kind("lost")

    with quiet(1, engine) as cluster:
        with pytest.raises(paceline.TaskFailed, match=rf"(?s)^panics\(1\) .*{kind.__name__}: lost"):
            cluster.submit(panics, 1).result(LIMIT)
        assert cluster.map(same, [3]) == [3]
        assert [worker.starts for worker in cluster.stats().workers] == [1]


class Odd(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise RuntimeError("lost its file")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("lost its file")

    def __len__(self) -> int:
        return 1


@every_engine
def test_a_result_that_breaks_when_it_is_looked_at_fails_its_own_call_alone(engine: str) -> None:
    with quiet(1, engine) as cluster:
        with pytest.raises(paceline.TaskFailed, match=r"(?s)^<lambda>\(1\) .*lost its file$"):
            cluster.submit(lambda x: {"a": Odd()}, 1).result(LIMIT)
        assert cluster.map(same, [3]) == [3]
        assert [worker.starts for worker in cluster.stats().workers] == [1]


def test_in_one_thread_no_call_begins_once_another_has_failed() -> None:
    begun: list[int] = []
    with quiet(2, "serial") as cluster:
        cluster_fails = _noting(begun, ValueError("no"))
        with pytest.raises(paceline.TaskFailed):
            cluster.map(cluster_fails, range(8))
        assert len(begun) <= 2
        assert cluster.stats().calls["worker"].waiting == 0
        # Nothing of it is left in the way of a collection either.
        cluster.collect(lambda: iter([1]), batch_size=1).close()


def test_after_a_ctrl_c_in_one_thread_nothing_of_the_interrupted_map_is_called() -> None:
    begun: list[int] = []
    with quiet(1, "serial") as cluster:
        with pytest.raises(KeyboardInterrupt):
            cluster.map(_noting(begun, KeyboardInterrupt()), range(8))
        assert begun == [0]
        assert cluster.map(same, [3]) == [3]
        assert begun == [0]


_NOTES: dict[int, list[int]] = {}


def _noting(begun: list[int], error: BaseException) -> Any:
    """A function that notes what it is called with, in this process, and raises."""
    _NOTES[id(begun)] = begun
    key, module, kind = id(begun), __name__, type(error)

    def noting(x: int) -> None:
        sys.modules[module]._NOTES[key].append(x)
        raise kind

    return noting


def _held(cluster: paceline.Cluster, gate: Path, hang: Any) -> None:
    """Hang something on a future that ends only afterwards."""
    os.mkfifo(gate)
    future = cluster.submit(lambda path: Path(path).read_text(), str(gate))
    future.add_done_callback(hang)
    gate.write_text("go")


@beside
def test_a_callback_that_exits_ends_no_thread_of_the_clusters(engine: str, tmp_path: Path) -> None:
    called = threading.Event()

    def leave(future: Future[Any]) -> None:
        called.set()
        sys.exit(4)

    with quiet(1, engine) as cluster:
        _held(cluster, tmp_path / "gate", leave)
        assert called.wait(LIMIT)
        assert cluster.submit(same, 3).result(LIMIT) == 3


@beside
@pytest.mark.parametrize("what", ["map", "run"])
def test_a_callback_that_would_wait_for_its_own_thread_is_told(
    engine: str, what: str, tmp_path: Path
) -> None:
    outcome: Future[Any] = Future()

    def more(future: Future[Any]) -> None:
        try:
            cluster.map(same, [1]) if what == "map" else cluster.run(lambda: 1)
            outcome.set_result(None)
        except BaseException as e:
            outcome.set_exception(e)

    with quiet(1, engine) as cluster:
        _held(cluster, tmp_path / "gate", more)
        with pytest.raises(paceline.WouldBlock, match=r"a callback of a future cannot wait"):
            outcome.result(LIMIT)
        assert cluster.submit(same, 3).result(LIMIT) == 3


@every_engine
@pytest.mark.parametrize("what", ["map", "submit", "run"])
def test_a_forked_process_is_told_that_the_cluster_is_not_its_own(engine: str, what: str) -> None:
    def ask() -> Any:
        if what == "run":
            return cluster.run(lambda: 1)
        return cluster.map(same, [1]) if what == "map" else cluster.submit(same, 1)

    with quiet(1, engine) as cluster:
        assert cluster.map(same, [1]) == [1]
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                text = repr(Call(ask).outcome())
            except BaseException as e:
                text = f"{type(e).__name__}: {e}"
            os.write(writing, text.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            text = lines.read()
        os.waitpid(child, 0)
        assert f"Disconnected: {'<lambda>' if what == 'run' else 'same'}: this cluster " in text
        assert f"belongs to process {os.getpid()}; a forked process launches one of its own" in text
        assert cluster.map(same, [2]) == [2]


def _slow(x: int) -> int:
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 0.02)
    return x


def test_a_worker_that_cannot_start_is_tried_once_for_each_map_beyond_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'worker:0' in sys.orig_argv:\n"
        f"    open({str(tmp_path / 'starts')!r}, 'a').write('.')\n"
        "    os._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with quiet(2, restarts=0) as cluster:
        assert cluster.map(_slow, range(100)) == list(range(100))
        assert cluster.map(_slow, range(100)) == list(range(100))
        with pytest.raises(paceline.WorkerFailed, match=r"its budget is restarts=0"):
            cluster.run(lambda: 1)
    assert len((tmp_path / "starts").read_bytes()) <= 4


class Broken(io.StringIO):
    """Where a pipeline's next program has ended, or a disk is full."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")


def _says(x: int) -> int:
    sys.stdout.write(f"hello {x}\n")
    return x


def test_what_workers_print_and_cannot_be_shown_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    with quiet(1) as cluster:
        monkeypatch.setattr(sys, "stdout", Broken())
        assert cluster.map(_says, [1, 2]) == [1, 2]
        until(lambda: caplog.messages)
        with pytest.raises(paceline.WorkerFailed, match="killed its worker once"):
            cluster.submit(lambda x: os._exit(x), 1, retries=0).result(LIMIT)
        # Another process was started meanwhile.
        assert cluster.map(_says, [3]) == [3]
    lost = [text for text in caplog.messages if "nobody reads" in text]
    assert lost == ["what workers print cannot be shown, and is lost: nobody reads"]
