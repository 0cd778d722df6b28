"""``hvd-train compare``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE.png", type=options.FILE, help="Draw their curves too.")
@click.option(
    "--by", type=click.Choice(["epoch", "step"]), default="epoch", show_default=True, help="Axis of the curves."
)
def compare(run_dirs: tuple[Path, ...], output: Path | None, by: str) -> None:
    """Finished runs side by side.

    \b
    hvd-train compare runs/a runs/b -o curves.png
    hvd-train compare runs/a runs/b -o curves.png --by step   each line of the log (log_every_n_steps)
    """
    from hvd_train.report.text_tables import side_by_side
    from hvd_train.run_folder.terminal import say

    click.echo(side_by_side(run_dirs))
    if output is not None:
        from hvd_train.report.plots import curves

        curves(run_dirs, output, by)
        say(f"curves: {output}")
