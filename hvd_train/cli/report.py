"""``hvd-train report``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    type=options.FILE,
    default=Path("report.html"),
    show_default=True,
    help="The page.",
)
def report(run_dirs: tuple[Path, ...], output: Path) -> None:
    """A page about one run or several, to read, print or hand in: a single HTML file, also of a run that goes on.

    \b
    hvd-train report runs/first -o first.html
    hvd-train report runs/first runs/second                  their curves overlaid, and where they differ
    """
    from hvd_train.report.page import report
    from hvd_train.run_folder.terminal import say

    report(run_dirs, output)
    say(f"report: {output}")
