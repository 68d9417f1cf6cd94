"""Which tasks a cluster has, and where they are."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paceline.core.errors import SchemaError, UnknownName

MAX_NAME = 256
# Beside `tcp:`; only launchers use the second.
OTHERS = ("unix:", "near:")
WATCHING = "evaluator"
ACTING = ("chief", "master", "worker", WATCHING)
"""Jobs that run no server, where none is called `ps`."""
GUESTS = ("session", "look", "reset", "restore", WATCHING)
"""Jobs of sessions that are none of a cluster's tasks, beside those of any other name."""
ALIKE = 0.8
"""How alike two names are, of 1, of which one is taken for the other misspelt."""

_JOB = re.compile(r"[^\s:/,]+")
_DEVICE = re.compile(r"/job:(?P<job>[^\s:/,]+)(?:/(?:task|replica|device|cpu|gpu)(?::[^/]*)+)*")
_HOST = re.compile(r"(?:\[[0-9a-fA-F:.%\w]+\]|[^\s:\[\]/]+):(?P<port>[0-9]{1,5})", re.ASCII)


class Task(NamedTuple):
    """One process of a job."""

    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read `ps:1` or `/job:ps/task:1`; of a job alone it is task 0.

        Raises:
            SchemaError: it is neither.
        """
        if not isinstance(text, str):
            raise SchemaError(f"a task is a text such as 'ps:1', not {text!r}")
        found = _DEVICE.fullmatch(text)
        if found is not None:
            task = re.search(r"/task:([0-9]+)(?:/|$)", text, re.ASCII)
            if task is not None or "/task:" not in text:
                return cls(found["job"], int(task[1]) if task else 0)
        else:
            job, colon, index = text.partition(":")
            if _JOB.fullmatch(job) and (not colon or (index.isascii() and index.isdigit())):
                return cls(job, int(index or 0))
        raise SchemaError(f"a task is written 'ps:1' or '/job:ps/task:1', not {text!r}")


class Spec:
    """The tasks of a cluster by job and number, and their addresses; it never changes.

    Args:
        cluster: for each job the list of its tasks' addresses, or a dict of them by task number:
            `host:port` or `unix:/path`. Job names are free.
        servers: which jobs and tasks (`ps:1`) run servers, where their names do not say so.

    Raises:
        SchemaError: something in it is none of that; the message says where, and what was found.
    """

    __slots__ = ("_chosen", "_tasks")

    def __init__(
        self, cluster: Mapping[str, Any] | Spec, *, servers: Iterable[str] | None = None
    ) -> None:
        self._tasks: dict[str, dict[int, str]]
        self._chosen = None if servers is None else _names(servers)
        if isinstance(cluster, Spec):
            self._tasks = cluster._tasks
            self._chosen = cluster._chosen if servers is None else self._chosen
            return
        found: Any = cluster
        if not isinstance(found, Mapping) or not found:
            raise SchemaError(f"a cluster is a dict of jobs with their tasks, not {_cut(cluster)}")
        self._tasks = {_job(job): _addresses(job, tasks) for job, tasks in cluster.items()}
        seen: dict[str, Task] = {}
        for task in self.tasks():
            address = self.address(*task)
            if address in seen and not address.endswith(":0"):
                raise SchemaError(f"cluster: {seen[address]} and {task} are both at {address}")
            seen[address] = task

    def __repr__(self) -> str:
        jobs = ", ".join(f"{job}: {len(tasks)}" for job, tasks in self._tasks.items())
        return f"<{type(self).__name__} of {jobs}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    @property
    def digest(self) -> str:
        """The same for equal clusters only, in whatever order they were written down."""
        content = json.dumps(self._tasks, sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()

    def num_tasks(self, job: str) -> int:
        """How many tasks a job has.

        Raises:
            UnknownName: there is no such job; the message lists those there are.
        """
        return len(self._of(job))

    def task_indices(self, job: str) -> list[int]:
        """The numbers of a job's tasks, in order; raises as `num_tasks`."""
        return list(self._of(job))

    def address(self, job: str, index: int) -> str:
        """Where a task is, as it was written down.

        Raises:
            UnknownName: there is no such task; the message lists those there are.
        """
        tasks = self._of(job)
        if index not in tasks:
            raise UnknownName(f"no task {job}:{index} in the cluster; job '{job}' has {[*tasks]}")
        return tasks[index]

    def target(self, job: str, index: int) -> str:
        """What opens a session on the server of a task; raises as `address`."""
        address = self.address(job, index)
        return address if address.startswith(OTHERS) else f"tcp:{address}"

    def tasks(self, jobs: Iterable[str] | None = None) -> list[Task]:
        """All tasks, or those of some jobs, in order."""
        chosen = self._tasks if jobs is None else jobs
        return [Task(job, index) for job in chosen for index in self._of(job)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """What makes the same cluster again: a list where tasks are numbered from 0 on."""
        return {
            job: [*tasks.values()] if [*tasks] == [*range(len(tasks))] else dict(tasks)
            for job, tasks in self._tasks.items()
        }

    def numbered(self) -> dict[str, dict[int, str]]:
        """For each job its tasks' addresses by number."""
        return {job: dict(tasks) for job, tasks in self._tasks.items()}

    def servers(self, chosen: Iterable[str] | None = None) -> list[Task]:
        """The tasks that run servers, the first of them first.

        These are the jobs and tasks (`ps:1`) that were `chosen`, here or when the spec was made. By
        default they are the job `ps` or, where there is none, all jobs but `chief`, `master`,
        `worker` and `evaluator`.

        Raises:
            SchemaError: there are none.
            UnknownName: there is no such job or task.
        """
        chosen = self._chosen if chosen is None else _names(chosen)
        if chosen is None:
            jobs = ["ps"] if "ps" in self._tasks else [j for j in self._tasks if j not in ACTING]
            if not jobs:
                raise SchemaError(
                    f"no task of the jobs {self.jobs} runs a server by its name: say which do, as"
                    f" servers=[{self.jobs[0]!r}]"
                )
            return self.tasks(jobs)
        found: dict[Task, None] = {}
        for each in chosen:
            alone = each in self._tasks or ":" not in each
            for task in self.tasks([each]) if alone else [Task.parse(each)]:
                self.address(*task)
                found[task] = None
        if not found:
            raise SchemaError(f"servers={[*chosen]} are none; there are the jobs {self.jobs}")
        return list(found)

    def difference(self, other: Spec) -> str | None:
        """Where another cluster first differs, seen from this one; `None` where it does not."""
        for job in dict.fromkeys([*self._tasks, *other._tasks]):
            mine, theirs = self._tasks.get(job, {}), other._tasks.get(job, {})
            for index in sorted({*mine, *theirs}):
                here, there = mine.get(index), theirs.get(index)
                if here != there:
                    return f"{job}:{index} is {_at(here)} here, {_at(there)} there"
        return None

    def _of(self, job: str) -> dict[int, str]:
        if job not in self._tasks:
            listed = [*dict.fromkeys([*_near(job, self.jobs), *self._tasks])]
            raise UnknownName(f"no job {job!r} in the cluster; there are {listed}")
        return self._tasks[job]


def outside(spec: Spec, job: str) -> bool:
    """Whether that is the job of tasks that look at a cluster and are none of its own."""
    return job == WATCHING and job not in spec.jobs


def check_guest(spec: Spec, job: str) -> None:
    """Whether a session may have a job that the cluster has not.

    Raises:
        UnknownName: it reads like one that the cluster has; the message lists that one first.
    """
    if not (job in GUESTS or job.endswith(".operations")) and _near(job, spec.jobs):
        try:
            spec.num_tasks(job)
        except UnknownName as e:
            said = "a session that is none of them has no job, or one of another name"
            raise UnknownName(f"{e}; {said}") from None


def _near(job: str, jobs: Iterable[str]) -> list[str]:
    """Those whose names are like that one, the nearest first."""
    plain = {each.casefold(): each for each in jobs}
    near = difflib.get_close_matches(job.casefold(), plain, cutoff=ALIKE)
    return [plain[each] for each in near]


def _names(servers: Any) -> tuple[str, ...]:
    if isinstance(servers, str):
        servers = (servers,)
    if not isinstance(servers, Iterable) or not all(isinstance(each, str) for each in servers):
        raise SchemaError(f"servers: a list of jobs and tasks such as 'ps:1', not {_cut(servers)}")
    return tuple(servers)


def _job(job: Any) -> str:
    if not isinstance(job, str) or not _JOB.fullmatch(job) or len(job) > MAX_NAME:
        raise SchemaError(
            f"cluster: a job has a name of 1 to {MAX_NAME} characters without blanks, ':', '/' and"
            f" ',', not {_cut(job)}"
        )
    return job


def _addresses(job: str, tasks: Any) -> dict[int, str]:
    where = f"cluster.{job}"
    if isinstance(tasks, Mapping):
        numbered = {_index(where, index): address for index, address in tasks.items()}
        pairs = sorted(numbered.items())
        if len(pairs) != len(tasks):
            raise SchemaError(f"{where}: a task number is there twice: {_cut([*tasks])}")
    elif isinstance(tasks, (list, tuple)):
        pairs = list(enumerate(tasks))
    else:
        raise SchemaError(
            f"{where}: a job is a list of addresses, or a dict of them by task number, not"
            f" {_cut(tasks)}"
        )
    if not pairs:
        raise SchemaError(f"{where}: a job has at least one task")
    return {index: _address(f"{where}[{index}]", address) for index, address in pairs}


def _index(where: str, index: Any) -> int:
    # TOML and JSON have no other keys than texts.
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index, re.ASCII):
        return int(index)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise SchemaError(f"{where}: a task's number is a whole number, 0 or more, not {index!r}")
    return index


def _address(where: str, address: Any) -> str:
    if isinstance(address, str):
        if address.startswith(OTHERS) and len(address) > 5:
            return address
        plain = address.removeprefix("tcp:").removeprefix("//")
        found = _HOST.fullmatch(plain)
        if found is not None and int(found["port"]) <= 65535:
            return plain
    raise SchemaError(
        f"{where}: an address is 'host:port', with a port of 0 to 65535, or 'unix:/path', not"
        f" {_cut(address)}"
    )


def _at(address: str | None) -> str:
    return "missing" if address is None else f"at {address}"


def _cut(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 80 else f"{text[:77]}..."
