"""Tables as text: wrapped to the width of a terminal, or one aligned line per row in a pipe."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_train.errors import CheckpointError, ConfigError, printable
from hvd_train.run_folder import safe_reading
from hvd_train.run_folder.terminal import on_terminal

IN_TABLE = ("run_dir", "framework", "model.name")  # keys already in the first table
LETTERS = 40  # most letters of a value
SHOWN = {"framework": str, "model": str, "world_size": int, "epochs": int, "steps": int, "samples_per_second": float}
LONG = 1e15  # numbers from here on are shown with an exponent


def cell(value: float, form: str = ".4f") -> str:
    """Format a number, very large ones with an exponent."""
    return format(value, form if abs(value) < LONG else ".4g")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table; in a pipe one line per row, so that grep and cut work.

    Unprintable characters are escaped, because cells may come from another user's files.
    """
    rows = [[printable(str(value), one_line=True) for value in row] for row in rows]
    header = [printable(name, one_line=True) for name in header]
    if on_terminal():
        from rich.console import Console
        from rich.table import Table

        drawn = Table(*header, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            drawn.add_row(*(str(cell).replace("[", r"\[") for cell in row))
        console = Console(force_terminal=True)
        with console.capture() as capture:
            console.print(drawn)
        return capture.get().rstrip("\n")
    return aligned(header, rows)


def explanations(rows: Sequence[tuple[str, str, str, str]], sentences: Sequence[str] = ()) -> str:
    """Format (key, type, default, meaning) rows and the sentences below them, wrapped to the terminal.

    In a pipe each is one line.
    """
    if not sys.stdout.isatty():
        return "\n".join([aligned(["key", "type", "default", "meaning"], rows), *sentences])
    width = shutil.get_terminal_size().columns
    blocks = []
    for key, kind, default, meaning in rows:
        kind = kind.replace("|", " | ")  # so that a long list of words can wrap
        blocks.append(textwrap.fill(f"{key}: {kind}; default {default}", width, subsequent_indent="      "))
        blocks.append(textwrap.fill(meaning, width, initial_indent="    ", subsequent_indent="    "))
    blocks += [textwrap.fill(sentence, width, subsequent_indent="    ") for sentence in sentences]
    return "\n".join(blocks)


def aligned(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with one line per row, however wide."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def summary(run_dir: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a finished run. Raises ConfigError if there is no folder, and CheckpointError."""
    path = run_dir / "summary.json"
    try:
        values = safe_reading.json_object(path)
    except FileNotFoundError as error:
        if not run_dir.is_dir():
            raise ConfigError("there is no such run folder", where=str(run_dir)) from error
        raise CheckpointError("the folder holds no finished run", where=str(run_dir)) from error
    numbers = {name: float(values[name]) for name in SHOWN if type(values.get(name)) is int and SHOWN[name] is float}
    values |= numbers
    wrong = [name for name, kind in SHOWN.items() if type(values.get(name)) is not kind]
    if wrong:
        what = f"the file is damaged: it is not the summary of a run ({', '.join(wrong)})"
        raise CheckpointError(what, where=str(path))
    return values


def side_by_side(run_dirs: Sequence[Path]) -> str:
    """Format the results of finished runs, a row each, and a second table of keys in which they differ."""
    runs = [summary(run_dir) for run_dir in run_dirs]
    metrics = dict.fromkeys(key for run in runs for key in run if key.startswith("val_") and key != "val_samples")
    header = ["run folder", "framework", "model", "ranks", "epochs", "steps"]
    header += [*(key.replace("_", " ") for key in metrics), "samples/s"]
    rows = []
    for run_dir, run in zip(run_dirs, runs, strict=True):
        row = [str(run_dir), *(run[key] for key in ("framework", "model", "world_size", "epochs", "steps"))]
        row += [cell(run[key]) if safe_reading.number(run.get(key)) else "-" for key in metrics]
        rows.append([*row, cell(run["samples_per_second"], ",.0f")])
    keys = _differing(run_dirs)
    return "\n".join([table(header, rows), *(["", table(["key", *map(str, run_dirs)], keys)] if keys else [])])


def _differing(run_dirs: Sequence[Path]) -> list[list[str]]:
    """Return (key, value in each run) for each key of the configuration in which the runs differ."""
    from hvd_train.config import leaves

    configs = [dict(leaves(safe_reading.yaml_object(run_dir / "config.yaml"))) for run_dir in run_dirs]
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if key not in IN_TABLE]
    rows = [[key, *(_short(config.get(key, ...)) for config in configs)] for key in keys]
    return [row for row, key in zip(rows, keys, strict=True) if any(c.get(key) != configs[0].get(key) for c in configs)]


def _short(value: object) -> str:
    text = (
        "-"
        if value is ...
        else printable(value if isinstance(value, str) else json.dumps(value, default=str), one_line=True)
    )
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 3]}..."
