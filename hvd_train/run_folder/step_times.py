"""``steps.jsonl``: the times of steps on all ranks, and of all starts of a run.

A resumed run keeps the rows of the steps that it repeats: their time is lost, but it was spent.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_train import files
from hvd_train.run_folder import safe_reading

NAME = "steps.jsonl"
# What the rows of each event must have.
NUMBERS = {
    "start": ("time", "step", "began"),
    "ranks": ("time", "step"),
    "steps": ("time", "step", "counted"),
    "saved": ("time", "step", "counted"),
}
LEVEL_BYTES = 1 << 20  # after each of these, the file gets only every second of the windows that it got before
FLUSH_SECONDS = 10.0
MAX_BYTES, MAX_LINE_BYTES = 1 << 30, 1 << 24
LARGEST = 1e12  # of steps and seconds; a row with more is damaged
SAME_START = 0.01  # seconds: ranks that were started again by the same command


class StepTimes:
    """Writes the rows of this start. They may be lost: a full disk does not end the training.

    ``began``: when the command began that started the ranks (seconds since 1970). ``step``: at which they go on.
    """

    def __init__(self, run_dir: Path, began: float, step: int) -> None:
        self._path, self._began = run_dir / NAME, began
        self._counted, self._allocated = _earlier(read(run_dir), began, step)
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self._windows, self._flushed = 0, time.monotonic()
        self._rows = ["\n"] if self._size else []  # the last line may be cut short
        self._add({"event": "start", "began": began, "step": step})
        self.flush()

    def ranks(self, row: Mapping[str, Any]) -> None:
        """Add a row for where the ranks are."""
        self._add({"event": "ranks", **row})

    def window(self, row: Mapping[str, Any]) -> None:
        """Add a window of steps, or leave it out: the larger the file, the more are left out."""
        every = 1 << (self._size // LEVEL_BYTES)
        if self._windows % every == 0:
            counted = round(self._counted + row["counted"], 6)
            self._add({"event": "steps", **row, "counted": counted, "of_windows": every})
        self._windows += 1
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def saved(self, step: int, counted: float) -> None:
        """Add a row for a checkpoint: a resumed run goes on from what had been counted then."""
        self._add({"event": "saved", "step": step, "counted": round(self._counted + counted, 6)})
        self.flush()

    def allocation(self, counted: float) -> tuple[float, float]:
        """Return the seconds of steps that count, and of the allocation, in all starts."""
        return self._counted + counted, self._allocated + time.time() - self._began

    def _add(self, row: Mapping[str, Any]) -> None:
        self._rows.append(json.dumps({"time": round(time.time(), 3), **row}, separators=(",", ":")) + "\n")
        self._size += len(self._rows[-1])

    def flush(self) -> None:
        rows, self._rows, self._flushed = "".join(self._rows).encode(), [], time.monotonic()
        if rows:
            with suppress(OSError), files.appended(self._path) as stream:
                stream.write(rows)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder; damaged ones are left out, and all if the file cannot be read."""
    rows = []
    with suppress(OSError), files.opened(run_dir / NAME, MAX_BYTES) as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            with suppress(ValueError):
                row = safe_reading.parsed(line)
                needed = NUMBERS.get(str(row.get("event")), ())
                numbers = [row.get(name) for name in needed]
                if numbers and all(safe_reading.number(x) and 0 <= x <= LARGEST for x in numbers):
                    rows.append(row)
    return rows


def totals(run_dir: Path) -> tuple[float, float]:
    """Return the seconds of the steps that count, and of the allocations, in all starts up to the last row."""
    return _earlier(read(run_dir), math.inf, math.inf)


def _earlier(rows: Sequence[Mapping[str, Any]], began: float, step: float) -> tuple[float, float]:
    """Return the seconds that earlier starts spent in the steps up to ``step``, and in their allocations.

    An earlier allocation ends with its last row. The current one, which began at ``began``, is not included.
    """
    counted, spans = 0.0, list[list[float]]()
    for row in rows:
        if row["event"] == "start":
            if not spans or abs(row["began"] - spans[-1][0]) > SAME_START:
                spans.append([row["began"], row["time"]])
        elif "counted" in row and row["step"] <= step:
            counted = row["counted"]
        if spans:
            spans[-1][1] = row["time"]
    allocated = sum(max(end - start, 0.0) for start, end in spans if abs(start - began) > SAME_START)
    return counted, allocated
