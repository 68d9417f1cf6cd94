"""`paceline replay`: run alone again what a worker ran when it failed."""

from __future__ import annotations

import faulthandler
import os
import pdb
import sys
from pathlib import Path

import click

from paceline import PacelineError
from paceline.cli.tasks import FILE
from paceline.post_mortems import PostMortem, read
from paceline.replay import replay as run_again


@click.command()
@click.argument("file", type=FILE)
@click.option("--items", type=click.IntRange(1), help="How many it makes, if nothing fails.")
@click.option("--no-debugger", is_flag=True, help="Say how it ends, and end too.")
@click.pass_context
def replay(context: click.Context, file: Path, items: int | None, no_debugger: bool) -> None:
    """Run alone, in this process, what a worker ran when it failed.

    FILE is what `Cluster(post_mortem=)` has written: the worker's function, its seed, its input and
    the variables that it had read. Where it fails again the debugger (pdb) shows it; Ctrl-C has it
    show a function that hangs. The exit status is 1 then, 0 if nothing failed. It runs the code
    that is in the file, which must be this user's own.
    """
    try:
        found = read(file)
        _as_it_was(found)
        click.echo(found.facts.told())
        click.echo("\nit is run again, alone:")
        faulthandler.enable()
        outcome = run_again(found, items=items)
    except PacelineError as e:
        raise click.ClickException(str(e)) from e
    click.echo(str(outcome))
    if outcome.traceback is None:
        return
    if not no_debugger:
        pdb.post_mortem(outcome.traceback)
    context.exit(1)


def _as_it_was(found: PostMortem) -> None:
    """Have this process the worker's environment, which libraries read as they are loaded."""
    wanted = found.facts.environment
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        command = [sys.executable, "-m", "paceline", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **wanted})
