"""Tables for the terminal: boxed and wrapped on a screen, aligned plain columns in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as text; on a pipe one line per row, so that grep and cut work."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(*header, box=None, pad_edge=False, header_style="bold")
        for row in cells[1:]:
            drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
        console = Console(force_terminal=True)
        with console.capture() as capture:
            console.print(drawn)
        return capture.get().rstrip("\n")
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells)
