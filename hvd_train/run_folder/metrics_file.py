"""``metrics.jsonl``: one JSON object a line. Neither a full disk nor a damaged line may end the training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_train import files
from hvd_train.errors import CheckpointError
from hvd_train.run_folder import safe_reading

NAME = "metrics.jsonl"
FIXED = ("event", "epoch", "step", "samples", "lr", "samples_per_second")  # all other keys of a result are metrics
NO_PARTS = (*FIXED, "seconds", "steps", "memory_bytes")  # all other keys of a "time" are parts of its seconds
MAX_BYTES, MAX_LINE_BYTES = 1 << 30, 1 << 20


class MetricsFile:
    """Appends rows to the file. Rows that cannot be written are kept in memory and written before the next ones."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / NAME
        # Unbuffered, so that a written row is in the file, and a full disk is noticed at once.
        self._stream = files.appended(self.path)
        self._kept = b""
        self._why = ""

    def write(self, row: dict[str, Any]) -> None:
        self._kept += json.dumps(row).encode() + b"\n"
        self.incomplete()

    def incomplete(self) -> bool:
        """Return whether rows are still missing from the file, after trying to write them."""
        try:
            while self._kept:  # a nearly full disk may take part of a row
                self._kept = self._kept[self._stream.write(self._kept) :]
        except OSError as error:
            self._why = error.strerror or str(error)
        return bool(self._kept)

    def failure(self, step: int) -> CheckpointError:
        """Return the error for a run that was saved at ``step`` because rows could not be written."""
        missing = self._kept.count(b"\n")
        less = "" if not missing else " (1 line is missing)" if missing == 1 else f" ({missing} lines are missing)"
        fix = f"make room: the run is saved at step {step}, and --resume auto goes on"
        return CheckpointError(f"{NAME} cannot be written: {self._why}{less}", where=str(self.path), fix=fix)

    def close(self, step: int) -> None:
        """Close the file. Raises CheckpointError if rows are lost: some file systems report a full disk only here."""
        if self._stream.closed:
            return
        missing = self.incomplete()
        try:
            self._stream.close()
        except OSError as error:
            self._why, missing = error.strerror or str(error), True
        if missing:
            raise self.failure(step)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by the names that TensorBoard and trackers show, such as ``loss/train``."""
    event, named = row["event"], dict[str, Any]()
    if event == "compression":
        named = {"compression/cosine": row.get("cosine")}
        sent, plain = row.get("bytes"), row.get("bytes_plain")
        if safe_reading.number(sent) and safe_reading.number(plain) and plain:
            named["compression/share_of_bytes"] = sent / plain
    if event == "time" and safe_reading.number(seconds := row.get("seconds")) and seconds > 0:
        parts = {name: x for name, x in row.items() if name not in NO_PARTS and safe_reading.number(x)}
        named = {f"time/{name}": x / seconds for name, x in parts.items()} | {"memory_bytes": row.get("memory_bytes")}
    if event == "energy":
        named = {"energy_wh": row.get("wh")}
    if event == "noise_scale":
        named = {f"noise_scale/{name}": row.get(name) for name in ("noise_scale", "low", "high")}
    if event in ("train", "val"):
        named = {f"{name}/{event}": value for name, value in row.items() if name not in FIXED}
    if event == "train":
        named |= {name: row.get(name) for name in ("lr", "samples_per_second")}
    return {name: value for name, value in named.items() if safe_reading.number(value)}


def read(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (rows of a run, number of damaged lines). A last line that a kill cut short does not count as damaged.

    Zeros, which a power cut can leave, count as damaged.

    Raises CheckpointError if the file cannot be read.
    """
    path, rows, damaged = run_dir / NAME, [], 0
    try:
        with files.opened(path, MAX_BYTES) as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                row = _row(line)
                if row is not None:
                    rows.append(row)
                elif line.endswith(b"\n") or not line.startswith(b"{") or b"\0" in line:
                    damaged += 1
    except OSError as error:
        raise CheckpointError(f"the log cannot be read: {error.strerror}", where=str(path)) from error
    return rows, damaged


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse a line. Returns None for one that no run has written."""
    try:
        row = safe_reading.parsed(line)
    except ValueError:
        return None
    kinds = {"event": str, "epoch": int, "step": int}
    return row if all(type(row.get(name)) is kind for name, kind in kinds.items()) else None
