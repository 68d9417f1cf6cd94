"""`paceline demo`: train CartPole on this machine, and see how it goes."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import click

from paceline import PacelineError
from paceline.demo.cartpole import SOLVED_EPISODES, SOLVED_RETURN
from paceline.demo.record import Record, missing
from paceline.demo.train import train
from paceline.progress import Mode

FOLDER = Path("runs")
INTERRUPTED = 130


def _file_name(context: click.Context, option: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"\w[\w.\- ]*", value):
        raise click.BadParameter(f"{value!r} is not the name of a folder: letters, digits, . _ -")
    return value


@click.command()
@click.option("--seed", type=click.IntRange(0), help="Of the run; another one each time.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--name",
    default="cartpole",
    show_default=True,
    callback=_file_name,
    help="The run's folder in runs/; gets a number if it exists.",
)
@click.option(
    "--progress",
    type=click.Choice(["auto", "live", "plain", "quiet"]),
    default="auto",
    show_default=True,
    help="auto: live on a terminal, plain lines elsewhere.",
)
@click.option(
    "--engine",
    type=click.Choice(["processes", "serial", "ray"]),
    default="processes",
    show_default=True,
    help="serial: everything in one thread, the same each time. ray: on a Ray cluster.",
)
@click.option(
    "--budget-steps",
    type=click.IntRange(1),
    default=500_000,
    show_default=True,
    help="Environment steps after which it gives up.",
)
@click.option(
    "--target-return",
    type=float,
    default=SOLVED_RETURN,
    show_default=True,
    help="Solved at this mean return over the last 100 episodes.",
)
@click.option(
    "--checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    help="Save to this folder, and go on from what was saved there.",
)
@click.pass_context
def demo(
    context: click.Context,
    /,
    seed: int | None,
    name: str,
    target_return: float,
    progress: Mode,
    **options: Any,
) -> None:
    """Train CartPole-v1 with workers that collect and a chief that learns (PPO in NumPy).

    Writes runs/NAME/ with curve.png, metrics.jsonl and parameters.npz. The exit status is 0 when
    the task was solved, 1 when not, 130 after Ctrl-C.
    """
    if missing():
        raise click.ClickException(
            f'the demo needs {" and ".join(missing())}: pip install "paceline[demo]"'
        )
    seed = secrets.randbits(32) if seed is None else seed
    interrupted = False
    try:
        with Record(FOLDER, name, target=target_return) as record:
            try:
                train(record, seed=seed, progress=progress, **options)
            except KeyboardInterrupt:
                interrupted = True
    except PacelineError as e:
        raise click.ClickException(str(e)) from e
    except OSError as e:
        raise click.ClickException(f"cannot write to {FOLDER / name}: {e}") from e
    click.echo(_outcome(record, seed, interrupted=interrupted))
    context.exit(INTERRUPTED if interrupted else 0 if record.solved else 1)


def _outcome(record: Record, seed: int, *, interrupted: bool) -> str:
    how = "interrupted" if interrupted else "solved" if record.solved else "not solved"
    mean = record.mean_return
    episodes = min(SOLVED_EPISODES, len(record.returns))
    reached = "" if mean is None else f"mean return {mean:.1f} over the last {episodes} episodes, "
    return (
        f"CartPole-v1 {how} after {record.seconds:.1f} s: {reached}{record.steps:,} steps,"
        f" seed {seed}; see {record.folder}/"
    )
