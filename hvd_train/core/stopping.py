"""Stopping before the end: all ranks agree on a signal or a wish, then save and leave at the same step."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from hvd_train.core.agreement import collectively
from hvd_train.core.callbacks.straggler_log import watch_stragglers
from hvd_train.core.control_sync import ControlSync
from hvd_train.core.hooks import Epoch, Hook, StepInfo
from hvd_train.core.saving import Saver
from hvd_train.core.training import Training
from hvd_train.errors import Interrupted

LAST_SECONDS = 10.0  # before a batch job's end, to step, save and leave
INCOMPLETE = -1  # what rank 0 asks for instead of a signal's number: its log cannot be written


class StopSync(Hook):
    """Exchange, a few times a second, what one rank alone knows: signals, wishes, the end of a write, waits.

    ``signal``: the number of the one that the ranks have agreed to follow, INCOMPLETE or 0.
    """

    def __init__(self, training: Training, saver: Saver) -> None:
        self._training, self._saver = training, saver
        self.request_sync: Callable[[], None] | None = None  # where the ranks do not sync by the clock
        self.turns = ControlSync(training.communicator)  # steps
        self.signal = 0

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        if info.due.sync:
            # A wish to stop waits for a line of the log: when a run ends must not depend on clocks.
            self._sync_all(trainer.stop_reason if info.due.log else "")
        elif self.request_sync and (trainer.stop_reason or self._request()):
            self.request_sync()
        # Before a checkpoint of this step, which holds it.
        trainer.progress.ending = info.due.last or trainer.progress.stopped

    def on_epoch(self, trainer: Training, epoch: Epoch) -> None:
        self._sync_all(trainer.stop_reason)

    def sync_in_evaluation(self, turns: ControlSync) -> None:
        """Agree on signals alone: no hook is called within an evaluation, and an interrupted run repeats it."""
        self._sync(turns, "", None, 0.0)

    def _sync_all(self, wish: str) -> None:
        training = self._training
        rows = self._sync(self.turns, wish, self._saver.writer.outcome(), training.frontend.waited())
        wishes = [row[0] for row in rows if row[0]]
        if wishes:
            training.progress.stopped, training.stop_reason = True, ""
            training.log.message(wishes[0])
        watch_stragglers(training, [row[3] for row in rows])
        if rows[0][2] is not None:  # rank 0 alone writes
            self._saver.written(rows[0][2])

    def _sync(self, turns: ControlSync, wish: str, outcome: str | None, waited: float) -> list[Any]:
        """Return [wish, signal, outcome of a write, seconds waited] of each rank."""
        rows = turns.sync([wish, self._request(), outcome, waited])
        self.signal = next((number for _, number, *_ in rows if number), 0)
        return rows

    def _request(self) -> int:
        """Return the signal for which this rank wants all to save and leave; 0: none."""
        training = self._training
        return INCOMPLETE if training.log.incomplete() else training.stop_source.asked or self._late()

    def _late(self) -> int:
        """SIGUSR1 where what is left of the batch job is needed to save, which may take three times as long as ever."""
        source = self._training.stop_source
        needed = LAST_SECONDS + 3 * self._saver.writer.longest
        return int(signal.SIGUSR1) if source.job_end and source.begun and time.time() > source.job_end - needed else 0


class Interruption(Hook):
    """Save the run and leave it, after the step or the epoch in which the ranks agreed on a signal."""

    def __init__(self, training: Training, sync: StopSync, saver: Saver) -> None:
        self._training, self._sync, self._saver = training, sync, saver

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        if self._sync.signal:
            self.leave()

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        if self._sync.signal and not trainer.finished:
            self.leave()

    def leave(self) -> None:
        """Save, wait for it and raise Interrupted, on all ranks."""
        training = self._training
        self._saver.keep()
        self._saver.wait()
        if self._sync.signal == INCOMPLETE:
            collectively(training.communicator, lambda: training.log.end_incomplete(training.progress.step))
        raise Interrupted(self._sync.signal, training.progress.step)
