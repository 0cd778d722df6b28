"""``hvd-train config``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options


@click.command()
@options.configuration
@click.option(
    "--explain",
    metavar="[KEY]",
    is_flag=False,
    flag_value="",
    help="Type, default and meaning of every key, of a section's keys, or of one key.",
)
def config(path: Path | None, sets: tuple[str, ...], explain: str | None) -> None:
    """Print the resolved configuration, or explain its keys.

    \b
    hvd-train config > job.yaml          a full file to start from
    hvd-train config -c job.yaml         what the defaults make of it
    hvd-train config --explain optim     the keys of a section, or one key: optim.lr
    """
    from hvd_train.config import explained, load_config, resolved_yaml

    if explain is None:
        click.echo(resolved_yaml(load_config(path, sets)), nl=False)
        return
    from hvd_train.report.tables import explanations

    click.echo(explanations(explained(explain)))
