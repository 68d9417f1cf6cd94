"""JAX in workers: compiled functions and pytrees go out, arrays come back, threads are bounded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clusters import every_engine, quiet

import paceline
from paceline.preflight import limits

# A process imports JAX and compiles, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(180)

TARGET = jnp.array([1.0, -2.0, 0.5])


# How far a linear model is off.
errors = jax.jit(lambda weights, x: x @ (weights - TARGET))


def measure(policy: paceline.Variable[Any], worker: paceline.Worker) -> Iterator[Any]:
    key = jax.random.key(worker.seed)
    params = {"w": jnp.zeros(3)}
    while True:
        params = policy.read(like=params).tree
        assert isinstance(params["w"], jax.Array)
        key, part = jax.random.split(key)
        x = jax.random.normal(part, (8, 3))
        yield {"x": x, "error": errors(params["w"], x)}


@every_engine
def test_a_model_is_fitted_to_what_compiled_functions_measured(engine: str) -> None:
    params = {"w": jnp.zeros(3)}
    optimiser = optax.adam(0.1)
    state = optimiser.init(params)
    with quiet(2, engine, seed=0) as cluster:
        policy = cluster.variable("policy", params)
        for batch in cluster.collect(measure, policy, batch_size=2):
            data = batch.to("jax").data
            assert data["x"].shape == (2, 8, 3)
            assert isinstance(data["error"], jax.Array)
            gradient = {"w": jnp.einsum("nbi,nb->i", data["x"], data["error"]) / 16}
            updates, state = optimiser.update(gradient, state)
            params = jax.tree.map(jnp.add, params, updates)
            policy.assign(params)
            if jnp.abs(params["w"] - TARGET).max() < 0.2:
                break


def outputs(policy: paceline.Variable[Any], net: Any) -> Iterator[Any]:
    while True:
        net = policy.read(like=net).tree
        yield eqx.filter_jit(net)(jnp.ones(2))


@every_engine
def test_a_module_goes_to_the_workers_as_an_argument_and_as_a_variable(engine: str) -> None:
    def make(seed: int) -> Any:
        return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(seed))

    net = make(1)
    with quiet(1, engine) as cluster:
        policy = cluster.variable("policy", net)
        with cluster.collect(outputs, policy, make(0), batch_size=2) as batches:
            found = batches.next().data
    np.testing.assert_allclose(found, np.stack([net(jnp.ones(2))] * 2), rtol=1e-5)


def shares() -> Iterator[Any]:
    """The share of the work that the busiest thread has, and where JAX runs."""

    def spent() -> dict[str, int]:
        found = {}
        for task in Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[task.name] = int(fields[11]) + int(fields[12])
        return found

    work = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
    x = jnp.ones((1000, 1000))
    work(x).block_until_ready()
    before = spent()
    while sum((after := spent()).values()) - sum(before.values()) < 100:
        work(x).block_until_ready()
    took = [after[task] - before.get(task, 0) for task in after]
    yield {"share": max(took) / sum(took), "platform": jax.default_backend()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(limits()[0] < 2, reason="needs a second core")
def test_xla_computes_in_as_many_threads_as_a_worker_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    found = {}
    for threads in (1, 2):
        with quiet(1, worker_threads=threads) as cluster:
            batch = cluster.collect(shares, batch_size=1).next(timeout=120)
            assert batch.data["platform"] == ["cpu"]
            found[threads] = batch.data["share"][0]
    # With one thread the one that dispatches has a little; with two each has about half.
    assert found[1] > 0.75 > found[2]
