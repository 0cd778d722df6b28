"""The steps that a run folder has recorded (``steps.jsonl``), as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from hvd_train import files
from hvd_train.core.shares import SHOWN
from hvd_train.core.time_account import CELLS, IN_CELL
from hvd_train.errors import CheckpointError, ConfigError
from hvd_train.run_folder import safe_reading, step_times

MOST_STEPS, MOST_SECONDS = 10**9, 1e9  # of a window; it is damaged beyond
SOON = "the steps after the first one are written within about 10 seconds, or when the training ends"
FOLDER = "give the run_dir of a training, for example runs/first"
OLD = "steps are recorded by 'hvd-train fit' of this version; runs of earlier ones and scripts have none"


@dataclass(frozen=True)
class RecordedSteps:
    """The last start of a run that recorded steps.

    Cells are consecutive steps. ``seconds``: (cells, ranks, parts) of ``IN_CELL``: input, compute, waiting, rest.
    ``steps``: (cells,). ``weights``: (cells,), how many cells each stands for, since some were not written. ``spent``:
    (ranks, parts) of ``SHOWN``, seconds since this start. ``windows``: the rows of the file.

    ``hosts``, ``cores``: of each rank, () if unknown. ``usage``: {figure of USAGE: one for each rank, or None}.
    ``stages``: of the pipeline; rank = replica x stages + stage. ``sync``: seconds of the fastest sync, or None.
    ``starts``: of the run.
    """

    seconds: np.ndarray
    steps: np.ndarray
    weights: np.ndarray
    spent: np.ndarray
    windows: Sequence[Mapping[str, Any]]
    hosts: tuple[str, ...]
    cores: tuple[tuple[int, ...], ...]
    usage: Mapping[str, tuple[float | None, ...]]
    stages: int
    gradient_bytes: int | None
    sync: float | None
    starts: int

    @property
    def ranks(self) -> int:
        return self.seconds.shape[1]

    @property
    def step_seconds(self) -> np.ndarray:
        """Return the seconds of a step, (cells,): the mean over ranks, and over the steps of a cell."""
        mean: np.ndarray = self.seconds.sum(axis=2).mean(axis=1) / self.steps
        return mean

    def quantiles(self, *shares: float) -> list[float]:
        """Return these quantiles of the seconds of a step, over all steps."""
        order = np.argsort(self.step_seconds)
        below = np.cumsum((self.weights * self.steps)[order])
        places = np.searchsorted(below, [share * below[-1] for share in shares])
        return self.step_seconds[order[np.minimum(places, len(order) - 1)]].tolist()

    def total(self, *parts: str) -> np.ndarray:
        """Return the seconds of each rank in these parts of ``SHOWN``, together; (ranks,)."""
        total: np.ndarray = self.spent[:, [SHOWN.index(part) for part in parts]].sum(axis=1)
        return total


def read(run_dir: Path, after_step: int = 0) -> RecordedSteps:
    """Read a run folder. ``after_step``: leave out the steps up to it, as a warm-up.

    Raises ConfigError if no steps are recorded, and CheckpointError if they cannot be read.
    """
    if not run_dir.is_dir():
        raise ConfigError("there is no such run folder", where=str(run_dir), fix=FOLDER)
    try:
        files.opened(run_dir / step_times.NAME, step_times.MAX_BYTES).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(
            f"the recorded steps cannot be read: {error.strerror}", where=str(run_dir / step_times.NAME)
        ) from error
    whole = step_times.read(run_dir)
    starts: list[list[dict[str, Any]]] = [[]]
    for row in whole:
        if row["event"] == "start":
            starts.append([])
        starts[-1].append(row)
    for rows in reversed(starts):
        found = [(row, cells) for row in rows if row["step"] > after_step and (cells := cells_of(row)) is not None]
        found = [(row, cells) for row, cells in found if cells[1].shape[1] == found[-1][1][1].shape[1]]
        if found:
            return _recorded(found, next((row for row in rows if row["event"] == "ranks"), {}), len(starts) - 1)
    if whole:
        raise ConfigError("no steps are recorded yet", where=str(run_dir / step_times.NAME), fix=SOON)
    if not (run_dir / "config.yaml").exists():
        raise ConfigError("the folder holds no run", where=str(run_dir), fix=FOLDER)
    raise ConfigError("no steps are recorded", where=str(run_dir / step_times.NAME), fix=OLD)


def cells_of(row: Mapping[str, Any]) -> tuple[list[int], np.ndarray] | None:
    """Return the number of steps of each cell of a window, and the seconds, (cells, ranks, parts).

    Where ranks do not wait for one another, they differ in their steps, and all of a window is one cell. None: this is
    no window, or it is damaged.
    """
    try:
        if row["event"] != "steps":
            return None
        steps, size, cells = row["steps"], row["cell_steps"], row["cells"]
        seconds = [row["seconds"][name] for name in SHOWN]
        parts, ranks = len(IN_CELL), len(cells)
        whole = all(type(x) is int and 0 < x <= MOST_STEPS for x in (steps, size, row["epoch"]))
        known = all(_measured(x) for one in seconds for x in one)
        known = known and all(_measured(x, 1e6 * MOST_SECONDS) for one in cells for x in one)
        if not (ranks and whole and known and {*map(len, seconds)} == {ranks}):
            return None
        of_cells = [min(size, steps - k) for k in range(0, min(steps, CELLS * size), size)]
        if any(len(one) != len(of_cells) * parts for one in cells):
            of_cells, cells = [steps], [np.sum(np.reshape(one, (-1, parts)), axis=0) for one in cells]
        table = np.array(cells, dtype=float).reshape(ranks, -1, parts) / 1e6
        return (of_cells, table.swapaxes(0, 1)) if table.sum() > 0 else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _recorded(found: Sequence[tuple[Mapping[str, Any], Any]], placed: Mapping[str, Any], starts: int) -> RecordedSteps:
    windows, tables = zip(*found, strict=True)
    last, ranks = windows[-1], tables[-1][1].shape[1]
    of_windows = [
        min(max(row["of_windows"], 1), MOST_STEPS) if _measured(row.get("of_windows")) else 1 for row in windows
    ]
    spent = [last["seconds"][name] for name in SHOWN]
    hosts, cores = (value if isinstance(value, list) else [] for value in (placed.get("hosts"), placed.get("cores")))
    if not len(hosts) == len(cores) == ranks or not all(isinstance(host, str) for host in hosts):
        hosts, cores = [], []
    usage = last.get("usage") if isinstance(last.get("usage"), dict) else {}
    stages, size = placed.get("stages"), placed.get("gradient_bytes")
    syncs = [row["sync"] for row in windows if _measured(row.get("sync")) and row["sync"] > 0]
    return RecordedSteps(
        seconds=np.concatenate([table for _, table in tables]),
        steps=np.array([n for of_cells, _ in tables for n in of_cells], dtype=float),
        weights=np.repeat(np.array(of_windows, dtype=float), [len(of_cells) for of_cells, _ in tables]),
        spent=np.array(spent, dtype=float).T,
        windows=windows,
        hosts=tuple(hosts),
        cores=tuple(tuple(x for x in one if type(x) is int) if isinstance(one, list) else () for one in cores),
        usage={name: _of_ranks(values, ranks) for name, values in usage.items()},
        stages=stages if isinstance(stages, int) and stages > 0 and ranks % stages == 0 else 1,
        gradient_bytes=size if type(size) is int and size > 0 else None,
        sync=min(syncs, default=None),
        starts=starts,
    )


def _of_ranks(values: object, ranks: int) -> tuple[float | None, ...]:
    if not isinstance(values, list) or len(values) != ranks:
        return (None,) * ranks
    return tuple(x if _measured(x) else None for x in values)


def _measured(value: object, most: float = MOST_SECONDS) -> TypeGuard[int | float]:
    """Return whether a value can be seconds, or another figure that is measured."""
    return safe_reading.number(value) and 0 <= value <= most
