"""A sweep's trials while they run: a live table on a terminal, a line for each that ended elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from hvd_train.core.log import on_terminal
from hvd_train.sweep.folder import State, Sweep, state
from hvd_train.sweep.halving import told
from hvd_train.sweep.results import shown

SECONDS = 0.5


@contextmanager
def live(sweep: Sweep) -> Iterator[None]:
    """A thread looks into the folders: trials may run anywhere, in this process too, whose output goes to a file."""
    out, ended = sys.stdout, threading.Event()
    if len(sweep.rungs) > 1:
        print(f"rungs: {told(sweep.rungs)}", flush=True)
    look = _drawn if on_terminal() else _told
    before = [_mark(state(sweep, trial)) for trial in sweep.trials]
    thread = threading.Thread(target=look, args=(sweep, before, ended, out), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _mark(one: State) -> tuple[bool, int]:
    """What is told when it changes."""
    return one.word == "failed", one.rung


def _told(sweep: Sweep, before: list[tuple[bool, int]], ended: threading.Event, out: TextIO) -> None:
    last = False
    while not last:
        last = ended.wait(SECONDS)
        for trial in sweep.trials:
            one = state(sweep, trial)
            if _mark(one) not in ((False, 0), before[trial.number]):
                before[trial.number] = _mark(one)
                value = one.summary.get(trial.config.checkpoint.monitor)
                result = f"{trial.config.checkpoint.monitor} {value:.4f}" if value is not None else one.error
                word = one.word if one.word in ("done", "failed") else f"epoch {one.summary['paused_at']}"
                print(f"{trial.name} ({trial.told}): {word}, {result}", file=out, flush=True)


def _drawn(sweep: Sweep, before: list[tuple[bool, int]], ended: threading.Event, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    def drawn() -> Table:
        header, rows = shown(sweep)
        found = Table(*header, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            found.add_row(*(cell.replace("[", r"\[") for cell in row))
        return found

    width = os.environ.get("HVD_TRAIN_TERMINAL", "")
    console = Console(file=out, force_terminal=True, width=int(width) if width.isdigit() else None)
    with Live(drawn(), console=console, auto_refresh=False, transient=True, redirect_stdout=False) as shown_:
        while not ended.wait(SECONDS):
            shown_.update(drawn(), refresh=True)
