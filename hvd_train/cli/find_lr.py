"""``hvd-train find-lr``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.cli.launching import run_here_or_on_ranks
from hvd_train.errors import ConfigError


@click.command("find-lr")
@options.configuration
@options.num_proc
@options.any_launcher
@click.option(
    "--from",
    "first",
    type=options.NumberRange(min=0, min_open=True),
    default=1e-6,
    show_default=True,
    help="First rate.",
)
@click.option(
    "--to", "last", type=options.NumberRange(min=0, min_open=True), default=10.0, show_default=True, help="Last rate."
)
@click.option("--steps", type=click.IntRange(min=10), default=100, show_default=True, help="Steps, one rate each.")
@click.option("-o", "--output", metavar="FILE.png", type=options.FILE, help="Draw the losses too.")
@options.verbose
def find_lr(
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int | None,
    launcher: str,
    first: float,
    last: float,
    steps: int,
    output: Path | None,
    verbose: bool,
) -> None:
    """Try learning rates, from low to high, a step each, and suggest one; nothing is written but the picture.

    \b
    hvd-train find-lr -c job.yaml -o lr.png
    hvd-train find-lr -c job.yaml -np 4 --from 1e-5 --to 1 --steps 200
    """
    from hvd_train.config import load_config
    from hvd_train.jobs import find_lr as job

    if first >= last:
        raise ConfigError(f"--from {first:g} is not below --to {last:g}", fix="give a range that grows")
    config = load_config(path, sets)
    run_here_or_on_ranks(
        num_proc, launcher, verbose, lambda: job.find_lr(config, job.Rates(first, last, steps), output, verbose)
    )
