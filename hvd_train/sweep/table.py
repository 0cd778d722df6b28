"""A sweep's trials while they run: a live table on a terminal, a line for each that ended elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from hvd_train.core.log import on_terminal
from hvd_train.sweep.folder import shown, state
from hvd_train.sweep.plan import Trial

SECONDS = 0.5


@contextmanager
def live(trials: Sequence[Trial]) -> Iterator[None]:
    """A thread looks into the folders: trials may run anywhere, in this process too, whose output goes to a file."""
    out, ended = sys.stdout, threading.Event()
    before = {trial.number for trial in trials if state(trial).word in ("done", "failed")}
    look = _drawn if on_terminal() else _told
    thread = threading.Thread(target=look, args=(trials, before, ended, out), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _told(trials: Sequence[Trial], before: set[int], ended: threading.Event, out: TextIO) -> None:
    last = False
    while not last:
        last = ended.wait(SECONDS)
        for trial in trials:
            one = state(trial)
            if trial.number not in before and one.word in ("done", "failed"):
                before.add(trial.number)
                value = one.summary.get(trial.config.checkpoint.monitor)
                result = f"{trial.config.checkpoint.monitor} {value:.4f}" if value is not None else one.error
                print(f"{trial.name} ({trial.told}): {one.word}, {result}", file=out, flush=True)


def _drawn(trials: Sequence[Trial], before: set[int], ended: threading.Event, out: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    def drawn() -> Table:
        header, rows = shown(trials)
        found = Table(*header, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            found.add_row(*(cell.replace("[", r"\[") for cell in row))
        return found

    width = os.environ.get("HVD_TRAIN_TERMINAL", "")
    console = Console(file=out, force_terminal=True, width=int(width) if width.isdigit() else None)
    with Live(drawn(), console=console, auto_refresh=False, transient=True, redirect_stdout=False) as shown_:
        while not ended.wait(SECONDS):
            shown_.update(drawn(), refresh=True)
