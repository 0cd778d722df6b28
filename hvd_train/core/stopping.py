"""Early end: all ranks agree on a signal or a hook's request, then save and leave at the same step."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

from hvd_train.core.agreement import collectively
from hvd_train.core.callbacks.straggler_log import watch_stragglers
from hvd_train.core.callbacks.time_log import TimeLog
from hvd_train.core.control_sync import ControlSync
from hvd_train.core.energy import Energy
from hvd_train.core.hooks import Epoch, Hook, StepInfo
from hvd_train.core.process_usage import ProcessUsage, place
from hvd_train.core.saving import Saver
from hvd_train.core.training import Training
from hvd_train.errors import Interrupted

LAST_SECONDS = 10.0  # before a batch job's end, for a last step and a save
INCOMPLETE = -1  # rank 0's request instead of a signal's number: its log cannot be written


class StopSync(Hook):
    """Exchanges, a few times a second, facts known to one rank only: signals, requests to stop, finished writes, waits.

    ``signal``: the number of the signal that the ranks agreed to follow, INCOMPLETE or 0.
    """

    def __init__(self, training: Training, saver: Saver, time_log: TimeLog) -> None:
        self._training, self._saver, self._time_log = training, saver, time_log
        self.request_sync: Callable[[], None] | None = None  # in async mode, where ranks do not sync by the clock
        self.turns = ControlSync(training.communicator)  # steps
        self.signal = 0
        self._usage, self._energy = ProcessUsage(), Energy()

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        self._usage.begin()  # not before the first step has run
        self._energy.begin()
        if info.due.sync:
            # A request to stop waits for a log line, because the end of a run must not depend on clocks.
            self._sync_all(trainer.stop_reason if info.due.log else "", info.due.times or self._time_log.lost)
        elif self.request_sync and (trainer.stop_reason or self._request()):
            self.request_sync()
        # Before a checkpoint of this step, which must include it.
        trainer.progress.ending = info.due.last or trainer.progress.stopped

    def on_epoch(self, trainer: Training, epoch: Epoch) -> None:
        self._sync_all(trainer.stop_reason)

    def sync_in_evaluation(self, turns: ControlSync) -> None:
        """Agree only on signals: no hook is called within an evaluation, and an interrupted run repeats it."""
        self._sync(turns, "", None, None)

    def _sync_all(self, reason: str, times: bool = True) -> None:
        training = self._training
        window = self.window() if times else None
        rows = self._sync(self.turns, reason, self._saver.writer.outcome(), window)
        reasons = [row[0] for row in rows if row[0]]
        if reasons:
            training.progress.stopped, training.stop_reason = True, ""
            training.log.message(reasons[0])
        if times:
            windows = [row[3] for row in rows]
            self._time_log.add(training, windows)
            watch_stragglers(training, windows)
        if rows[0][2] is not None:  # only rank 0 writes
            self._saver.written(rows[0][2])

    def last(self, training: Training) -> dict[str, float]:
        """Exchange the time since the last sync at the end of the training; return the summary of times."""
        parts = training.communicator.allgather_bytes(json.dumps(self.window(last=True)).encode(), "time")
        self._time_log.add(training, [json.loads(part) for part in parts])
        self._time_log.write(training)
        return self._time_log.summary(training)

    def window(self, last: bool = False) -> list[Any]:
        """Return the time since the last sync (``TimeAccount.window``), and what the system knows of this rank."""
        process: dict[str, Any] = {"usage": self._usage.read(last), "sync": self.turns.fastest}
        process |= {"energy": joules} if (joules := self._energy.read(last)) else {}
        # Once, because a list of many cores is longer than the rest.
        process |= {} if self._time_log.placed else {"place": place()}
        return [*self._training.time.window(), process]

    def _sync(self, turns: ControlSync, reason: str, outcome: str | None, window: list[Any] | None) -> list[Any]:
        """Return [reason to stop, signal, outcome of a write, window of time] of each rank."""
        rows = turns.sync([reason, self._request(), outcome, window])
        self.signal = next((number for _, number, *_ in rows if number), 0)
        return rows

    def _request(self) -> int:
        """Return the signal for which this rank asks all to save and leave; 0: none."""
        training = self._training
        return INCOMPLETE if training.log.incomplete() else training.stop_source.asked or self._late()

    def _late(self) -> int:
        """Return SIGUSR1 if the batch job's remaining time is needed to save (3 times the longest save), else 0."""
        source = self._training.stop_source
        needed = LAST_SECONDS + 3 * self._saver.writer.longest
        return int(signal.SIGUSR1) if source.job_end and source.begun and time.time() > source.job_end - needed else 0


class Interruption(Hook):
    """Saves and leaves the run after the step or epoch in which the ranks agreed on a signal."""

    def __init__(self, training: Training, sync: StopSync, saver: Saver) -> None:
        self._training, self._sync, self._saver = training, sync, saver

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        if self._sync.signal:
            self.leave()

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        if self._sync.signal and not trainer.finished:
            self.leave()

    def leave(self) -> None:
        """Save, wait for the write, and raise Interrupted on all ranks."""
        training = self._training
        self._saver.keep()
        self._saver.wait()
        if self._sync.signal == INCOMPLETE:
            collectively(training.communicator, lambda: training.log.end_incomplete(training.progress.step))
        raise Interrupted(self._sync.signal, training.progress.step)
