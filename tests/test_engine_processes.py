"""Processes: fresh interpreters, heard to the end, and never left behind."""

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.errors import Closed, FunctionError, UnknownName, Unsupported
from paceline.engines._output import MAX_LINE, Lines
from paceline.engines.base import Engine, Exit, Link, Task, TaskSpec, engine, hygiene
from paceline.engines.processes import ProcessEngine
from paceline.testing.engines import DEADLINE_SECONDS, ENGINE_CHECKS, Recorder


@pytest.fixture
def processes() -> Iterator[ProcessEngine]:
    with ProcessEngine() as made:
        yield made


@pytest.fixture(params=["reported", "looked for"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the engine learns of an end: from the kernel, or where that cannot tell, by looking."""
    if request.param == "looked for":
        monkeypatch.delattr(os, "pidfd_open", raising=False)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


class Witness:
    """A pipe whose writing end those we watch hold open: it ends when the last of them is gone."""

    def __init__(self) -> None:
        self._read, self.held = os.pipe()

    def release(self) -> None:
        """Let go of our own copy, once the others have theirs."""
        os.close(self.held)

    def wait(self) -> None:
        ready, _, _ = select.select([self._read], [], [], DEADLINE_SECONDS)
        assert ready, "someone still holds the pipe"
        assert os.read(self._read, 1) == b""
        os.close(self._read)


def run_script(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def echo(link: Link) -> None:
    while True:
        try:
            message = link.receive()
        except EOFError:
            return
        link.send(message)


def hang(link: Link) -> None:
    link.send("hanging")
    threading.Event().wait()


def leave_a_process(link: Link, held: int) -> None:
    subprocess.Popen(["sleep", "600"], pass_fds=(held,))
    link.send("started")


def hang_with_a_process(link: Link, held: int) -> None:
    leave_a_process(link, held)
    threading.Event().wait()


# The contract


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_processes_keep_the_contract(check: Callable[[Callable[[], Engine]], None]) -> None:
    check(ProcessEngine)


def test_an_engine_is_made_by_its_name() -> None:
    with engine("processes") as made:
        assert isinstance(made, ProcessEngine)
        assert repr(made) == "<ProcessEngine, 0 tasks>"
    assert repr(made) == "<ProcessEngine, closed>"


def test_an_unknown_engine_is_told_what_exists() -> None:
    with pytest.raises(UnknownName, match=r"^no engine 'proceses'; there are \['processes', "):
        engine("proceses")


def test_a_platform_without_process_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        with pytest.raises(Unsupported) as caught:
            ProcessEngine()
    assert re.match(
        r"engine 'processes' needs Linux or macOS; on \w+ use it inside WSL, or engine='serial'$",
        str(caught.value),
    )


# What travels


def test_a_script_needs_no_main_guard_for_its_own_functions_and_classes(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        "from paceline.engines.base import TaskSpec\n"
        "from paceline.engines.processes import ProcessEngine\n"
        "from paceline.testing.engines import Recorder\n"
        "class Env:\n"
        "    def step(self): return SCALE * 2\n"
        "def target(link): link.send(Env().step())\n"
        "SCALE = 21\n"
        "recorder = Recorder()\n"
        "with ProcessEngine() as engine:\n"
        "    engine.start(TaskSpec('worker:0', target), recorder)\n"
        "    engine.start(TaskSpec('worker:1', lambda link: link.send(SCALE)), recorder)\n"
        "    print(recorder.wait('worker:0', 'received'), recorder.wait('worker:1', 'received'))\n",
    )
    assert printed == "[42] [21]\n"


def test_a_task_finds_modules_and_arguments_where_its_launcher_does(
    processes: ProcessEngine, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    processes.start(TaskSpec("worker:0", lambda link: link.send((sys.path, sys.argv))), recorder)
    assert recorder.wait("worker:0", "received") == [(sys.path, sys.argv)]


def test_a_target_that_cannot_travel_is_refused(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    lock = threading.Lock()

    def target(link: Link) -> None:
        lock.acquire()

    with pytest.raises(
        FunctionError, match=r"^the target of 'worker:0' cannot be sent: cannot pickle '_thread\."
    ):
        processes.start(TaskSpec("worker:0", target), recorder)


def test_64_megabytes_go_both_ways(processes: ProcessEngine, recorder: Recorder) -> None:
    message = bytes(range(256)) * (64 * 4096)
    task = processes.start(TaskSpec("echo:0", echo), recorder)
    task.send(message)
    assert recorder.wait("echo:0", "received")[0] == message


def test_a_message_that_the_launcher_cannot_read_ends_the_task(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    class Unreadable:
        def __reduce__(self) -> tuple[object, ...]:
            return compile, ("1 +", "here", "eval")

    def target(link: Link) -> None:
        link.send(Unreadable())
        echo(link)

    processes.start(TaskSpec("worker:0", target), recorder)
    end = recorder.exit("worker:0")
    assert end.signal == "SIGKILL"
    assert end.error is not None
    assert end.error.startswith("a message of 'worker:0' is unreadable:\nTraceback ")


def test_inherited_descriptors_keep_their_numbers(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    read, write = os.pipe()

    def target(link: Link) -> None:
        os.write(write, b"here")

    processes.start(TaskSpec("worker:0", target, inherit=(write,)), recorder)
    os.close(write)
    assert os.read(read, 10) == b"here"
    os.close(read)


# Hygiene


def test_threads_and_accelerators_are_set_before_numpy_is_imported(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    def target(link: Link) -> None:
        link.send(("numpy" in sys.modules, dict(os.environ)))

    spec = TaskSpec("worker:0", target, threads=3, env={"MKL_NUM_THREADS": "5", "MINE": "x"})
    processes.start(spec, recorder)
    ((_, variables),) = recorder.wait("worker:0", "received")  # type: ignore[misc]
    expected = {
        "OMP_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "PJRT_NPROC": "3",
        "MKL_NUM_THREADS": "5",
        "MINE": "x",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    assert {name: variables[name] for name in expected} == expected  # type: ignore[has-type]


def test_a_task_that_was_given_devices_sees_them() -> None:
    variables = hygiene(TaskSpec("learner:0", echo, devices="0,1"))
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "JAX_PLATFORMS" not in variables


def test_a_ctrl_c_is_left_to_the_launcher(processes: ProcessEngine, recorder: Recorder) -> None:
    task = processes.start(TaskSpec("echo:0", echo), recorder)
    task.send("before")
    recorder.wait("echo:0", "received")
    assert os.getpgid(task.pid) == task.pid
    os.kill(task.pid, signal.SIGINT)
    task.send("after")
    assert recorder.wait("echo:0", "received", 2) == ["before", "after"]


# Output


def test_output_arrives_line_by_line_before_the_end(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    def target(link: Link) -> None:
        print("first\n\nthird", flush=True)  # noqa: T201
        os.write(1, b"not \xff text\n 10%\r 90%\r100%\r\nno newline")
        os.write(2, b"a warning")

    processes.start(TaskSpec("worker:0", target), recorder)
    assert recorder.exit("worker:0") == Exit(status=0)
    assert recorder.heard("worker:0", "stdout") == [
        "first", "", "third", "not \ufffd text", "100%", "no newline",
    ]  # fmt: skip
    assert recorder.heard("worker:0", "stderr") == ["a warning"]
    assert recorder.events[-1].what == "ended"


def test_what_a_killed_task_had_printed_and_sent_is_heard(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    def target(link: Link) -> None:
        for number in range(1000):
            print(number)  # noqa: T201
            link.send(number)
        os.kill(os.getpid(), signal.SIGKILL)

    processes.start(TaskSpec("worker:0", target), recorder)
    assert recorder.exit("worker:0") == Exit(signal="SIGKILL")
    assert recorder.heard("worker:0", "stdout") == [str(number) for number in range(1000)]
    assert recorder.heard("worker:0", "received") == list(range(1000))


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"]),
        ([b"caf\xc3", b"\xa9\n"], ["café"]),
        ([b"bar 1%\rbar 2%", b"\rbar 3%\r", b"\nend"], ["bar 3%", "end"]),
        ([b"dos\r", b"\nend\r\n"], ["dos", "end"]),
        ([b"cut \xc3"], ["cut \ufffd"]),
        ([b""], []),
        ([b"x" * MAX_LINE + b"\n"], ["x" * MAX_LINE]),
        ([b"x" * MAX_LINE + b"y\nz"], ["x" * MAX_LINE, "y", "z"]),
        ([b"x" * MAX_LINE, b"y", b"\n"], ["x" * MAX_LINE, "y"]),
    ],
)
def test_output_is_cut_into_lines(pieces: list[bytes], lines: list[str]) -> None:
    output = Lines()
    found = [line for piece in pieces for line in output.feed(piece)]
    assert found + output.feed(b"", final=True) == lines


def test_a_progress_bar_without_end_takes_no_memory() -> None:
    output = Lines()
    for percent in range(100_000):
        assert output.feed(b"\r%6d" % percent) == []
    assert output.feed(b"", final=True) == [" 99999"]


# Ends


@pytest.mark.parametrize(
    ("code", "end", "words"),
    [
        (3, Exit(status=3), []),
        (None, Exit(status=0), []),
        ("out of fuel", Exit(status=1), ["out of fuel"]),
    ],
)
def test_a_task_may_choose_its_exit_status(
    processes: ProcessEngine, recorder: Recorder, code: object, end: Exit, words: list[str]
) -> None:
    def target(link: Link) -> None:
        raise SystemExit(code)

    processes.start(TaskSpec("worker:0", target), recorder)
    assert recorder.exit("worker:0") == end
    assert recorder.heard("worker:0", "stderr") == words


def test_an_exit_reads_as_words() -> None:
    assert str(Exit(status=3)) == "exit status 3"
    assert str(Exit(signal="SIGKILL")) == "killed by SIGKILL"


def test_a_crash_in_native_code_shows_where(processes: ProcessEngine, recorder: Recorder) -> None:
    def target(link: Link) -> None:
        ctypes.string_at(0)

    task = processes.start(TaskSpec("worker:0", target), recorder)
    assert recorder.exit("worker:0") == Exit(signal="SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in recorder.heard("worker:0", "stderr")
    assert repr(task) == f"<ProcessTask 'worker:0', pid {task.pid}, killed by SIGSEGV>"


@pytest.mark.usefixtures("ends")
def test_a_sigkill_is_noticed_within_a_second(processes: ProcessEngine, recorder: Recorder) -> None:
    task = processes.start(TaskSpec("worker:0", hang), recorder)
    recorder.wait("worker:0", "received")
    killed = time.monotonic()
    os.kill(task.pid, signal.SIGKILL)
    assert recorder.exit("worker:0") == Exit(signal="SIGKILL")
    assert time.monotonic() - killed < 1


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("target", [leave_a_process, hang_with_a_process])
def test_what_a_task_started_ends_with_it(
    processes: ProcessEngine, recorder: Recorder, target: Callable[[Link, int], None]
) -> None:
    witness = Witness()
    held = witness.held
    spec = TaskSpec("worker:0", lambda link: target(link, held), inherit=(held,))
    task = processes.start(spec, recorder)
    recorder.wait("worker:0", "received")
    witness.release()
    if target is hang_with_a_process:
        task.kill()
    witness.wait()
    recorder.exit("worker:0")


def test_a_task_that_ended_can_be_started_anew_by_its_listener(processes: ProcessEngine) -> None:
    class Restarter(Recorder):
        def ended(self, task: Task, end: Exit) -> None:
            super().ended(task, end)
            if end.signal:
                processes.start(TaskSpec("worker:0", echo), self).send("again")

    restarter = Restarter()
    processes.start(TaskSpec("worker:0", hang), restarter).kill()
    assert restarter.wait("worker:0", "received")[-1] == "again"


def test_an_error_of_a_listener_is_raised_by_a_later_call() -> None:
    class Faulty(Recorder):
        def ended(self, task: Task, end: Exit) -> None:
            raise ArithmeticError("the listener's own")

    processes = ProcessEngine()
    processes.stop(processes.start(TaskSpec("echo:0", echo), Faulty()), DEADLINE_SECONDS)
    with pytest.raises(ArithmeticError, match=r"^the listener's own$"):
        processes.start(TaskSpec("echo:1", echo), Recorder())
    processes.close()


# Stopping


def test_a_task_that_does_not_heed_a_stop_is_killed(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    task = processes.start(TaskSpec("worker:0", hang), recorder)
    recorder.wait("worker:0", "received")
    processes.stop(task, timeout=0)
    assert recorder.heard("worker:0", "ended") == [Exit(signal="SIGKILL")]


def test_a_task_that_is_being_stopped_takes_no_messages(
    processes: ProcessEngine, recorder: Recorder
) -> None:
    task = processes.start(TaskSpec("worker:0", hang), recorder)
    task.hang_up()
    with pytest.raises(Closed, match=r"^send to 'worker:0': it is being stopped$"):
        task.send(1)
    task.kill()


def test_a_close_kills_what_does_not_end_in_time(recorder: Recorder) -> None:
    processes = ProcessEngine()
    for index in range(2):
        processes.start(TaskSpec(f"worker:{index}", hang), recorder)
        recorder.wait(f"worker:{index}", "received")
    processes.close(timeout=0.1)
    for index in range(2):
        assert recorder.heard(f"worker:{index}", "ended") == [Exit(signal="SIGKILL")]


def test_a_ctrl_c_during_a_close_still_leaves_nothing(recorder: Recorder) -> None:
    def interrupt(link: Link) -> None:
        echo(link)  # until the line is closed
        os.kill(os.getppid(), signal.SIGINT)
        threading.Event().wait()

    processes = ProcessEngine()
    task = processes.start(TaskSpec("worker:0", interrupt), recorder)
    with pytest.raises(KeyboardInterrupt):
        processes.close(timeout=DEADLINE_SECONDS)
    assert not task.alive
    processes.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_20_starts_and_stops_leave_nothing(recorder: Recorder) -> None:
    before = os.listdir("/dev/fd")
    for round_number in range(1, 21):
        with ProcessEngine() as processes:
            processes.start(TaskSpec("echo:0", echo), recorder).send(round_number)
            recorder.wait("echo:0", "received", round_number)
    assert recorder.heard("echo:0", "ended") == [Exit(status=0)] * 20
    assert len(os.listdir("/dev/fd")) == len(before)


def test_too_few_descriptors_are_told_with_the_number(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        "import resource\n"
        "from paceline.core.errors import WorkerFailed\n"
        "from paceline.engines.base import TaskSpec\n"
        "from paceline.engines.processes import ProcessEngine\n"
        "from paceline.testing.engines import Recorder\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))\n"
        "with ProcessEngine() as engine:\n"
        "    try:\n"
        "        for index in range(24):\n"
        "            engine.start(TaskSpec(f'w:{index}', lambda link: None), Recorder())\n"
        "    except WorkerFailed as error:\n"
        "        print(error)\n",
    )
    assert re.match(
        r"start 'w:\d+': \[Errno 24\] Too many open files; \d+ tasks run, "
        r"a process may have 24 descriptors$",
        printed,
    )


# The launcher's death

LAUNCHER = """
import ctypes, os, subprocess, sys, threading
from paceline.engines.base import TaskSpec
from paceline.engines.processes import ProcessEngine
from paceline.testing.engines import Recorder

held, companion = int(sys.argv[1]), sys.argv[2:]

def idle(link):
    if companion:
        subprocess.Popen(companion, pass_fds=(held,))
    link.send("ready")
    threading.Event().wait()

def stuck(link):
    link.send("ready")
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock

recorder = Recorder()
engine = ProcessEngine()
for target in (idle, stuck):
    engine.start(TaskSpec(target.__name__, target, inherit=(held,)), recorder)
    recorder.wait(target.__name__, "received")
print("ready", flush=True)
"""


def watch_a_launcher(end: str, *companion: str) -> None:
    """Run a launcher, whose last line is `end`, and see that nothing outlives it."""
    witness = Witness()
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER + end, str(witness.held), *companion],
        pass_fds=(witness.held,),
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        witness.release()
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        witness.wait()


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit(0)"]
)
def test_tasks_and_what_they_started_do_not_outlive_their_launcher(end: str) -> None:
    watch_a_launcher(f"import signal\n{end}", "sleep", "600")


@pytest.mark.skipif(sys.platform != "linux", reason="the signal exists on Linux only")
def test_tasks_end_with_their_launcher_when_their_guard_was_killed_first() -> None:
    watch_a_launcher("engine._guard._process.kill()\nos._exit(0)")


def test_a_guard_that_was_killed_is_replaced(processes: ProcessEngine, recorder: Recorder) -> None:
    for index in range(2):
        processes.start(TaskSpec(f"echo:{index}", echo), recorder).send(index)
        recorder.wait(f"echo:{index}", "received")
        guard = processes._guard._process
        assert guard is not None
        guard.kill()
        guard.wait()
