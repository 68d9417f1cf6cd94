"""`paceline serve`: be a server of a cluster that is started by hand."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from paceline import PacelineError, Server
from paceline.cli.tasks import await_name, certified, found, introduce, of_a_task
from paceline.server.loop import MAX_CONNECTIONS

INTERRUPTED = 130


@click.command()
@of_a_task
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=MAX_CONNECTIONS,
    show_default=True,
    help="New sessions are refused beyond.",
)
@click.pass_context
def serve(
    context: click.Context,
    /,
    cluster: Path | None,
    job: str | None,
    task: int | None,
    secret_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    max_connections: int,
) -> None:
    """Serve a task's variables and queues until the cluster is done.

    It is done when every task that runs no server has been there and closed its session, or 2 s
    after the chief closed its own. The exit status is 0 then, 1 if it cannot serve, 130 after
    Ctrl-C.
    """
    # So that a socket's file goes too when a job scheduler ends this.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        spec = found(cluster, job, task)
        tls = certified(spec, tls_cert, tls_key, tls_ca)
        await_name(spec)
        with Server(
            spec, secret_file=secret_file, tls=tls, max_connections=max_connections, on_news=_say
        ) as server:
            introduce(spec, secret_file, tls, f"serves at {server.target}")
            server.join()
            _say(f"{server.task}: {server.told()}: it ends")
    except PacelineError as e:
        raise click.ClickException(str(e)) from e
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        context.exit(INTERRUPTED)


def _say(news: str) -> None:
    print(news, flush=True)
