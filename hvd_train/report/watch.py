"""Watch a run through the files in its folder: curves, progress, and how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train.errors import CheckpointError, ConfigError, amount, printable
from hvd_train.report.braille import Canvas
from hvd_train.report.plots import steps
from hvd_train.report.text_tables import cell
from hvd_train.run_folder import layout, lock, metrics_file, safe_reading

EVENTS = ("train", "val")
CONFIG = "config.yaml"
CURVE_ROWS, MOST_CURVES = 8, 4
# A run that restarts after a lost rank releases its folder until the new ranks have loaded the framework.
GRACE_SECONDS = {"free": 30.0, "dead": 60.0}


class WatchedRun:
    """The log of a run, read again when it has changed. The run may be on another host with a shared file system."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise ConfigError("there is no such run folder", where=str(run_dir))
        self.run_dir = run_dir
        self.rows: list[dict[str, Any]] = []
        self.config = safe_reading.yaml_object(run_dir / CONFIG)
        self.damaged, self._failure = 0, ""  # the number of unreadable lines; why the file cannot be read
        self._stamp: tuple[int, ...] = ()
        self._ended_since: tuple[str, float] | None = None

    def update(self) -> bool:
        """Read the log again if it has changed; return whether it has."""
        try:
            status = os.stat(self.run_dir / metrics_file.NAME)
        except OSError:
            return False
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if stamp == self._stamp:
            return False
        try:
            (self.rows, self.damaged), self._stamp, self._failure = metrics_file.read(self.run_dir), stamp, ""
        except CheckpointError as error:  # removed meanwhile, or the file system fails, or another kind of file
            self._failure = error.what
            return False
        self.config = self.config or safe_reading.yaml_object(self.run_dir / CONFIG)
        return True

    def end(self) -> str:
        """Describe how the run ended, or return "" while it is running."""
        state = lock.state(self.run_dir)
        if state == "held":
            self._ended_since = None
            return ""
        if self._ended_since is None or self._ended_since[0] != state:
            self._ended_since = state, time.monotonic()
        finished = self._finished()
        if not finished and time.monotonic() - self._ended_since[1] < GRACE_SECONDS[state]:
            return ""
        return finished or self.state_words(state)

    def state_words(self, state: str = "") -> str:
        """Describe the state of the run."""
        state = state or lock.state(self.run_dir)
        step = self.rows[-1]["step"] if self.rows else 0
        if state == "held":
            return "goes on"
        if state == "dead":
            return f"its process is gone, after step {step} or later; --resume auto goes on from its last checkpoint"
        return self._finished() or f"stopped after step {step} or later; --resume auto goes on"

    def _finished(self) -> str:
        """Describe the result if the summary is up to date, else return ""."""
        with suppress(OSError, CheckpointError):
            summary = safe_reading.json_object(self.run_dir / layout.SUMMARY)
            steps, at = summary.get("steps"), summary.get("paused_at")
            last = self.rows[-1]["step"] if self.rows else 0
            if lock.state(self.run_dir) == "free" and safe_reading.number(steps) and steps >= last:
                numbers = {name: x for name, x in summary.items() if name.startswith("val_") and name != "val_samples"}
                rows = [(n.replace("_", " "), cell(x)) for n, x in numbers.items() if safe_reading.number(x)]
                nothing = "an evaluation without a value" if summary.get("val_samples") else "no evaluation"
                listed = printable(", ".join(map(" ".join, rows)), one_line=True) or nothing
                return f"left after epoch {at}: {listed}" if safe_reading.number(at) and at else f"done: {listed}"
        return ""

    def metrics(self) -> list[str]:
        """Return the names of all metrics, loss first."""
        named = (key for row in self.rows if row["event"] in EVENTS for key in row if key not in metrics_file.FIXED)
        return [*dict.fromkeys(["loss", *named])]

    def title(self) -> str:
        model = self.config.get("model")
        name = model.get("name") if isinstance(model, dict) else None
        words = [str(x) for x in (self.config.get("framework"), name) if x]
        return printable(": ".join(filter(None, [str(self.run_dir), ", ".join(words)])), one_line=True)

    def progress(self) -> str:
        """Describe the last line of the log."""
        row = next((row for row in reversed(self.rows) if row["event"] in EVENTS), None)
        if row is None:
            return f"{metrics_file.NAME} {self._failure}" if self._failure else "no line of the log yet"
        epochs, most = self.config.get("max_epochs"), self.config.get("max_steps")
        words = [f"epoch {row['epoch']}" + (f"/{epochs}" if _small(epochs) else "")]
        words.append(f"step {row['step']:,}" + (f" of at most {most:,}" if _small(most) else ""))
        if safe_reading.number(row.get("samples_per_second")):
            words.append(f"{cell(row['samples_per_second'], ',.0f')} samples/s")
        if safe_reading.number(row.get("lr")):
            words.append(f"lr {row['lr']:.3g}")
        if self.damaged:
            words.append(f"{amount(self.damaged, 'damaged line')} left out")
        return ", ".join(words)


def _small(value: object) -> bool:
    """Return whether a value of the configuration is a plausible count (a positive 63-bit integer)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 63


def frame(run: WatchedRun, width: int, height: int) -> str:
    """Draw the run as text of at most ``height`` lines: title, progress and curves of metrics."""
    lines = [run.title(), f"{run.progress()} (dots: train, line: val)"]
    fitting = max((height - len(lines) - 2) // (CURVE_ROWS + 2), 1)
    for name in run.metrics()[: min(fitting, MOST_CURVES)]:
        lines += ["", *curve(run, name, width)]
    return "\n".join(lines)


def curve(run: WatchedRun, name: str, width: int) -> list[str]:
    """Draw the curve of a metric over steps, as text lines: training as dots, validation as a line."""
    series = {event: [*zip(*steps(run.rows, event, name), strict=True)] for event in EVENTS}
    shown = [f"{event} {points[-1][1]:.4g}" for event, points in series.items() if points]
    title = f"{printable(name, one_line=True)}: {', '.join(shown) or 'no number yet'}"
    points = [*series["train"], *series["val"]]
    if not points:
        return [title]
    canvas = Canvas(max(width - 14, 20), CURVE_ROWS, points)
    canvas.dots(series["train"])
    canvas.line(series["val"])
    first, last = (f"{x:,.0f}" for x in (canvas.low_x, canvas.high_x))
    if len(points) == 1 or canvas.low_x == canvas.high_x:
        first = last = f"{points[0][0]:,.0f}"
    rows = canvas.rows()
    indent = rows[0].index("|")
    axis = f"{'':{indent}} {first}{last:>{canvas.width - len(first)}} steps"
    return [title, *rows, axis]


def news(run: WatchedRun, shown: int) -> Iterator[str]:
    """Yield a line of text for each evaluation in the log from row ``shown`` on."""
    for row in run.rows[shown:]:
        if row["event"] == "val":
            names = [name for name in row if name not in metrics_file.FIXED and safe_reading.number(row[name])]
            listed = ", ".join(f"{name} {cell(row[name])}" for name in names)
            text = f"epoch {row['epoch']}, step {row['step']:,}: validation {listed}"
            yield printable(text, one_line=True)
