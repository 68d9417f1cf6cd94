"""The command line: one file per command."""

from __future__ import annotations

import click

from paceline import __version__
from paceline.cli.demo import demo
from paceline.cli.mirror import mirror
from paceline.cli.replay import replay
from paceline.cli.run import run
from paceline.cli.serve import serve
from paceline.cli.shared import shared


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paceline", message="%(prog)s %(version)s")
def main() -> None:
    """A data loader for data your model generates itself."""


for command in (demo, mirror, replay, run, serve, shared):
    main.add_command(command)
