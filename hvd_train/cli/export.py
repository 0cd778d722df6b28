"""``hvd-train export``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.frameworks import FRAMEWORKS


@click.command()
@options.trained_run
@options.configuration
@options.checkpoint
@options.trust
@click.option(
    "--to",
    required=True,
    type=click.Choice([*(f.format for f in FRAMEWORKS.values() if f.format), "torch-export", "onnx", "safetensors"]),
    help="The file's format.",
)
@click.option(
    "-o",
    "--output",
    type=options.FILE,
    help="The file (without: model.pt, .keras, .pt2, .onnx or .safetensors in the run folder).",
)
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@options.verbose
def export(
    run_dir: str | None,
    path: Path | None,
    sets: tuple[str, ...],
    checkpoint: str,
    trust: bool,
    to: str,
    output: Path | None,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Write a trained model as a file that needs no hvd_train; says what it takes and how to load it.

    \b
    hvd-train export --run-dir runs/cnn --to pytorch       a state dictionary for torch.load and the model's code
    hvd-train export --run-dir runs/cnn --to torch-export  a program for torch.export.load, without the model's code
    hvd-train export --run-dir runs/cnn --to keras         for keras.models.load_model, whichever framework trained it
    hvd-train export --run-dir runs/cnn --to onnx -o cnn.onnx --checkpoint best
    hvd-train export --run-dir runs/cnn --to safetensors   weights alone, under names that both frameworks share
    """
    from hvd_train.jobs import export as job
    from hvd_train.jobs.trained_run import trained_config

    config, code = trained_config(path, sets, run_dir, checkpoint)
    sys.exit(job.export(config, checkpoint, to, output, overwrite, verbose, {} if trust else code))
