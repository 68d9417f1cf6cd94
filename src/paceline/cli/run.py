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
    `paceline.ClusterSpec.from_environment()` has the cluster. The exit status is the program's.
    Options of its own that this command has too go behind `--`.
    """
    try:
        spec = found(cluster, job, task)
        tls = certified(spec, tls_cert, tls_key, tls_ca)
        introduce(spec, secret_file, tls, f"runs {script}")
    except PacelineError as e:
        raise click.ClickException(str(e)) from e
    assert spec.task is not None
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
