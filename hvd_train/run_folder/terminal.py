"""Terminal output: detection, warnings, a progress bar, and a timer for long operations."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from hvd_train.errors import printable

LONG_SECONDS = 1.0  # after which a terminal shows a long operation
PLAIN_LONG_SECONDS = 60.0  # between lines without a terminal


def on_terminal() -> bool:
    """Return whether the output goes to a terminal, which a rank's launcher may know better."""
    if "HVD_TRAIN_TERMINAL" in os.environ:
        return os.environ["HVD_TRAIN_TERMINAL"] != "0"
    return sys.stdout.isatty()


def say(text: str, err: bool = False, styled: bool = False, stream: TextIO | None = None) -> None:
    """Print text that may hold untrusted names and values, in the stream's encoding.

    Control characters, which could control a terminal, become ``?``. Characters that the stream cannot encode are
    escaped, because an unprintable name must not fail a finished run. ``styled``: the text has a table with printable
    cells and its own terminal codes.
    """
    stream = stream or (sys.stderr if err else sys.stdout)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text if styled else printable(text)
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def warn(text: str) -> None:
    say(f"warning: {text}", err=True)


class Terminal:
    """A progress bar on the last line. It is redrawn whole, so it also works through a launcher's pipe."""

    def __init__(self) -> None:
        from rich.console import Console

        width = os.environ.get("HVD_TRAIN_TERMINAL", "")
        self._console = Console(
            force_terminal=True, width=int(width) if width.isdigit() else None, highlight=False, legacy_windows=False
        )
        self._shown = False

    def progress(self, name: str, done: int, total: int, speed: float) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        left = (total - done) / speed if speed else 0
        grid = Table.grid(padding=(0, 1))
        words = f"{done:,}/{total:,}", f"{speed:,.0f} samples/s", f"{int(left) // 60}:{int(left) % 60:02d} left"
        grid.add_row(name, ProgressBar(total=total, completed=done, width=24), *words)
        with self._console.capture() as capture:
            self._console.print(grid, end="")
        self.clear()
        sys.stdout.write(capture.get().rstrip("\n"))
        sys.stdout.flush()
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()
        self._shown = False


class LongStep:
    """Shows a long operation and its duration: on the last line of a terminal, elsewhere one line a minute."""

    def __init__(self, name: str) -> None:
        self._name, self._began, self._ended = name, time.monotonic(), threading.Event()
        self._terminal = on_terminal()
        self._thread = threading.Thread(target=self._show, name="long step", daemon=True)

    def start(self) -> LongStep:
        self._thread.start()
        return self

    def _show(self) -> None:
        shown = False
        while not self._ended.wait(LONG_SECONDS if self._terminal else PLAIN_LONG_SECONDS):
            text = f"{self._name} ({time.monotonic() - self._began:.0f} s)"
            sys.stdout.write(f"\r\x1b[2K{text}" if self._terminal else f"{text}\n")
            sys.stdout.flush()
            shown = True
        if shown and self._terminal:
            sys.stdout.write("\r\x1b[2K")
            sys.stdout.flush()

    def stop(self) -> None:
        """Stop the timer, and clear its line from the terminal."""
        self._ended.set()
        self._thread.join()


@contextmanager
def long_step(name: str, shown: bool = True) -> Iterator[None]:
    """Show the name of an operation (the block) if it takes long."""
    step = LongStep(name).start() if shown else None
    try:
        yield
    finally:
        if step:
            step.stop()
