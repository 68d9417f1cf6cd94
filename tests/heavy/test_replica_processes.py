"""Processes with models of different frameworks that share one set of parameters."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from hands import cluster, ended, start, toml

pytestmark = pytest.mark.timeout(300)

# Each links a model with the same four leaves, waits for its turn, and adds one to all of them.
COMMON = """
import os, sys
import numpy as np
import paceline

def take_turns(model, of):
    with paceline.Session.from_environment() as session:
        mine = int(session.task.partition(":")[2])
        # All but the first wait for it: their own parameters are none.
        replica = session.replica(session.variable("model") if mine else "model", model)
        if mine == 0:
            replica.push({name: a * 0 for name, a in replica.variable.read().tree.items()})
        step = session.counter("step", 0)
        session.barrier("linked", int(sys.argv[1])).wait()
        step.wait_for(mine)
        replica.pull()
        print("pulled", sorted({float(np.mean(a)) for a in of(replica.value)}), flush=True)
        names = replica.variable.read().tree
        replica.push({name: np.ones_like(a) for name, a in names.items()}, op="add")
        step.add(1)
        step.wait_for(int(sys.argv[1]))
        replica.pull()
        print("all", sorted({float(np.mean(a)) for a in of(replica.value)}), flush=True)
"""

PROGRAMS = {
    "torch": """
import torch
from turns import take_turns
net = torch.nn.ModuleDict({name: torch.nn.ParameterDict({
    "kernel": torch.randn(shape), "bias": torch.randn(shape[1])
}) for name, shape in (("hidden", (2, 3)), ("out", (3, 1)))})
take_turns(net, lambda net: [p.detach().numpy() for p in net.parameters()])
""",
    "jax": """
import jax, jax.numpy as jnp
from turns import take_turns
params = {
    "out": {"bias": jnp.zeros(1), "kernel": jnp.zeros((3, 1))},
    "hidden": {"bias": jnp.zeros(3), "kernel": jnp.zeros((2, 3))},
}
take_turns(params, jax.tree.leaves)
""",
    "keras": """
import os
from importlib.util import find_spec
os.environ["KERAS_BACKEND"] = "jax" if find_spec("jax") else "tensorflow"
import keras
from turns import take_turns
other = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(5)])
net = keras.Sequential([
    keras.layers.Input((2,)),
    keras.layers.Dense(3, name="hidden"),
    keras.layers.Dense(1, name="out"),
])
take_turns(net, lambda net: [keras.ops.convert_to_numpy(w) for w in net.weights])
""",
    "numpy": """
import numpy as np
from turns import take_turns
flat = {
    f"{name}.{leaf}": np.zeros(shape, np.float32)
    for name, leaf, shape in (
        ("hidden", "kernel", (2, 3)), ("hidden", "bias", 3), ("out", "kernel", (3, 1)),
        ("out", "bias", 1),
    )
}
take_turns(flat, lambda tree: tree.values())
""",
    "tensorflow": """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
from turns import take_turns
graph = tf.Graph()
with graph.as_default():
    made = []
    for layer, shape in (("hidden", (2, 3)), ("out", (3, 1))):
        with tf.compat.v1.variable_scope(layer):
            made.append(tf.compat.v1.get_variable("kernel", shape))
            made.append(tf.compat.v1.get_variable("bias", shape[1:]))
    start = tf.compat.v1.global_variables_initializer()
with tf.compat.v1.Session(graph=graph) as session:
    if os.environ["FIRST"] == "True":
        session.run(start)
    take_turns(session, lambda session: session.run(made))
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "turns.py").write_text(COMMON)
    for name, text in PROGRAMS.items():
        (tmp_path / f"with_{name}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "kinds",
    [("torch", "jax"), ("jax", "keras", "numpy"), ("tensorflow", "keras", "tensorflow")],
    ids="-".join,
)
def test_processes_with_different_frameworks_share_one_set_over_two_servers(
    kinds: tuple[str, ...], folder: Path
) -> None:
    missing = [kind for kind in kinds if find_spec(kind) is None]
    if missing:
        pytest.skip(f"needs {missing}")
    spec = cluster(folder, ps=2, worker=len(kinds))
    toml(spec, folder / "cluster.toml")
    where = ["--cluster", "cluster.toml"]
    started = []
    try:
        for n in range(2):
            words = ["serve", *where, "--job", "ps", "--task", str(n)]
            started.append(start("-m", "paceline", *words, folder=folder))
        for n, kind in enumerate(kinds):
            words = ["run", f"with_{kind}.py", *where, "--job", "worker", "--task", str(n)]
            # What frameworks warn of when they are imported is not meant here.
            program = start(
                "-W",
                "ignore",
                "-m",
                "paceline",
                *words,
                "--",
                str(len(kinds)),
                folder=folder,
                FIRST=str(n == 0),
            )
            started.append(program)
        out = [ended(program)[0] for program in started[2:]]
    finally:
        for program in started:
            program.send_signal(signal.SIGKILL)
            program.communicate()
    for n, text in enumerate(out):
        assert f"pulled [{float(n)}]\n" in text
        assert f"all [{float(len(kinds))}]\n" in text
