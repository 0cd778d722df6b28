"""``hvd-train eval``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.cli.launching import run_here_or_on_ranks


@click.command("eval")
@options.inference
@click.option("--confusion", metavar="FILE.png", type=options.FILE, help="Print the confusion matrix, and draw it.")
@click.option(
    "--mistakes",
    metavar="FILE.png",
    type=options.FILE,
    help="Print the misclassified images with the highest probability, and draw them.",
)
def evaluate(
    run_dir: str | None,
    path: Path | None,
    sets: tuple[str, ...],
    checkpoint: str,
    trust: bool,
    split: str | None,
    num_proc: int | None,
    launcher: str,
    verbose: bool,
    confusion: Path | None,
    mistakes: Path | None,
) -> None:
    """Evaluate a trained model; every sample counts exactly once, on any number of ranks.

    \b
    hvd-train eval --run-dir runs/cnn
    hvd-train eval --run-dir runs/cnn --set data.path=new.csv             (all samples of other data)
    hvd-train eval --run-dir runs/cnn --set framework=tensorflow -np 2    (weights cross frameworks)
    hvd-train eval --run-dir runs/cnn --confusion confusion.png --mistakes mistakes.png
    """
    from hvd_train.jobs import evaluate as job
    from hvd_train.jobs.trained_run import refuse_foreign, trained_config

    config, code = trained_config(path, sets, run_dir, checkpoint)
    refuse_foreign({} if trust else code, run_dir)
    work = (config, checkpoint, split, verbose, confusion, mistakes)
    run_here_or_on_ranks(num_proc, launcher, verbose, lambda: job.evaluate(*work))
