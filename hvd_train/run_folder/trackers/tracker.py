"""The interface of a tracker, and the facts of a run that it gets."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvd_train import files

MAX_ID_BYTES = 4096


@dataclass(frozen=True)
class TrackedRun:
    """A new or resumed run. ``config``: {key with dots: value}.

    ``address``, ``project``: where its numbers go; "": as the tracker's environment variables say, or into the run
    folder.
    """

    run_dir: Path
    config: Mapping[str, Any]
    address: str = ""
    project: str = ""

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

    def own_id(self) -> str:
        """Return the id under which ``hvd-train sync`` finds this run again. A copy with another name is another
        run."""
        token = self.old_id("run")
        if token is None:
            token = secrets.token_hex(16)
            self.keep_id("run", token)
        return hashlib.sha256(f"{token} {self.name}".encode()).hexdigest()[:16]


class Tracker:
    """A tracker, created with the run folder. Its methods may raise anything: training continues without it."""

    def __init__(self, run: TrackedRun) -> None: ...

    def row(self, row: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl."""

    def scalars(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by name, such as ``loss/train``. ``epoch`` counts from 1."""

    def close(self, finished: bool, summary: Mapping[str, Any]) -> None:
        """Write what is left. ``finished``: the run is complete, and ``summary`` is its result."""


class Point(NamedTuple):
    """The numbers of a line of metrics.jsonl, by name."""

    epoch: int
    step: int
    values: Mapping[str, float]


Known = Mapping[tuple[str, int], float]  # (name, step) -> number


class SavedRun(NamedTuple):
    """What a run folder holds. ``state``: ``running``, ``finished`` or ``stopped``."""

    points: Sequence[Point]
    summary: Mapping[str, Any]
    state: str


class Target:
    """A tracker that takes a run from its folder, several times while it grows (``hvd-train sync``).

    Created with the run, which it finds again or creates. ``place``: where the run is, in words. ``whole``: each change
    replaces all that was sent. ``live``: the training itself sends its numbers to the same run.
    """

    place, whole, live = "", False, False

    def __init__(self, run: TrackedRun) -> None: ...

    def known(self, saved: SavedRun) -> Known:
        """Return the numbers of ``saved`` that the target has."""
        return {}

    def rounded(self, value: float) -> float:
        """Return the number as the target stores it."""
        return value

    def renew(self, step: int) -> str:
        """Begin anew, because a resumed run has other numbers from ``step`` on. Returns what became of the old ones.

        Afterwards the target knows no number from this step on.
        """
        return ""

    def send(self, points: Iterable[Point]) -> None:
        """Add numbers."""

    def finish(self, saved: SavedRun) -> None:
        """Send the configuration, the summary and the state of the run, and close the target."""


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric entries of a summary."""
    return {name: float(x) for name, x in summary.items() if isinstance(x, int | float) and not isinstance(x, bool)}
