"""``hvd-train data``, ``data pack`` and ``data check``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvd_train.cli import options
from hvd_train.errors import ConfigError


@click.group(invoke_without_command=True)
@click.pass_context
def data(context: click.Context) -> None:
    """List the kinds of data sets, and what can be done to their samples; pack one, check a packed one."""
    if context.invoked_subcommand:
        return
    from hvd_train.data import transforms
    from hvd_train.data.catalog import catalog
    from hvd_train.report.text_tables import table

    click.echo(table(["data.name", "what"], list(catalog().items())))
    click.echo("Your own: data.name 'package.module:function', called with data.options, giving (train, val).\n")
    click.echo(table(["data.transforms", "what"], list(transforms.catalog().items())))
    click.echo("Your own: 'package.module:function', called with a sample's array and a numpy Generator.")


@data.command()
@options.configuration
@click.argument("paths", metavar="[SOURCE] FOLDER", nargs=-1, required=True, type=click.Path())
def pack(path: Path | None, sets: tuple[str, ...], paths: tuple[str, ...]) -> None:
    """Write a data set as a few large files, to be read with data: {name: packed, path: FOLDER}.

    \b
    hvd-train data pack photos packed --set data.image_size=64      a folder of images
    hvd-train data pack -c job.yaml packed                          whatever a configuration reads
    mpirun -np 4 hvd-train data pack -c job.yaml packed             four processes share the work
    """
    from hvd_train.config import load_config
    from hvd_train.data.detect import kind_of
    from hvd_train.jobs import pack as job

    *source, target = paths
    if len(source) > 1:
        raise ConfigError(
            f"{len(paths)} paths are given", where="data pack", fix="give the data's path and a folder to write"
        )
    if source:
        # Guess the kind of the data from the path, unless the user has named it.
        named = path is not None or any(one.startswith("data.name=") for one in sets)
        kind = [] if named else [f"data.name={kind_of(Path(source[0]))}"]
        sets = (*sets, *kind, f"data.path={json.dumps(source[0])}")
    job.pack(load_config(path, sets), Path(target))


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
def check(folder: Path) -> None:
    """Read a packed data set and compare all checksums; exit code 3 names the first file that is damaged.

    hvd-train data check packed
    """
    from hvd_train.jobs import pack as job

    job.check(folder)
