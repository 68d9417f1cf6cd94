"""A cluster as others write it down: TF_CONFIG, and what Slurm tells its tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import SchemaError, UnknownName
from paceline.core.spec import Spec, Task, outside

VARIABLES = ("PACELINE_CLUSTER", "TF_CONFIG")
"""Where a cluster is looked for, in this order; both are written alike."""

PORT = 4032
JOBS = "ps=1,chief=1,worker=*"


def of_environment(environment: Mapping[str, str]) -> tuple[Spec, Task | None]:
    """The cluster that variables of the environment tell of, and which task this process is.

    Raises:
        SchemaError: a variable is malformed, the message says which field of it and what was
            found; or there is none.
    """
    for name in VARIABLES:
        if environment.get(name, "").strip():
            return of_config(name, environment[name])
    if "SLURM_PROCID" in environment:
        return of_slurm(environment)
    raise SchemaError(
        "no cluster in the environment: neither TF_CONFIG nor Slurm's variables (SLURM_PROCID) are"
        " set; `paceline run` sets it, or give a ClusterSpec"
    )


def of_config(name: str, text: str) -> tuple[Spec, Task | None]:
    """What a variable such as TF_CONFIG says.

    Raises:
        SchemaError: it is malformed; the message says which field, and what was found.
    """
    try:
        found = json.loads(text)
    except ValueError as e:
        raise SchemaError(f"{name} is not JSON: {e}: {text[:60]!r}") from None
    return of_content(name, found)


def of_content(source: str, found: Any) -> tuple[Spec, Task | None]:
    """The cluster, and the task if there is one, of `{"cluster": ..., "task": ...}`.

    Raises:
        SchemaError: it is not that; the message says which field, and what was found.
    """
    if isinstance(found, dict) and "sparseCluster" in found:
        raise SchemaError(
            f"{source}: the field 'sparseCluster' has a part of the cluster, another one in each"
            " process: all need the whole one (in a TFJob, enableDynamicWorker: false)"
        )
    if not isinstance(found, dict) or "cluster" not in found:
        has = [*found] if isinstance(found, dict) else repr(found)[:60]
        raise SchemaError(f"{source}: the field 'cluster' is missing; found {has}")
    try:
        spec = Spec(found["cluster"], servers=found.get("servers"))
        if "servers" in found:
            spec.servers()
    except (SchemaError, UnknownName) as e:
        raise SchemaError(f"{source}: {e}") from None
    told = found.get("task")
    if told is None:
        return spec, None
    if not isinstance(told, dict):
        raise SchemaError(f'{source}: task: it is {{"type": job, "index": number}}, not {told!r}')
    job, index = told.get("type"), told.get("index", 0)
    if not isinstance(job, str):
        raise SchemaError(f"{source}: task.type: a job's name is a text, not {job!r}")
    # Launchers that fill in templates write numbers as texts.
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise SchemaError(f"{source}: task.index: it is a whole number, not {index!r}")
    if outside(spec, job):
        return spec, Task(job, index)
    if job not in spec.jobs or index not in spec.task_indices(job):
        there = {each: spec.task_indices(each) for each in spec.jobs}
        raise SchemaError(f"{source}: task: {job}:{index} is not in the cluster, which has {there}")
    return spec, Task(job, index)


def of_slurm(environment: Mapping[str, str]) -> tuple[Spec, Task]:
    """What Slurm tells the tasks of one step.

    Ranks become tasks in the order of `PACELINE_JOBS` (default `ps=1,chief=1,worker=*`, where one
    job takes what is left). A rank is at its node, at port `PACELINE_PORT` (default 4032) plus its
    place among the node's ranks. Ranks fill the nodes in order, as with `--distribution=block`.

    Raises:
        SchemaError: a variable is missing or malformed; the message says which.
    """
    counts = _per_node(environment)
    nodes = expanded(_text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    if len(counts) != len(nodes):
        raise SchemaError(
            f"Slurm's variables: {len(nodes)} nodes ({', '.join(nodes[:8])}), but tasks per node"
            f" for {len(counts)}"
        )
    port = _number(environment.get("PACELINE_PORT", str(PORT)), "PACELINE_PORT")
    places = [
        f"{node}:{port + local}"
        for node, count in zip(nodes, counts, strict=True)
        for local in range(count)
    ]
    rank = _number(_text(environment, "SLURM_PROCID"), "SLURM_PROCID")
    if rank >= len(places):
        raise SchemaError(f"SLURM_PROCID is {rank}, but the step has {len(places)} tasks")
    tasks = _dealt(environment.get("PACELINE_JOBS", JOBS), len(places))
    cluster: dict[str, list[str]] = {}
    for task, place in zip(tasks, places, strict=True):
        cluster.setdefault(task.job, []).append(place)
    return Spec(cluster), tasks[rank]


def expanded(nodes: str) -> list[str]:
    """The names that a node list such as `gpu[01-03,7],login` stands for.

    Raises:
        SchemaError: it is none.
    """
    found: list[str] = []
    # A comma inside brackets separates numbers.
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        made = [""]
        for text, numbers in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            ends = [text] if text else _numbers(nodes, numbers)
            made = [start + end for start in made for end in ends]
        found += made
    if not found or nodes.count("[") != nodes.count("]"):
        raise SchemaError(f"Slurm's node list is malformed: {nodes!r}")
    return found


def _numbers(nodes: str, text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part, re.ASCII)
        if match is None:
            raise SchemaError(f"Slurm's node list is malformed: {part!r} in {nodes!r}")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < 1 << 16:
            raise SchemaError(f"Slurm's node list is malformed: {part!r} in {nodes!r}")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _per_node(environment: Mapping[str, str]) -> list[int]:
    """Read `2(x3),1`: two tasks on each of three nodes, and one on the next."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in environment:
        name = "SLURM_TASKS_PER_NODE"
    counts: list[int] = []
    for part in _text(environment, name).split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part, re.ASCII)
        if match is None:
            raise SchemaError(f"{name} is malformed: {part!r} in {environment[name]!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _dealt(jobs: str, ranks: int) -> list[Task]:
    """The task of each rank."""
    counts: dict[str, int | None] = {}
    for part in jobs.split(","):
        job, _, count = part.strip().partition("=")
        if not job or not (count == "*" or (count.isascii() and count.isdigit())):
            raise SchemaError(f"PACELINE_JOBS is written {JOBS!r}; found {part!r} in {jobs!r}")
        counts[job] = None if count == "*" else int(count)
    rest = [job for job, count in counts.items() if count is None]
    fixed = sum(count for count in counts.values() if count is not None)
    if len(rest) > 1 or fixed > ranks or (not rest and fixed != ranks):
        raise SchemaError(f"PACELINE_JOBS={jobs!r} does not fit a step of {ranks} tasks")
    return [
        Task(job, index)
        for job, count in counts.items()
        for index in range(ranks - fixed if count is None else count)
    ]


def _text(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise SchemaError(f"Slurm's variables: {' and '.join(names)} is not set")


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise SchemaError(f"{name} is a whole number, not {text!r}")
    return int(text)
