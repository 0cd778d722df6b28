"""The interface of a tracker, and the facts of a run that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_train import files


@dataclass(frozen=True)
class TrackedRun:
    """A new or resumed run. ``config``: {key with dots: value}."""

    run_dir: Path
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def folder(self) -> Path:
        """Return the folder for the trackers' files."""
        return self.run_dir / "loggers"

    def old_id(self, tracker: str) -> str | None:
        """Return the id that ``tracker`` gave this run at its start, None for a new run."""
        try:
            return files.content(self.folder / f"{tracker}.id", MAX_ID_BYTES).decode().strip() or None
        except FileNotFoundError:
            return None

    def keep_id(self, tracker: str, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        files.put(self.folder / f"{tracker}.id", name.encode())


MAX_ID_BYTES = 4096


class Tracker:
    """A tracker, created with the run folder. Its methods may raise anything: training continues without it."""

    def __init__(self, run: TrackedRun) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl."""

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, such as ``loss/train``. ``epoch`` counts from 1."""

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        """Write what is left. ``finished``: the run is complete, and ``summary`` is its result."""


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric entries of a summary."""
    return {name: float(x) for name, x in summary.items() if isinstance(x, int | float) and not isinstance(x, bool)}
