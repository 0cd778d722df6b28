"""``hvd-train watch``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hvd_train.report.watch import WatchedRun

SECONDS = 1.0  # between polls of the files


@click.command()
@click.argument("run_dir", metavar="RUN_DIR", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show the current state, and exit.")
def watch(run_dir: Path, once: bool) -> None:
    """The learning curves of a run in the terminal, while it goes on; ends with the run.

    It reads only the run folder, so the run may be another user's, or a job on another host of the file system.

    \b
    hvd-train watch runs/first
    hvd-train watch runs/first --once
    hvd-train watch runs/first | tee log.txt        without a terminal: a line for each evaluation
    """
    from hvd_train.report.watch import WatchedRun, frame
    from hvd_train.run_folder.terminal import on_terminal

    run = WatchedRun(run_dir)
    with suppress(KeyboardInterrupt):  # the user may quit at any time
        if once:
            run.update()
            click.echo(f"{frame(run, *_size())}\n\n{run.state_words()}")
        elif on_terminal():
            _follow_drawn(run)
        else:
            _follow_in_lines(run)


def _size() -> tuple[int, int]:
    import shutil

    size = shutil.get_terminal_size((100, 60))
    return size.columns, size.lines


def _follow_drawn(run: WatchedRun) -> None:
    import time

    from rich.live import Live
    from rich.text import Text

    from hvd_train.report.watch import frame

    with Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            ended = run.end()  # before the last read of the rows
            run.update()
            live.update(Text(f"{frame(run, *_size())}\n\n{ended or 'Ctrl-C leaves the run as it is'}"), refresh=True)
            if ended:
                return
            time.sleep(SECONDS)


def _follow_in_lines(run: WatchedRun) -> None:
    import time

    from hvd_train.report.watch import news

    click.echo(run.title())
    shown = 0
    while True:
        ended = run.end()
        if run.update():
            shown = min(shown, len(run.rows))  # a resumed run repeats lines
            for line in news(run, shown):
                click.echo(line)
            shown = len(run.rows)
        if ended:
            click.echo(ended)
            return
        time.sleep(SECONDS)
