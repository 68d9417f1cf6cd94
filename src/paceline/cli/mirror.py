"""`paceline mirror`: have each version once on this host, for all its tasks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from paceline import PacelineError
from paceline.cli.tasks import FILE, certified, described
from paceline.core.mirror_state import KEEP
from paceline.mirroring import PATIENCE, of_cluster

INTERRUPTED = 130


@click.command()
@click.option("--cluster", type=FILE, help="TOML or JSON; without it TF_CONFIG or Slurm.")
@click.option("--secret-file", type=FILE, help="Of mode 0600; the same for all processes.")
@click.option("--tls-cert", type=FILE, help="Encrypt TCP; this process's certificate.")
@click.option("--tls-key", type=FILE, help="The private key of --tls-cert.")
@click.option("--tls-ca", type=FILE, help="Certificates of those whose signature counts.")
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=KEEP,
    show_default=True,
    help="Versions of each variable that stay when nobody looks at them.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=PATIENCE,
    show_default=True,
    help="Seconds to wait for a server, also for one that is away.",
)
@click.pass_context
def mirror(
    context: click.Context,
    /,
    cluster: Path | None,
    secret_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    keep: int,
    timeout: float,
) -> None:
    """Have each version of a variable once on this host, for all its tasks.

    They find it by themselves, whenever it is started, and read large variables from its memory,
    so that a version crosses the network once for all of them. It ends when the cluster is done.
    The exit status is 0 then, 1 if it cannot go on, 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        spec = described(cluster)
        tls = certified(spec, tls_cert, tls_key, tls_ca)
        with of_cluster(
            spec, secret_file=secret_file, tls=tls, keep=keep, timeout=timeout
        ) as found:
            _say(f"a mirror of {', '.join(map(str, spec.servers()))}: process {os.getpid()}")
            found.join()
            told = found.stats()
        _say(
            f"the cluster is done: lent {told['asked']} copies of {told['fetched']} versions, which"
            f" came in {told['fetched_bytes']} bytes"
        )
    except PacelineError as e:
        raise click.ClickException(str(e)) from e
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        context.exit(INTERRUPTED)


def _say(news: str) -> None:
    print(news, flush=True)
