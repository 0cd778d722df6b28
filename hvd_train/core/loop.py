"""The training loop. It fixes the order of calls, but knows no framework, nor when to log, save or stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvd_train import faults
from hvd_train.checkpoint.store import Snapshot
from hvd_train.config import Config
from hvd_train.core import train_state
from hvd_train.core.callbacks.early_stopping import EarlyStopping
from hvd_train.core.callbacks.epoch_log import EpochLog
from hvd_train.core.callbacks.loss_log import LossLog
from hvd_train.core.callbacks.noise_log import NoiseLog
from hvd_train.core.callbacks.plateau import Plateau
from hvd_train.core.callbacks.speed import Speed
from hvd_train.core.callbacks.time_log import TimeLog
from hvd_train.core.callbacks.weight_check import WeightCheck
from hvd_train.core.control_sync import StopSource
from hvd_train.core.hooks import Epoch, Hook, HookCalls, StepInfo
from hvd_train.core.pace import AsyncSteps, Lockstep, Pace
from hvd_train.core.saving import Saver
from hvd_train.core.step import StepRunner
from hvd_train.core.step_actions import StepRules
from hvd_train.core.stopping import Interruption, StopSync
from hvd_train.core.summary import summary
from hvd_train.core.time_account import COMPUTE, INPUT, REST
from hvd_train.core.training import Training
from hvd_train.core.validation import Validation
from hvd_train.errors import Interrupted, NonFiniteError
from hvd_train.protocol import FrontEnd, Source, Update
from hvd_train.run_folder.log import NullLog, RunLog


class Trainer(Training):
    """The training loop of ``frontend`` on ``train`` with evaluation on ``val``, the same calls on all ranks.

    ``hooks``: the user's. ``memory``: a folder for in-memory checkpoints. Other arguments: see ``Training``.
    """

    def __init__(
        self,
        config: Config,
        frontend: FrontEnd,
        update: Update,
        train: Source,
        val: Source,
        run_dir: Path,
        log: RunLog | NullLog,
        compression: str = "none",
        hooks: Sequence[Hook] = (),
        stop_source: StopSource | None = None,
        until: int | None = None,
        memory: Path | None = None,
    ) -> None:
        source = stop_source or StopSource()
        super().__init__(config, frontend, update, train, val, run_dir, log, compression, source, until)
        speed, noise_log = Speed(uneven=config.data.lengths is not None), NoiseLog(self)
        loss_log = LossLog(frontend.task, noise_log)
        self.samples_per_second, self.speeds = speed.median, speed.spread
        weight_check = WeightCheck(loss_log)
        watching: list[Hook] = [EarlyStopping(config.early_stopping)] if config.early_stopping else []
        watching += [Plateau(config.optim.plateau)] if config.optim.plateau else []
        self._time_log = TimeLog(self.communicator.size)
        announce = partial(self._call, "on_checkpoint")
        self._saver = Saver(self, loss_log, weight_check, self._time_log, announce, memory)
        self._sync = StopSync(self, self._saver, self._time_log)
        interruption = Interruption(self, self._sync, self._saver)
        # The ranks agree on stopping after the user's hooks, which may request it; then they save.
        first = [speed, loss_log, weight_check, *watching]
        self._hooks = HookCalls(
            first, hooks, [self._sync, EpochLog(self._time_log, noise_log), self._saver, interruption]
        )
        self._validation = Validation(self, weight_check, self._sync, interruption)
        self._steps, rules = StepRunner(self, noise_log), StepRules(config, snapshots=memory is not None)
        self._pace: Pace = Lockstep(self, rules, self._sync.turns.due)
        if not update.lockstep:
            self._pace = AsyncSteps(self, rules)
            loss_log.board, self._sync.request_sync = self._pace.board, self._pace.request_sync
        self.before_epoch: Callable[[Training], None] = lambda training: None  # called before the steps of an epoch
        self._begun = False  # whether the run folder is being written

    def restore(self, snapshot: Snapshot | None) -> list[str]:
        """Restore ``snapshot`` (read on rank 0; None: start), so that all ranks have equal weights.

        Returns a line for each part that was not restored.
        """
        self._saver.resumed_from(snapshot)
        notes, p = train_state.restore(self, snapshot), self.progress
        # With fewer ranks or a lower limit, the epoch's steps may already be complete: only its end is left.
        if p.consumed and not self.finished and self._at_end(self.steps_done):
            length = self.frontend.task.length
            rows = np.array([p.epoch_sums or [0.0] * length, *(row[:length] for row in p.pending)])
            p.ending, p.epoch_sums, p.pending = True, rows.sum(0).tolist(), []
        return notes

    def fit(self) -> dict[str, Any]:
        """Train to the end, or to epoch ``until``. Returns the run's summary.

        Raises Interrupted on all ranks at the same step, after a signal to one of them and a checkpoint.
        """
        self._call("on_start")
        try:
            while self.progress.ending or not (self.finished or self.paused):
                self._epoch()
            self._begin()
            if self.paused:
                self._saver.keep()
            self._saver.wait()
        except Interrupted:
            self._time_log.write(self)
            raise
        finally:  # finish the checkpoint before raising a training error
            self._saver.writer.wait()
        self.update.finish_transfers()  # no rank leaves while a transfer is in flight
        if self.finished:
            self.update.end_training()
        if not self.update.has_global_weights:  # leave the result in the model for the caller
            self.update.take_global_weights()
        result = summary(self) | {"time": self._sync.last(self)}
        result |= {"energy": self._time_log.energy()} if self._time_log.joules else {}
        self._call("on_end", result)
        return result

    def close(self) -> None:
        """Release resources outside this process. Called on all ranks after training."""
        self._pace.close()
        self.update.close()

    def _call(self, event: str, *args: Any) -> None:
        self._hooks.call(event, self, *args)

    def _begin(self) -> None:
        """Begin to write the run folder after the first step, when training is known to work."""
        if not self._begun:
            self._saver.begin()
            self._begun = True

    def _epoch(self) -> None:
        """Train the rest of an epoch and end it. An epoch interrupted in its evaluation is only ended."""
        p = self.progress
        started, samples_before = self.time.enter(REST), p.seen
        steps_done = self.steps_done
        first_step = p.step - steps_done
        if p.ending:
            self._begin()
            self._end_epoch(self.learning_rate(steps_done - 1, p.step - 1), 0.0, 0, self._at_end(steps_done))
            return
        self.stop_source.at("training", p.step)
        self.before_epoch(self)
        self._sync.turns.begin()
        with closing(self._pace.steps()) as steps:
            clock = self.time.enter(INPUT)
            for step in steps:
                self.time.enter(COMPUTE)
                rate, sums, counts = self._steps.run(step)
                steps_done = p.step - first_step
                due = self._pace.due(self._at_end(steps_done))
                # Before ranks exchange anything, all must have run the same steps.
                if due.sync or due.check or not self._begun:
                    self.frontend.run_queued()
                queued = bool(self.frontend.queued)
                ended = self.time.stepped(queued)
                if self.config.model.compile and not self._begun:
                    seconds = (ended - clock) / 1e9
                    self.log.message(f"model.compile: the first step took {seconds:.1f} s, with its compilation")
                info = StepInfo(step, rate, sums, counts, (ended - clock) / 1e9, due)
                self._begin()
                self.stop_source.at("training", p.step)
                faults.at("step")
                try:
                    self._call("on_step", info)
                except NonFiniteError as error:
                    self._saver.roll_back(error)
                self._call("on_step_end", info)
                if p.ending:
                    break
                # A step's time excludes hooks, unless one reads a result of queued steps, which runs them.
                clock = self.time.hooks_ended(queued and not self.frontend.queued)
        seconds = (self.time.enter(REST) - started) / 1e9
        self._end_epoch(rate, seconds, p.seen - samples_before, self._at_end(steps_done))

    def _at_end(self, steps_done: int) -> bool:
        # An epoch that began with another global batch may have one more step: it ends when no samples are left.
        return self.progress.consumed >= self.train_size or (self.limited and steps_done >= self.limit)

    def _end_epoch(self, rate: float, seconds: float, samples: int, complete: bool) -> None:
        """Evaluate if due, and call the hooks. ``samples``, ``seconds``: since the epoch began or was resumed."""
        p, number, task = self.progress, self.progress.epoch, self.frontend.task
        # After a rollback there may be no samples.
        means = task.results(np.array(p.epoch_sums or np.zeros(task.length)))
        p.train = {f"train_{name}": value for name, value in means.items() if name != "samples"}
        self._validation.epoch_left()
        self._saver.epoch_left()
        p.ending = False
        if complete:
            p.epoch, p.consumed, p.epoch_sums = number + 1, 0, []
            self.update.end_epoch(p.epoch, self.config.max_epochs or 0)
        if self.finished:
            self.update.end_training()
        evaluated = self._validation.due(complete)
        if evaluated:
            self._validation.run(number, rate)
        metrics = {**p.train, **(p.val if evaluated else {})}
        epoch = Epoch(number, complete, metrics, rate, seconds, samples)
        self._call("on_epoch", epoch)
        if self.finished and (self.update.end_training() or not evaluated):  # a hook ended the run
            self._validation.run(number, rate)
            epoch = replace(epoch, metrics={**p.train, **p.val})
        self._call("on_epoch_end", epoch)
