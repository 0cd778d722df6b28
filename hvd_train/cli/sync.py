"""``hvd-train sync``."""

from __future__ import annotations

from pathlib import Path

import click

TARGETS = ["mlflow", "wandb", "aim", "tensorboard", "csv"]  # the table is in config/trackers.py, which loads slowly


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--to", "name", type=click.Choice(TARGETS), required=True, help="The tracker.")
@click.option("--uri", "address", default="", metavar="ADDRESS", help="Where: MLflow's or Aim's, or a folder.")
@click.option("--project", default="", metavar="NAME", help="MLflow's or Aim's experiment, W&B's project.")
def sync(run_dirs: tuple[Path, ...], name: str, address: str, project: str) -> None:
    """Send runs to a tracker from their folders, for example on a login host, while they train or later.

    Called again, it sends what is new. Without --uri the tracker's environment variables say where, or else the run
    folder takes it.

    \b
    hvd-train sync runs/first --to mlflow --uri http://tracking:5000
    hvd-train sync runs/* --to tensorboard --uri boards      a folder for 'tensorboard --logdir boards'
    hvd-train sync runs/first --to wandb                     files for 'wandb sync'
    """
    from hvd_train.run_folder.sync import check, opened, sync
    from hvd_train.run_folder.terminal import say

    check(run_dirs)
    spec = opened(name, address, project)
    for run_dir in run_dirs:
        say(sync(run_dir, name, spec, address, project))
