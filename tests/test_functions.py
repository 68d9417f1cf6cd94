"""Functions travel by value, handles by name; what cannot travel is named."""

import functools
import io
import pickle
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import FunctionError
from paceline.functions import dump, load


def refuse_handles(name: tuple[str, ...]) -> object:
    raise AssertionError(f"no handle was captured, but {name} was resolved")


def through(value: Any) -> Any:
    return load(dump(value), refuse_handles)


def refused(value: object) -> str:
    with pytest.raises(FunctionError) as caught:
        dump(value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Handle:
    def __init__(self, *name: str) -> None:
        self.name = name
        self.line = threading.Lock()  # like a connection: it could not travel itself

    def __paceline_handle__(self) -> tuple[str, ...]:
        return self.name


class Env:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def rollouts(self) -> object:
        return self


# Travelling


def test_a_closure_and_a_lambda_arrive_with_what_they_captured() -> None:
    steps, factor = [1, 2, 3], 2
    double: Callable[[int], int] = lambda step: factor * step  # noqa: E731

    def rollouts(scale: int = 10) -> list[int]:
        return [double(step) * scale for step in steps]

    assert through(rollouts)() == [20, 40, 60]
    assert through(functools.partial(rollouts, scale=1))() == [2, 4, 6]


def test_a_local_class_arrives_with_its_methods() -> None:
    class Policy:
        weight = 3

        def act(self, observation: int) -> int:
            return self.weight * observation

    assert through(Policy)().act(2) == 6
    assert through(Policy().act)(2) == 6


def test_large_arrays_arrive_equal_and_writable() -> None:
    table = np.arange(1_000_000.0)
    arrived = through(lambda: table)()
    np.testing.assert_array_equal(arrived, table)
    assert arrived.flags.writeable


def test_a_torch_module_on_the_cpu_arrives_with_its_parameters() -> None:
    net = torch.nn.Linear(3, 2)
    arrived = through(lambda: net)()
    torch.testing.assert_close(arrived.weight, net.weight)


def test_handles_travel_as_names_wherever_they_were_captured() -> None:
    policy, experience = Handle("variable", "policy"), Handle("queue", "experience")

    def worker(first: object = policy) -> tuple[object, ...]:
        return first, {"deep": [experience]}

    rebuilt: dict[tuple[str, ...], object] = {}
    data = dump(worker)
    arrived: Any = load(data, lambda name: rebuilt.setdefault(name, object()))
    assert arrived() == (
        rebuilt["variable", "policy"],
        {"deep": [rebuilt["queue", "experience"]]},
    )


def test_functions_and_classes_of_the_main_script_travel_by_value(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\n"
        "from paceline.functions import dump\n"
        "FACTOR = 7\n"
        "class Env:\n"
        "    def step(self, x): return helper(x)\n"
        "def helper(x): return FACTOR * x\n"
        "def rollouts(x): return Env().step(x)\n"
        "sys.stdout.buffer.write(dump(rollouts))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, check=True)
    arrived: Any = load(done.stdout, refuse_handles)
    assert arrived(6) == 42


def test_a_traceback_shows_the_file_in_which_a_function_was_written() -> None:
    def rollouts() -> Callable[[], None]:
        return lambda: None

    assert through(rollouts).__code__.co_filename == __file__
    assert through(rollouts)().__code__.co_filename == __file__


def test_standard_error_and_files_in_memory_may_be_captured() -> None:
    stream, buffer = sys.stderr, io.StringIO("text")
    assert through(lambda: (stream, buffer.getvalue()))() == (sys.stderr, "text")


# Refusing


def test_a_captured_open_file_is_named(tmp_path: Path) -> None:
    with open(tmp_path / "x.log", "w") as log:

        def rollouts() -> None:
            log.write("step")

        assert refused(rollouts) == (
            "rollouts cannot be sent to a worker: captured variable 'log' is an open file "
            f"({str(tmp_path / 'x.log')!r}); open it inside the function"
        )


def test_a_captured_lock_is_named_with_the_reason() -> None:
    lock = threading.Lock()

    def rollouts() -> None:
        with lock:
            pass

    assert refused(rollouts) == (
        "rollouts cannot be sent to a worker: captured variable 'lock' is a _thread.lock "
        "(cannot pickle '_thread.lock' object); create it inside the function"
    )


def test_a_generator_made_outside_is_named() -> None:
    steps = (step for step in range(3))

    def rollouts() -> list[int]:
        return list(steps)

    assert re.match(
        r"rollouts cannot be sent to a worker: captured variable 'steps' is a generator "
        r"\(cannot pickle 'generator' object\); create it inside the function$",
        refused(rollouts),
    )


LOCK = threading.Lock()


def global_reader() -> Callable[[], object]:
    """Make a function that travels by value and reads a global of this module."""

    def rollouts() -> object:
        return [LOCK for _ in range(3)]

    return rollouts


def member(key: str, value: object) -> Callable[[], object]:
    config = {"plain": 1, key: [0, value]}

    def rollouts() -> object:
        return config

    return rollouts


def default(value: object) -> Callable[[], object]:
    def rollouts(size: int = 1, held: object = value) -> object:
        return size, held

    return rollouts


def keyword_default(value: object) -> Callable[[], object]:
    def rollouts(*, held: object = value) -> object:
        return held

    return rollouts


def nested(value: object) -> Callable[[], object]:
    def helper() -> object:
        return value

    def rollouts() -> object:
        return helper()

    return rollouts


def local_class(value: object) -> Callable[[], object]:
    class Env:
        held = value

    def rollouts() -> object:
        return Env()

    return rollouts


def partial(value: object) -> Callable[[], object]:
    def rollouts(first: int, held: object) -> object:
        return first, held

    return functools.partial(rollouts, 1, held=value)


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (global_reader(), "global 'LOCK'"),
        (member("k", LOCK), "captured variable \"config['k'][1]\""),
        (default(LOCK), "default of parameter 'held'"),
        (keyword_default(LOCK), "default of parameter 'held'"),
        (nested(LOCK), "captured variable 'value' of helper"),
        (nested(Env(env=Env(lock=LOCK))), "captured variable 'value.env.lock' of helper"),
        (local_class(LOCK), "attribute 'Env.held'"),
        (partial(LOCK), "argument 'held'"),
        (functools.partial(lambda first: first, LOCK), "argument '0'"),
        (Env(lock=LOCK).rollouts, "attribute 'self.lock'"),
    ],
)
def test_the_innermost_value_that_cannot_travel_is_named(
    function: Callable[[], object], place: str
) -> None:
    assert f" cannot be sent to a worker: {place} is a _thread.lock (" in refused(function)


