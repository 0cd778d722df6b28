"""``hvd-train explain``."""

from __future__ import annotations

from pathlib import Path

import click

from hvd_train.cli import options


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--picture", metavar="FILE.png", type=options.FILE, help="Draw the shares of each rank's time.")
@click.option(
    "--trace",
    metavar="FILE.json",
    type=options.FILE,
    help="Write a timeline of all ranks, which ui.perfetto.dev opens.",
)
def explain(run_dir: Path, picture: Path | None, trace: Path | None) -> None:
    """Where the time of a run goes, and what would make it faster; also while it goes on.

    It reads only the run folder. Each gain is what the recorded steps would have taken otherwise.

    \b
    hvd-train explain runs/first
    hvd-train explain runs/first --picture shares.png --trace timeline.json
    """
    from hvd_train.errors import ConfigError
    from hvd_train.insight import explain
    from hvd_train.insight import trace as timeline
    from hvd_train.run_folder.terminal import say

    if picture and picture.suffix not in options.PICTURES:
        fix = f"end its name in {', '.join(options.PICTURES)}"
        raise ConfigError("this is no picture's name", where=f"--picture {picture}", fix=fix)
    case = explain.case_of(run_dir)
    say("\n\n".join(filter(None, explain.explained(case))))
    if picture:
        explain.draw(case, picture)
        say(f"\npicture: {picture}")
    if trace:
        timeline.write(case.recorded, trace)
        say(f"timeline: {trace}")
