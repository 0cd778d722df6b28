"""The lines of the log while an epoch is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_train.core.agreement import NONFINITE_FIX
from hvd_train.core.callbacks.noise_log import NoiseLog
from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.pace import LogBoard
from hvd_train.core.reductions import ordered_sum
from hvd_train.core.training import Training
from hvd_train.errors import NonFiniteError
from hvd_train.task.task import Task


class LossLog(Hook):
    """Logs the training loss over the samples since the previous line, so that lines can be averaged by ``samples``."""

    def __init__(self, task: Task, noise: NoiseLog) -> None:
        self._task, self._noise = task, noise
        self.board: LogBoard | None = None  # in async mode
        # This rank's sums of each step since the last line, kept on the device, because reading waits for the step.
        self.pending: list[Any] = []
        # (losses,) or (0,): this rank's samples since the last line, by which each loss is divided.
        self._counts = np.zeros(len(task.objectives) if task.weighted_by_data else 0)
        self._left = np.zeros(task.length + len(self._counts))  # this rank's, posted to the board since the last sync

    def local(self, trainer: Training) -> np.ndarray:
        """Return this rank's sums and counts since the last line, added in step order: (n,) float64.

        An interrupted run saves them in its checkpoint, and continues the line.
        """
        rows = [trainer.frontend.ops.to_numpy(sums) for sums in self.pending]
        sums = np.sum(rows, axis=0) if rows else np.zeros(self._task.length)
        return np.append(sums, self._counts)

    def discard(self) -> None:
        """Drop the steps since the last line, after a rollback."""
        self.pending.clear()
        self._counts = np.zeros_like(self._counts)

    def on_start(self, trainer: Training) -> None:
        """Restore the sums of the line in which the run was interrupted."""
        rows, communicator, length = trainer.progress.pending, trainer.communicator, self._task.length
        trainer.progress.pending = []
        row = np.zeros(0)
        if len(rows) == communicator.size:
            row = np.array(rows[communicator.rank])
        elif rows and communicator.rank == 0:  # if the number of ranks changed, rank 0 takes all of them
            row = np.sum(rows, axis=0)
        if len(row) == length + len(self._counts):
            self.pending, self._counts = [trainer.frontend.ops.from_numpy(row[:length])], row[length:]

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        p = trainer.progress
        self.pending += info.local_sums
        if info.local_counts is not None and trainer.groups.last_stage:
            self._counts = self._counts + info.local_counts
        trainer.log.progress(p.epoch, p.consumed, trainer.epoch_size, trainer.samples_per_second)
        if not info.due.log:
            return
        local, norms = self.local(trainer), self._noise.local(trainer)
        self.discard()
        if self.board and not info.due.sync:
            self._check_finite(trainer, local, common=False)
            self._left += local
            self.board.leave(local)
            self._write(trainer, info, self.board.take())
            return
        task = self._task
        sums, norms = np.split(ordered_sum(np.append(local + self._left, norms), trainer.groups.sums), [len(local)])
        if task.weighted_by_data:
            task.check(sums, sums[task.length :])
        self._check_finite(trainer, sums, common=True)
        self._noise.add_line(trainer, norms)
        p.epoch_sums = [float(x) for x in np.add(p.epoch_sums or 0.0, sums[: task.length])]
        if self.board:
            sums = sums - ordered_sum(self._left, trainer.groups.data) + self.board.take()
            self._left[:] = 0
        self._write(trainer, info, sums)

    def _check_finite(self, trainer: Training, sums: np.ndarray, common: bool) -> None:
        if not self._task.finite(sums):
            result, p = self._task.results(sums[: self._task.length]), trainer.progress
            what, where = f"the training loss is {result['loss']}", f"epoch {p.epoch + 1}, up to step {p.step}"
            raise NonFiniteError(what, where=where, fix=NONFINITE_FIX, common=common)

    def _write(self, trainer: Training, info: StepInfo, sums: np.ndarray) -> None:
        p, result = trainer.progress, self._task.results(sums[: self._task.length])
        if result["samples"]:  # otherwise all steps were skipped
            trainer.log.train(p.epoch, p.step, result, info.learning_rate, trainer.samples_per_second())
