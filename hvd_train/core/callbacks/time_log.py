"""The time of all ranks in the log: rows of metrics.jsonl, the windows of steps.jsonl, the words in an epoch's row."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_train.checkpoint.manifest import Progress
from hvd_train.core.energy import of_hosts
from hvd_train.core.process_usage import USAGE
from hvd_train.core.shares import COUNTED, SHOWN, shown, worth_a_look
from hvd_train.core.time_account import cell_steps
from hvd_train.core.training import Training

ROW_SECONDS = 10.0  # between rows of metrics.jsonl within an epoch


class TimeLog:
    """Adds up the windows of all ranks, which each sync collects. Its sums are equal on all ranks.

    ``counted``: seconds of the steps that count so far, in this process. Steps that were skipped or rolled back do not.
    ``placed``: whether the log knows where the ranks are. ``joules``: of all hosts, by source, after the first step of
    this process. ``lost``: whether the steps since the last window were rolled back.
    """

    def __init__(self, ranks: int) -> None:
        zeros = np.zeros((ranks, len(SHOWN)))  # seconds
        self._row, self._epoch, self._all = zeros, zeros, zeros  # since the last row, in this epoch, in this process
        self._row_steps, self._skipped, self._memory = 0.0, 0, 0
        self._taken = 0.0  # steps in this process, the mean over ranks: not all take equally many in a window
        self._written = time.monotonic()
        self.counted, self.lost = 0.0, False
        self.placed = False
        self.joules: dict[str, float] = {}
        self._hosts, self._joules_written = list[str](), dict[str, float]()
        self._at_saves = {0: 0.0}  # ``counted`` at the newest checkpoints

    def add(self, training: Training, windows: Sequence[list[Any]]) -> None:
        """Add the windows of all ranks, in rank order (``StopSync.window``)."""
        p, links = training.progress, training.groups.links
        steps, spent, memory, cells, process = zip(*windows, strict=True)
        stages = links.size if links else 1
        seconds = shown(spent, stages)
        self._row, self._epoch, self._all = self._row + seconds, self._epoch + seconds, self._all + seconds
        taken = float(np.mean(steps))
        self._row_steps, self._memory = self._row_steps + taken, max(memory)
        skipped, self._skipped = p.skipped - self._skipped, p.skipped
        of_steps = seconds[:, [SHOWN.index(name) for name in COUNTED]].sum() / len(windows)
        if taken and not self.lost:
            self.counted += float(of_steps) * max(0.0, 1 - skipped / taken)
        self.lost = False
        before, self._taken = round(self._taken), self._taken + taken
        whole = round(self._taken) - before
        window: dict[str, Any] = {
            "epoch": p.epoch + 1,
            "step": p.step,
            "steps": whole,
            "counted": round(self.counted, 6),
        }
        window |= {"seconds": dict(zip(SHOWN, np.round(self._all.T, 4).tolist(), strict=True))}
        window |= {"cell_steps": cell_steps(whole), "cells": cells}
        usage = [one["usage"] for one in process]
        window |= {"usage": dict(zip(USAGE, zip(*usage, strict=True), strict=True))}
        window |= {"sync": round(min(one["sync"] for one in process), 6)}
        if not self.placed and taken:
            hosts, cores = zip(*(one["place"] for one in process), strict=True)
            size = sum(spec.nbytes for spec in training.frontend.specs())
            placed = {"hosts": hosts, "cores": cores, "stages": stages, "gradient_bytes": size}
            training.log.ranks(placed | {"step": p.step})
            self.placed, self._hosts = True, list(hosts)
        if self.placed:
            self.joules = of_hosts(self._hosts, [one.get("energy", {}) for one in process])
        if whole:
            training.log.steps(window)
        if time.monotonic() - self._written >= ROW_SECONDS:
            self.write(training)

    def write(self, training: Training) -> None:
        """Write the time since the last row, if there was a step: no two rows have the same step."""
        if not self._row_steps:
            return
        p = training.progress
        epoch = _epoch_of_last_step(p)
        mean = dict(zip(SHOWN, np.round(self._row.mean(axis=0), 6).tolist(), strict=True))
        row = {"seconds": round(sum(mean.values()), 6), "steps": round(self._row_steps), **mean}
        training.log.time(epoch, p.step, row | {"memory_bytes": self._memory})
        self._row, self._row_steps, self._written = np.zeros_like(self._row), 0.0, time.monotonic()

    def epoch_ended(self, training: Training) -> str:
        """Write the rest of an epoch; return what in it is worth a look, for its row."""
        self.write(training)
        self._write_energy(training)
        note, self._epoch = worth_a_look(self._epoch), np.zeros_like(self._epoch)
        return note

    def _write_energy(self, training: Training) -> None:
        p, before = training.progress, self._joules_written
        used = {name: (x - before.get(name, 0.0)) / 3600 for name, x in self.joules.items()}
        if used:
            training.log.energy(_epoch_of_last_step(p), p.step, {"wh": round(sum(used.values()), 4)} | _rounded(used))
            self._joules_written = self.joules

    def energy(self) -> dict[str, float]:
        """Return the ``energy`` of ``summary.json``: Wh of all hosts since the first step, in all and by source."""
        by_source = {name: x / 3600 for name, x in self.joules.items()}
        return {"wh": round(sum(by_source.values()), 4), "hosts": len(set(self._hosts))} | _rounded(by_source)

    # ---- steps that count

    def saved(self, training: Training) -> None:
        """Record that the steps so far are in a checkpoint."""
        newest = sorted(self._at_saves)[-3:]
        self._at_saves = {k: self._at_saves[k] for k in newest} | {training.progress.step: self.counted}
        training.log.steps_saved(training.progress.step, self.counted)

    def rolled_back(self, step: int, open_steps: int) -> None:
        """Drop the steps after the checkpoint of ``step``. ``open_steps``: those since the last window."""
        self.counted, self.lost = self._at_saves.get(step, 0.0), open_steps > 0

    def summary(self, training: Training) -> dict[str, float]:
        """Return the ``time`` of ``summary.json``, equal on all ranks: seconds, as the mean over ranks."""
        figures = json.dumps(training.log.allocation(self.counted)).encode()
        counted, allocated = json.loads(training.communicator.broadcast_bytes(figures))
        parts = dict(zip(SHOWN, np.round(self._all.mean(axis=0), 3).tolist(), strict=True))
        effective = round(min(counted / allocated, 1.0), 4) if allocated else 0.0
        return parts | {"allocation": round(allocated, 3), "effective": effective}


def _epoch_of_last_step(progress: Progress) -> int:
    return progress.epoch - (progress.epoch > 0 and progress.consumed == 0)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(x, 4) for name, x in values.items()}
