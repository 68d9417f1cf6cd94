"""A cluster's tasks, from a dict, a file or the environment."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.environment import of_content, of_environment
from paceline.core.errors import SchemaError
from paceline.core.spec import Spec, Task, outside

TLS = ["cert", "key", "ca"]


class ClusterSpec(Spec):
    """The tasks of a cluster by job and number, and their addresses; it never changes.

    Specs are equal when they have the same tasks at the same addresses; `digest` is a text that is
    then the same.

    Args:
        cluster: for each job the list of its tasks' addresses, or a dict of them by task number:
            `host:port` or `unix:/path`. Job names are free. Or another spec.
        servers: which jobs and tasks (`ps:1`) run servers; by default `ps` or, where there is no
            such job, all but `chief`, `master`, `worker` and `evaluator`.
        task: the job and number of this process.
        tls: this host's certificate files: any of `cert`, `key` and `ca`, see `Tls`. They are no
            part of the cluster, and other hosts may have others.

    Raises:
        SchemaError: something in it is none of that; the message says where, and what was found.
    """

    __slots__ = ("_task", "_tls")

    def __init__(
        self,
        cluster: Mapping[str, Any] | Spec,
        *,
        servers: Iterable[str] | None = None,
        task: tuple[str, int] | None = None,
        tls: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(cluster, servers=servers)
        self._task = cluster.task if isinstance(cluster, ClusterSpec) else None
        if task is not None:
            self._task = Task(*task)
            if not outside(self, self._task.job):
                self.address(*task)
        self._tls = cluster.tls if isinstance(cluster, ClusterSpec) else {}
        if tls is not None:
            self._tls = _files("tls", tls)

    @property
    def task(self) -> Task | None:
        """The job and number of this process, where a file or the environment said so."""
        return self._task

    @property
    def tls(self) -> dict[str, str]:
        """The certificate files that it was given, or its file names; none for no encryption."""
        return dict(self._tls)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a file in TOML, or in JSON if that is how its name ends.

        It has a table `cluster`; maybe `task` with `type` and `index`, as TF_CONFIG has; and maybe
        a list `servers` of the jobs that run servers, and a table `tls` with the files `cert`,
        `key` and `ca`, whose paths begin at the folder of this file.

        Raises:
            OSError: there is no such file.
            SchemaError: it is malformed; the message has the file, the field and what was found.
        """
        path = Path(path)
        text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as e:
            kind = "JSON" if path.suffix == ".json" else "TOML"
            raise SchemaError(f"{path} is not {kind}: {e}") from None
        spec, task = of_content(str(path), found)
        files = _files(f"{path}: tls", found.get("tls", {}))
        return cls(spec, task=task, tls={name: str(path.parent / f) for name, f in files.items()})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ClusterSpec:
        """What `paceline run`, TF_CONFIG or Slurm say of the cluster and of this process.

        TF_CONFIG is JSON: `{"cluster": {job: [addresses]}, "task": {"type": job, "index": n}}`.
        Under Slurm the ranks of a step become tasks in the order of PACELINE_JOBS (by default
        `ps=1,chief=1,worker=*`); a rank is at its node, at port PACELINE_PORT (4032) plus its place
        among the node's ranks, which fill the nodes in order (`--distribution=block`).

        Raises:
            SchemaError: there is none of these, or one is malformed; the message has the field and
                what was found.
        """
        spec, task = of_environment(os.environ if environment is None else environment)
        return cls(spec, task=task)


def _files(where: str, found: Any) -> dict[str, str]:
    if not isinstance(found, Mapping):
        raise SchemaError(f"{where}: it is a table of files, {TLS}, not {found!r}")
    for name, path in found.items():
        if name not in TLS or not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise SchemaError(f"{where}.{name}: it is the path of one of {TLS}, not {path!r}")
    return {name: str(path) for name, path in found.items()}
