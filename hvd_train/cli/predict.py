"""``hvd-train predict``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.cli.launching import run_here_or_on_ranks


@click.command()
@click.option(
    "-o",
    "--output",
    type=options.FILE,
    required=True,
    help="A .npy file: what the model gives, a row a sample; or a .csv table with names and units.",
)
@click.option("--names", is_flag=True, help="Write a table: each sample's class by name, and its probability.")
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@options.inference
def predict(
    run_dir: str | None,
    path: Path | None,
    sets: tuple[str, ...],
    checkpoint: str,
    trust: bool,
    split: str | None,
    output: Path,
    names: bool,
    overwrite: bool,
    num_proc: int | None,
    launcher: str,
    verbose: bool,
) -> None:
    """Write a trained model's predictions in the data set's order; data without labels will do.

    \b
    hvd-train predict --run-dir runs/cnn -o predictions.npy -np 2
    hvd-train predict --run-dir runs/cnn --set data.path=photos --names -o photos.csv
    """
    from hvd_train.jobs import predict as job
    from hvd_train.jobs.trained_run import refuse_foreign, trained_config

    config, code = trained_config(path, sets, run_dir, checkpoint)
    refuse_foreign({} if trust else code, run_dir)
    # Before ranks start, so that an existing file is reported at once.
    job.check_output(config, output, overwrite, names)
    work = (config, checkpoint, output, split, verbose, overwrite, names)
    run_here_or_on_ranks(num_proc, launcher, verbose, lambda: job.predict(*work))
