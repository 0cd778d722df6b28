"""Show the progress of a sweep: a live table on a terminal, otherwise a line when a trial ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from hvd_train.run_folder.terminal import on_terminal, say
from hvd_train.sweep.folder import State, Sweep, state
from hvd_train.sweep.results import shown
from hvd_train.sweep.rungs import describe

SECONDS = 0.5


@contextmanager
def live(sweep: Sweep) -> Iterator[None]:
    """Show the trials until the block ends, from a thread that reads their folders.

    Trials may run in other processes or in this one, whose output then goes to a file.
    """
    # A trial in this process redirects sys.stdout to a file.
    out, ended = sys.stdout, threading.Event()
    if len(sweep.rungs) > 1:
        say(f"rungs: {describe(sweep.rungs)}")
    show = _draw_table if on_terminal() else _print_lines
    before = [_mark(state(sweep, trial)) for trial in sweep.trials]
    thread = threading.Thread(target=show, args=(sweep, before, ended, out), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _mark(one: State) -> tuple[bool, int]:
    """Return the part of a state whose change is reported."""
    return one.word == "failed", one.rung


def _print_lines(sweep: Sweep, before: list[tuple[bool, int]], ended: threading.Event, out: TextIO) -> None:
    # One more pass after the end: trials may have ended since the last one.
    last = False
    while not last:
        last = ended.wait(SECONDS)
        for trial in sweep.trials:
            one = state(sweep, trial)
            if _mark(one) not in ((False, 0), before[trial.number]):
                before[trial.number] = _mark(one)
                monitor = trial.config.checkpoint.monitor
                value = one.summary.get(monitor)
                result = f"{monitor} {value:.4f}" if value is not None else one.error or f"no value of {monitor}"
                word = one.word if one.word in ("done", "failed") else f"epoch {one.summary['paused_at']}"
                say(f"{trial.name} ({trial.description}): {word}, {result}", stream=out)


def _draw_table(sweep: Sweep, before: list[tuple[bool, int]], ended: threading.Event, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    def drawn() -> Table:
        header, rows = shown(sweep)
        table = Table(*header, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        return table

    width = os.environ.get("HVD_TRAIN_TERMINAL", "")
    console = Console(file=out, force_terminal=True, width=int(width) if width.isdigit() else None)
    with Live(drawn(), console=console, auto_refresh=False, transient=True, redirect_stdout=False) as shown_:
        while not ended.wait(SECONDS):
            shown_.update(drawn(), refresh=True)
