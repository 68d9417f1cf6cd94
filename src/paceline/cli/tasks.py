"""What the commands for one task of a cluster share: who it is, and where the others are."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paceline import ClusterSpec, Disconnected, PacelineError, Refused, Tls
from paceline import secret as secrets
from paceline.core import messages as m
from paceline.core.spec import Task, outside
from paceline.reach import Joining, Waiting, called
from paceline.transports.base import Address
from paceline.transports.tcp import host_and_port
from paceline.transports.tls import found as find

NAME_LIMIT, LOOK_AGAIN, LOOK_LIMIT = 60.0, 0.25, 2.0
"""Seconds to wait for this host's own name, from one look to the next, and for a server."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def of_a_task(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which task of which cluster."""
    for option in (
        click.option("--tls-ca", type=FILE, help="Certificates of those whose signature counts."),
        click.option("--tls-key", type=FILE, help="The private key of --tls-cert."),
        click.option("--tls-cert", type=FILE, help="Encrypt TCP; this process's certificate."),
        click.option("--secret-file", type=FILE, help="Of mode 0600; the same for all processes."),
        click.option("--task", type=click.IntRange(0), help="Its number; 0 if there is one alone."),
        click.option("--job", help="The job that this process is a task of."),
        click.option("--cluster", type=FILE, help="TOML or JSON; without it TF_CONFIG or Slurm."),
    ):
        command = option(command)
    return command


def described(cluster: Path | None) -> ClusterSpec:
    """The spec of that file, else the environment's.

    Raises:
        PacelineError: there is none, or it is malformed.
    """
    return ClusterSpec.from_environment() if cluster is None else ClusterSpec.from_file(cluster)


def found(cluster: Path | None, job: str | None, task: int | None) -> ClusterSpec:
    """The spec, with this process's task.

    Raises:
        PacelineError: there is none, it is malformed, or it has no such task.
        UsageError: nothing says which task this is.
    """
    spec = described(cluster)
    if job is None and spec.task is not None:
        job, task = spec.task.job, spec.task.number if task is None else task
    if job is None:
        raise click.UsageError(f"say which task this is: --job, one of {spec.jobs}, and --task")
    there = [0] if outside(spec, job) else spec.task_indices(job)
    if task is None and len(there) > 1:
        raise click.UsageError(f"say which task of job '{job}' this is: --task, one of {there}")
    return ClusterSpec(spec, task=(job, there[0] if task is None else task))


def await_name(spec: ClusterSpec) -> None:
    """Wait until the name is known under which the others find this server, `NAME_LIMIT` at most.

    Where names of containers are published once these run, a server may be there before its own.
    """
    assert spec.task is not None
    target = spec.target(*spec.task)
    if not target.startswith("tcp:"):
        return
    host, port = host_and_port(target.removeprefix("tcp:"))
    waiting = Waiting(f"{spec.task} waits until its own name {host} is known", f"{host} is known")
    until = time.monotonic() + NAME_LIMIT
    while time.monotonic() < until:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as e:
            waiting.goes_on(e.strerror)
            time.sleep(LOOK_AGAIN)
        else:
            waiting.over()
            return


def certified(
    spec: ClusterSpec, cert: Path | None, key: Path | None, ca: Path | None
) -> Tls | None:
    """What TCP is encrypted with: the files of the options, else as the spec or the environment."""
    return find(Tls(cert, key, ca) if cert or key or ca else None, spec.tls)


def introduce(
    spec: ClusterSpec, secret_file: Path | None, tls: Tls | None, what: str
) -> PacelineError | None:
    """Print what this process is, where the servers should be, and who is missing.

    Returns why a server would refuse this process, if one does.
    """
    own = spec.task
    jobs = ", ".join(f"{job}: {spec.num_tasks(job)}" for job in spec.jobs)
    click.echo(f"{own} of a cluster of {jobs}: process {os.getpid()} {what}")
    servers = [task for task in spec.servers() if task != own]
    targets = [spec.target(*task) for task in servers]
    secret = secrets.found(None, secret_file, targets, str(own))
    here: set[str] = {str(own)}
    refused: PacelineError | None = None
    for task, target in zip(servers, targets, strict=True):
        state = "it is there"
        try:
            members = _look(target, secret, tls, spec)
            here |= {str(task), *members}
            refused = refused or _held(own, members.get(str(own)))
        except Disconnected:
            state = "nobody is there yet"
        except PacelineError as e:
            state, refused = str(e), refused or e
        click.echo(f"  {task} should be at {target}: {state}")
    missing = [str(t) for t in spec.tasks() if str(t) not in here]
    if missing and refused is None:
        click.echo(f"  missing: {', '.join(missing)}")
    return refused


def _look(target: str, secret: bytes, tls: Tls | None, spec: ClusterSpec) -> dict[str, int | None]:
    """The members that a server knows, asked by a guest: the process of each that has a connection.

    Raises:
        Disconnected: nobody is there.
        Refused: its secret is another one, or its cluster another one than `spec`.
    """
    servers = tuple(map(str, spec.servers()))
    address = Address.parse(target)
    connection = called(address, secret, tls, LOOK_LIMIT)
    left = False
    try:
        Joining("look", -1, lambda: secret, spec.numbered(), servers).join(connection, b"")
        members = connection.call(m.Stats()).content["members"]
        left = connection.leave()
        return {
            name: each["process"] for name, each in members.items() if not name.startswith("look:")
        }
    finally:
        connection.close(left=left)


def _held(task: Task | None, process: int | None) -> Refused | None:
    if process is None:
        return None
    return Refused(f"task {task} is held by process {process} and alive: another cannot have it")
