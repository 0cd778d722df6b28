"""One timeline of all ranks, in the Trace Event Format, which Perfetto and Chrome open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import files
from hvd_train.core.shares import WORDS
from hvd_train.core.time_account import IN_CELL, PARTS
from hvd_train.errors import CheckpointError
from hvd_train.insight.recorded_steps import RecordedSteps, cells_of

NAMES = [{"waited": "exchange and wait"}.get(PARTS[k], WORDS.get(PARTS[k], PARTS[k])) for k in IN_CELL]
BETWEEN = ("evaluate", "save")  # parts that come before the steps of a window


def write(recorded: RecordedSteps, path: Path) -> None:
    """Write the timeline. Raises CheckpointError if it cannot be written."""
    content = json.dumps({"displayTimeUnit": "ms", "traceEvents": [*_events(recorded)]}, separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.put(path, content.encode())
    except OSError as error:
        raise CheckpointError(f"the timeline cannot be written: {error.strerror}", where=str(path)) from error


def _events(recorded: RecordedSteps) -> Iterator[dict[str, Any]]:
    """Yield the names of the ranks, and each part of each cell of steps.

    The ranks meet at the end of a window, so its cells end there on all of them: no clock of a host matters. Within a
    cell the parts are in a fixed order, since only their sums are known.
    """
    for rank in range(recorded.ranks):
        host = f" ({recorded.hosts[rank]})" if recorded.hosts else ""
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}{host}"}}
    first = cells_of(recorded.windows[0])
    began = recorded.windows[0]["time"] - (first[1].sum(axis=(0, 2)).max() if first else 0.0)
    ended, before = np.full(recorded.ranks, -np.inf), None
    for row in recorded.windows:
        now = row["time"] - began
        found = cells_of(row)
        if found is None:
            continue
        steps, cells = found
        between = {name: np.zeros(recorded.ranks) for name in BETWEEN}
        if before is not None and len(before["seconds"]["save"]) == recorded.ranks:
            between = {name: np.subtract(row["seconds"][name], before["seconds"][name]) for name in BETWEEN}
        before = row
        for rank in range(recorded.ranks):
            at = max(now - cells[:, rank].sum() - sum(x[rank] for x in between.values()), ended[rank])
            step = row["step"] - row["steps"]
            for name, seconds in between.items():
                yield from _slice(name, rank, at, seconds[rank], {"epoch": row["epoch"]})
                at += max(seconds[rank], 0.0)
            for count, parts in zip(steps, cells[:, rank], strict=True):
                about = {"step": step + 1} if count == 1 else {"steps": f"{step + 1} to {step + count}"}
                for name, seconds in zip(NAMES, parts, strict=True):
                    yield from _slice(name, rank, at, seconds, about)
                    at += seconds
                step += count
            ended[rank] = at


def _slice(name: str, rank: int, at: float, seconds: float, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if seconds > 0:
        times = {"ts": round(at * 1e6, 1), "dur": round(seconds * 1e6, 1)}
        yield {"ph": "X", "name": name, "cat": "train", "pid": rank, "tid": 0, **times, "args": about}