def test_what_is_itself_at_fault_is_called_it() -> None:
    assert refused(LOCK) == (
        "lock cannot be sent to a worker: it is a _thread.lock "
        "(cannot pickle '_thread.lock' object); create it inside the function"
    )


def test_an_error_of_the_users_own_pickling_is_told() -> None:
    class Env:
        def __getstate__(self) -> object:
            raise ValueError("the simulator is running")

    env = Env()
    assert "captured variable 'env' is a test_functions.test_an_error" in refused(lambda: env)
    assert "(ValueError: the simulator is running)" in refused(lambda: env)


def test_a_structure_that_contains_itself_is_searched_once() -> None:
    config: dict[str, object] = {}
    config["self"] = config
    config["lock"] = LOCK
    assert "captured variable \"config['lock']\" is a _thread.lock" in refused(lambda: config)


def test_a_structure_nested_too_deeply_is_an_error_of_ours() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert refused(lambda: deep).startswith("<lambda> cannot be sent to a worker: ")
    while deep:  # taken apart by hand: freeing it recurses as deeply
        deep = deep.pop()  # type: ignore[assignment]


def test_tensors_and_modules_outside_the_cpu_are_refused() -> None:
    tensor = torch.empty(3, device="meta")
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert refused(lambda: tensor) == (
        "<lambda> cannot be sent to a worker: captured variable 'tensor' is a torch tensor on "
        "meta; send a copy of it on the CPU"
    )
    assert refused(lambda: net) == (
        "<lambda> cannot be sent to a worker: captured variable 'net' is a torch module on meta; "
        "create it inside the function"
    )


class Device:
    def __init__(self, platform: str, number: int) -> None:
        self.platform = platform
        self.number = number

    def __str__(self) -> str:
        return f"{self.platform}:{self.number}"


class JaxArray:
    """As much of a JAX array as tells where it is."""

    def __init__(self, *devices: Device) -> None:
        self.where = devices

    def devices(self) -> set[Device]:
        return set(self.where)


def test_jax_arrays_outside_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(Array=JaxArray, core=types.SimpleNamespace(Tracer=type(None)))
    monkeypatch.setitem(sys.modules, "jax", module)
    here, there = JaxArray(Device("cpu", 0)), JaxArray(Device("cuda", 1), Device("cuda", 0))
    assert isinstance(through(lambda: here)(), JaxArray)
    assert refused(lambda: [there]) == (
        "<lambda> cannot be sent to a worker: captured variable 'there' is a JAX array on cuda:0, "
        "cuda:1; send a copy of it on the CPU"
    )


def test_the_foreign_error_is_kept_as_the_cause() -> None:
    with pytest.raises(FunctionError) as caught:
        dump(LOCK)
    assert isinstance(caught.value.__cause__, TypeError | pickle.PicklingError)
