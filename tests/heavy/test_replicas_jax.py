"""Replicas of JAX trees, which never change: each pull gives a new one."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paceline import SchemaError, Session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def params(value: float = 0.0) -> dict[str, Any]:
    return {
        "hidden": {"kernel": jnp.full((2, 3), value), "bias": jnp.full(3, value)},
        "out": {"kernel": jnp.full((3, 1), value), "bias": jnp.full(1, value)},
    }


def test_a_jax_tree_is_replaced_and_only_when_there_is_another_version() -> None:
    with Session() as session:
        mine, theirs = session.replica("m", params(1.0)), session.replica("m", params(2.0))
        old = theirs.value
        version = theirs.pull()
        assert theirs.value is not old
        assert float(old["hidden"]["bias"][0]) == 2
        assert float(theirs.value["hidden"]["bias"][0]) == 1
        now = theirs.value
        assert theirs.pull() == version
        assert theirs.value is now
        # A step of the worker's own does not stay.
        theirs.value = jax.tree.map(lambda leaf: leaf + 5, now)
        theirs.pull()
        assert float(theirs.value["out"]["bias"][0]) == 1
        theirs.value["out"]["bias"] = jnp.zeros(1)
        theirs.pull()
        assert float(theirs.value["out"]["bias"][0]) == 1
        delta = jax.tree.map(jnp.ones_like, now)
        assert theirs.push(delta, op="add") == mine.pull()
        assert float(mine.value["out"]["kernel"][2, 0]) == 2


def test_a_jax_tree_that_was_pulled_owns_its_memory() -> None:
    with Session() as session:
        big = {"w": jnp.zeros(1 << 19)}
        replica = session.replica("m", big)
        replica.pull()
        held = replica.value["w"]
        for n in range(3):
            replica.push({"w": np.full(1 << 19, n + 1, np.float32)})
        assert float(held.max()) == 0


def test_an_equinox_module_keeps_its_functions_and_shares_with_a_dict() -> None:
    with Session() as session:
        net = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
        one = session.replica("m", net)
        assert [*one.variable.read().tree] == [
            "layers.0.bias",
            "layers.0.weight",
            "layers.1.bias",
            "layers.1.weight",
        ]
        flat = {name: np.zeros_like(a) for name, a in one.variable.read().tree.items()}
        session.replica("m", flat).push()
        one.pull()
        assert float(one.value(jnp.ones(2))[0]) == 0


def test_leaves_that_differ_are_named() -> None:
    with Session() as session:
        session.replica("m", params())
        other = params()
        other["out"]["kernel"] = jnp.zeros((3, 2))
        with pytest.raises(
            SchemaError,
            match=r"^replica 'm': leaf \$\['out\.kernel'\] is float32\[3,2\], declared",
        ):
            session.replica("m", other)
