"""A Ray cluster as it is joined, and the room that tasks are given in it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RuntimeEnvSetupError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from paceline.core.errors import Disconnected, Refused, SchemaError, Unsupported
from paceline.engines._actor import REMEDY
from paceline.engines.wishes import Ray

_log = logging.getLogger("paceline")

SETTLE = 5.0
"""Seconds that Ray may need to find room which there is, and to know what was given back."""

LOOK = 0.2
"""Seconds from one look at a cluster that is waited for to the next."""


def connected(asked: Ray) -> bool:
    """Join the cluster that was asked for; whether the program had not done so itself.

    Raises:
        SchemaError: it had, and something was asked for that can only be said when joining.
        Disconnected: there is no cluster at that address.
        Unsupported: it has another version of Ray or Python.
    """
    if ray.is_initialized():
        said = [name for name in ("address", "runtime_env") if getattr(asked, name) is not None]
        if said:
            raise SchemaError(
                f"Ray({'=, '.join(said)}=): the program has called ray.init already: say it there"
            )
        return False
    where = "the Ray cluster" + (f" at {asked.address!r}" if asked.address else "")
    options: dict[str, Any] = {"address": asked.address, "log_to_driver": asked.log}
    if asked.runtime_env is not None:
        options["runtime_env"] = dict(asked.runtime_env)
    try:
        ray.init(**options)
    except ConnectionError as e:
        raise Disconnected(
            f"join {where}: {_line(e)}; `ray start --head` starts one, `ray stop` forgets one"
            " that has ended, Ray(address=) says where"
        ) from e
    except RuntimeError as e:
        if "mismatch" not in str(e):
            raise
        raise Unsupported(f"join {where}: {_line(e)}") from e
    except ValueError as e:
        raise SchemaError(f"join {where}: {_line(e)}") from e
    return True


class Room:
    """What the tasks of one launch take of a cluster: a placement group, until `close`."""

    def __init__(self, asked: Ray) -> None:
        self._asked = asked
        self._group: Any = None
        self._bundles: dict[str, int] = {}

    def reserve(self, tasks: Sequence[str]) -> None:
        """Have room for tasks of these names.

        Raises:
            Refused: there is less than they take; the message has the numbers.
        """
        needs = [(task, need) for task in tasks if (need := self._asked.of(task))]
        if not needs:
            return
        total: Counter[str] = Counter()
        for _, need in needs:
            total.update(need)
        wait, began = self._asked.wait, time.monotonic()
        while short := self._short(total):
            if time.monotonic() - began >= wait:
                raise self._refused(needs, total, f"there is less {' and '.join(short)}")
            time.sleep(min(LOOK, wait))
        left = max(0.0, wait - (time.monotonic() - began))
        group = placement_group([need for _, need in needs], strategy=self._asked.strategy)
        try:
            ray.get(group.ready(), timeout=max(left, SETTLE))
        except (GetTimeoutError, RayError) as e:
            remove_placement_group(group)
            what = f"no room was found for that (strategy={self._asked.strategy!r})"
            raise self._refused(needs, total, what) from e
        except BaseException:
            remove_placement_group(group)
            raise
        self._group = group
        self._bundles = {task: index for index, (task, _) in enumerate(needs)}

    def options(self, task: str, node: str | None) -> dict[str, Any]:
        """How the actor of a task is made; on that `node`, where it has to be."""
        need = dict(self._asked.of(task))
        found: dict[str, Any] = {"num_cpus": need.pop("CPU", 0)}
        if "GPU" in need:
            found["num_gpus"] = need.pop("GPU")
        if "memory" in need:
            found["memory"] = need.pop("memory")
        if need:
            found["resources"] = need
        if task in self._bundles:
            found["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[task]
            )
        elif node is not None:
            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        elif task.partition(":")[0] == "ps":
            here = ray.get_runtime_context().get_node_id()
            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=True)
        return found

    def moved(self, task: str, address: str, before: str, now: dict[str, Any]) -> None:
        """Say that Ray has started a task again on another node, and why."""
        alive = any(each["NodeID"] == before and each["Alive"] for each in ray.nodes())
        _log.warning(
            "%s was on the node %s (%s), which %s; Ray has placed it on %s (%s)",
            task, address, before[:8], "lives" if alive else "is dead",
            now["address"], now["node"][:8],
        )  # fmt: skip

    def close(self) -> None:
        """Give the room back. Idempotent."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)

    def _short(self, total: Counter[str]) -> list[str]:
        there = ray.cluster_resources()
        return [name for name, amount in sorted(total.items()) if there.get(name, 0) < amount]

    def _refused(
        self, needs: list[tuple[str, dict[str, float]]], total: Counter[str], why: str
    ) -> Refused:
        there, free = ray.cluster_resources(), ray.available_resources()
        told = ", ".join(
            f"{amount:g} {name} (it has {there.get(name, 0):g}, {free.get(name, 0):g} free)"
            for name, amount in sorted(total.items())
        )
        nodes = sum(each["Alive"] for each in ray.nodes())
        waited = f" after {self._asked.wait:g} s" if self._asked.wait else ""
        return Refused(
            f"{len(needs)} tasks on the Ray cluster of {nodes} nodes{waited}: {why}; they ask for"
            f" {told}; Ray(worker=...) says what each takes, Ray(wait=) waits for more"
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def became(error: BaseException) -> str:
    """What Ray says of an actor that does not answer, in one line."""
    said = " ".join(str(error).split())
    if "node has died" in said or "node was terminated" in said:
        return f"its node died ({said})"
    if isinstance(error, RuntimeEnvSetupError):
        return f"its environment could not be made: {said}"
    if "failed to import" in said or "No module named 'paceline'" in said:
        return f"paceline cannot be imported where it was placed; {REMEDY}: {said}"
    if isinstance(error, ActorDiedError):
        _, _, last = said.rpartition("The actor is dead because ")
        return f"its process died: {last or said}"
    return f"its process, or its node, cannot be reached any more: {said}"
