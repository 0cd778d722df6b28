"""The terminal: whether there is one, warnings, and a progress bar."""

from __future__ import annotations

import os
import sys


def on_terminal() -> bool:
    """Return whether the output goes to a terminal. A rank's launcher may know better than the rank."""
    if "HVD_TRAIN_TERMINAL" in os.environ:
        return os.environ["HVD_TRAIN_TERMINAL"] != "0"
    return sys.stdout.isatty()


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Terminal:
    """A progress bar on the last line; drawn anew, so that it works through a launcher's pipe as well."""

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
