"""What can be asked of an engine beside its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from paceline.core.clock import checked_timeout
from paceline.core.errors import SchemaError

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
KEYS = ("num_cpus", "num_gpus", "memory", "resources")

MIRROR = "mirror"
"""The job of tasks that wait for others most of the time."""

_WORKER: Mapping[str, Any] = MappingProxyType({"num_cpus": 1})


@dataclass(frozen=True)
class Ray:
    """Workers and servers as actors of a Ray cluster: `Cluster(workers=64, engine=Ray(...))`.

    `engine="ray"` is `Ray()`. Ray itself is imported, and its cluster joined, by `Cluster`. If the
    program has called `ray.init`, that connection is used, and stays; else a cluster at `address`,
    at `RAY_ADDRESS`, or one that runs on this machine; else one is started here, and ended with
    the `Cluster`.

    Args:
        address: of the cluster, such as `10.0.0.1:6379` or `auto`.
        worker: what each worker takes: `num_cpus`, `num_gpus`, `memory` in bytes, and `resources`
            that the cluster's nodes were given names for: `{"num_gpus": 0.25}`.
        jobs: the same for the workers of some jobs, in place of `worker`: `{"eval": {...}}`.
        ps: the same for each server. By default it takes nothing and is on the node of this
            program, if there is one, where both share memory.
        strategy: how Ray lays them over its nodes, those of its placement groups: `PACK`, `SPREAD`,
            `STRICT_PACK`, `STRICT_SPREAD`.
        wait: seconds to wait for a cluster that has less than that.
        runtime_env: of Ray's, for the connection that is made here, such as `{"working_dir": "."}`.
        log: whether what workers print comes to this program.

    Raises:
        SchemaError: there is no such thing to be asked for; the message says what there is.
    """

    name: ClassVar[str] = "ray"

    address: str | None = None
    worker: Mapping[str, Any] = field(default_factory=lambda: _WORKER)
    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ps: Mapping[str, Any] = field(default_factory=dict)
    strategy: Strategy = "PACK"
    wait: float = 0.0
    runtime_env: Mapping[str, Any] | None = None
    log: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SchemaError(f"Ray(strategy={self.strategy!r}): it is one of {list(STRATEGIES)}")
        if checked_timeout(self.wait, "Ray(wait=)") is None:
            raise SchemaError("Ray(wait=None): say for how many seconds")
        asked = {"worker": self.worker, "ps": self.ps}
        for key, each in {**asked, **{f"jobs[{k!r}]": v for k, v in self.jobs.items()}}.items():
            _check(key, each)

    def of(self, task: str) -> dict[str, float]:
        """What a task takes, by the name of the resource as Ray's clusters count it."""
        job = task.partition(":")[0]
        if job == MIRROR:
            return {}
        asked = self.ps if job == "ps" else self.jobs.get(job, self.worker)
        named = {
            "CPU": asked.get("num_cpus", 0),
            "GPU": asked.get("num_gpus", 0),
            "memory": asked.get("memory", 0),
            **asked.get("resources", {}),
        }
        return {name: float(amount) for name, amount in named.items() if amount}


def _check(key: str, asked: Mapping[str, Any]) -> None:
    if not set(asked) <= set(KEYS):
        raise SchemaError(f"Ray({key}={asked!r}): it has {', '.join(KEYS)}, those that are wanted")
    amounts = {k: v for k, v in asked.items() if k != "resources"}
    amounts |= asked.get("resources", {})
    for name, amount in amounts.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
            raise SchemaError(f"Ray({key}=): {name}={amount!r} is no amount: a number from 0 on")
