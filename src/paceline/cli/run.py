"""`paceline run`: run a program as a task of a cluster that is started by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from paceline import PacelineError
from paceline.cli.tasks import FILE, certified, found, introduce, of_a_task
from paceline.core.environment import VARIABLES
from paceline.secret import VARIABLE
from paceline.transports.tls import VARIABLES as TLS_VARIABLES


class NotBegun(click.ClickException):
    """The program was not run."""

    exit_code = 2


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=FILE)
@of_a_task
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    script: Path,
    cluster: Path | None,
    job: str | None,
    task: int | None,
    secret_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    args: tuple[str, ...],
) -> None:
    """Run the Python program SCRIPT, with its ARGS, as a task of a cluster.

    In it `paceline.Session.from_environment()` opens this task's session, and
    `paceline.ClusterSpec.from_environment()` has the cluster. The exit status is the program's,
    or 2 where it was not run: a server that is there would refuse it, or there is no such task.
    Options of its own that this command has too go behind `--`.
    """
    try:
        spec = found(cluster, job, task)
        tls = certified(spec, tls_cert, tls_key, tls_ca)
        refused = introduce(spec, secret_file, tls, f"runs {script}")
    except PacelineError as e:
        raise NotBegun(str(e)) from e
    if refused is not None:
        raise NotBegun(str(refused))
    assert spec.task is not None
    if spec.task in spec.servers():
        click.echo(
            f"  {spec.task} runs a server: `paceline serve` does that, if {script} makes no"
            " paceline.Server"
        )
    own = {"type": spec.task.job, "index": spec.task.number}
    content = {"cluster": spec.as_dict(), "servers": [*map(str, spec.servers())], "task": own}
    environment = {**os.environ, VARIABLES[0]: json.dumps(content)}
    if secret_file is not None:
        environment[VARIABLE] = str(secret_file.absolute())
    for part, variable in TLS_VARIABLES.items():
        file = getattr(tls, part, None)
        if file is not None:
            environment[variable] = str(Path(file).absolute())
    sys.stdout.flush()
    # In the place of this process: signals, output and the exit status are the program's own.
    os.execve(sys.executable, [sys.executable, str(script), *args], environment)
