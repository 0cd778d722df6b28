"""``hvd-train verify``, and one of its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.errors import ConfigError


@click.command()
@options.configuration
@click.option("-np", "--num-proc", type=click.IntRange(min=2), required=True, help="Ranks to compare with one.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps to train.")
@options.any_launcher
@click.option(
    "--report",
    metavar="FILE.html",
    type=options.FILE,
    help="Write a page with curves; FILE.json: the figures alone.",
)
@options.verbose
@click.argument("program", metavar="[-- python SCRIPT.py ...]", nargs=-1, type=click.UNPROCESSED)
def verify(
    program: tuple[str, ...],
    path: Path | None,
    sets: tuple[str, ...],
    num_proc: int,
    steps: int,
    launcher: str,
    report: Path | None,
    verbose: bool,
) -> None:
    """Train a few steps on N ranks and on one, in PyTorch and in Keras, and compare everything.

    \b
    hvd-train verify -c job.yaml -np 2                      exit code 0: all equal, 1: something differs
    hvd-train verify -c job.yaml -np 3 --report proof.html  with the loss curves drawn over each other
    hvd-train verify -np 2 -- python train.py --lr 0.1      a script of your own, with hvd_train.torch or .keras
    """
    from hvd_train.launch.environment import world

    options.check_script(program, path or sets, "verify", "-c and --set")
    if launched := world().launcher:
        what = "verify starts its ranks itself"
        raise ConfigError(what, where=f"started by {launched}", fix="call hvd-train verify -np N without it")
    if program:
        from hvd_train.verify.script import verify_script

        sys.exit(verify_script(program, num_proc, steps, launcher, report, verbose))
    from hvd_train.config import load_config
    from hvd_train.verify import compare_worlds

    sys.exit(compare_worlds.verify(load_config(path, sets), num_proc, steps, launcher, report, verbose))


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@options.verbose
def record(folder: Path, verbose: bool) -> None:
    """Run one rank of verify."""
    from hvd_train.verify import record as job

    sys.exit(job.record(folder, verbose))
