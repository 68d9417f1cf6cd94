"""`paceline shared`: what the sessions of a cluster started by hand share."""

from __future__ import annotations

from pathlib import Path

import click

from paceline import PacelineError, Session
from paceline.cli.tasks import FILE, described

PATIENCE = 10.0
"""Seconds to wait for the servers."""


@click.command()
@click.option("--cluster", type=FILE, help="TOML or JSON; without it TF_CONFIG or Slurm.")
@click.option("--secret-file", type=FILE, help="Of mode 0600; the same for all processes.")
def shared(cluster: Path | None, secret_file: Path | None) -> None:
    """Print what a cluster's sessions share.

    A line for each thing: its kind and name, the container if it is in one, where it is and, if it
    is spread over several servers, which have parts of it, by whom it was made, and how long ago.
    """
    try:
        spec = described(cluster)
        with Session(spec, job="look", secret_file=secret_file, timeout=PATIENCE) as session:
            things = session.resources()["shared"]
    except PacelineError as e:
        raise click.ClickException(str(e)) from e
    if not things:
        click.echo("nothing is shared")
    for each in things:
        inside = f" in container '{each['container']}'" if each["container"] else ""
        made = f"made by {each['by']} {each['age']:.0f} s ago"
        parts = f", parts at {', '.join(each['parts'])}" if "parts" in each else ""
        click.echo(f"{each['kind']} {each['name']}{inside}: at {each['where']}{parts}, {made}")
