"""When to save, waiting for writes, and rollback to the last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hvd_train.checkpoint import store
from hvd_train.checkpoint.writer import NOT_KEPT, Writer, raise_if_failed
from hvd_train.core import train_state
from hvd_train.core.agreement import collectively
from hvd_train.core.callbacks.loss_log import LossLog
from hvd_train.core.callbacks.time_log import TimeLog
from hvd_train.core.callbacks.weight_check import WeightCheck
from hvd_train.core.hooks import Epoch, Hook, StepInfo
from hvd_train.core.nonfinite import MOST_IN_A_ROW
from hvd_train.core.time_account import SAVE
from hvd_train.core.training import Training
from hvd_train.errors import NonFiniteError

WAIT_SECONDS = 10.0  # between broadcasts of rank 0 while the others wait for its write


class Saver(Hook):
    """Saves at intervals of steps or epochs in the background, and rolls back with ``on_nonfinite: rollback``.

    ``memory``: a folder for in-memory checkpoints. ``announce``: called with each checkpoint written and kept.
    """

    def __init__(
        self,
        training: Training,
        loss_log: LossLog,
        weight_check: WeightCheck,
        time_log: TimeLog,
        announce: Callable[[Path], None],
        memory: Path | None,
    ) -> None:
        self._training, self._loss_log, self._weight_check = training, loss_log, weight_check
        self._time_log, self._announce, self._memory = time_log, announce, memory
        self.writer = Writer(training.config.watchdog_s)
        self._last: Path | None = None  # the last checkpoint that this run saved or resumed from
        self._rolled_back = 0  # rollbacks since the last checkpoint
        self._saved = False  # whether the newest checkpoint is the current state
        self._metrics: Mapping[str, float] = {}  # value that ranks this step's checkpoint, if any

    def resumed_from(self, snapshot: store.Snapshot | None) -> None:
        self._last = snapshot.path if snapshot else None
        self._metrics = snapshot.meta["monitor"] if snapshot else {}

    def begin(self) -> None:
        """Begin to write the run folder, which must have room for a checkpoint."""
        training = self._training
        training.frontend.run_queued()
        collectively(training.communicator, lambda: training.log.begin(train_state.size(training, self.writer)))
        training.stop_source.begun = True

    # ---- when

    def on_step_end(self, trainer: Training, info: StepInfo) -> None:
        self._saved, self._metrics = False, {}
        if info.due.save or info.due.snapshot:
            self.save({}, memory=self._memory if info.due.snapshot else None)

    def epoch_left(self) -> None:
        """Record that the progress has changed, so a checkpoint of the epoch's last step is no longer current."""
        self._saved = False

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        every = trainer.config.checkpoint.every_n_epochs
        if trainer.finished or (epoch.complete and every and trainer.progress.epoch % every == 0):
            self.save(epoch.metrics)

    def keep(self) -> None:
        """Save the current state, whatever the configuration says, so that a resumed run gets the same bits."""
        while not self._saved:  # if the weights must not be saved (not finite), roll back to a checkpoint
            pending = self._gathered(self._loss_log.local(self._training))
            self._training.progress.pending = [[float(x) for x in row] for row in pending]
            self.save(self._metrics, keep=True)

    def _gathered(self, local: np.ndarray) -> list[np.ndarray]:
        parts = self._training.communicator.allgather_bytes(local.tobytes(), "pending")
        return [np.frombuffer(part) for part in parts]

    # ---- how

    def save(self, metrics: Mapping[str, float], keep: bool = False, memory: Path | None = None) -> None:
        """Begin to write a checkpoint. ``keep``: whatever the configuration says. ``memory``: an in-memory folder."""
        training, rule = self._training, self._training.config.checkpoint
        if not (rule.save_last or rule.save_top_k or keep or memory):
            return
        with training.time.within(SAVE):
            self.wait()  # one at a time
            try:
                with self._weight_check.global_weights(training):
                    training.stop_source.at("saving", training.progress.step)
                    train_state.save(training, metrics, self.writer, keep=keep, memory=memory)
            except NonFiniteError as error:
                self.roll_back(error)
                return
            self._time_log.saved(training)
        self._last, self._rolled_back, self._metrics = self.writer.path, 0, metrics
        self._saved = not memory and (rule.save_last or keep)  # otherwise it may not be kept

    def wait(self) -> None:
        """Wait until the current checkpoint is written."""
        if not self.writer.path:
            return
        training = self._training
        training.stop_source.at("saving", training.progress.step)
        outcome = None
        with training.time.within(SAVE):
            while outcome is None:  # if ranks wait too long for one, Horovod reports a stall
                self.writer.wait(WAIT_SECONDS)
                local = json.dumps(self.writer.outcome()).encode()
                outcome = json.loads(training.communicator.broadcast_bytes(local))
        self.written(outcome)

    def written(self, outcome: str) -> None:
        """Process rank 0's report that a write has ended, on all ranks together."""
        path, self.writer.path = self.writer.path, None
        raise_if_failed(outcome)
        if path and path.parent == self._training.folder and outcome != NOT_KEPT:
            with self._training.time.within(SAVE):
                self._announce(path)

    # ---- back

    def roll_back(self, error: NonFiniteError) -> None:
        """Restore the last checkpoint, with ``on_nonfinite: rollback``; the samples since then are skipped.

        Otherwise, or if that did not help, raise the error.
        """
        training = self._training
        self._rolled_back += 1
        if training.config.on_nonfinite != "rollback" or self._rolled_back > MOST_IN_A_ROW:
            raise error
        self.wait()
        p, first = training.progress, training.communicator.rank == 0
        path = training.communicator.broadcast_bytes(str(self._last or "").encode()).decode()
        if not path:
            what = f"{error.what}, and there is no checkpoint yet"
            raise NonFiniteError(what, where=error.where, fix=error.fix, common=True)
        snapshot = collectively(training.communicator, lambda: store.load(Path(path)) if first else None)
        train_state.restore(training, snapshot)
        # Weights, optimizer state and loss scale are the checkpoint's, but not the position in the data.
        self._time_log.rolled_back(training.progress.step, training.time.steps)
        p.loss_scale, p.good_steps, training.progress = training.progress.loss_scale, 0, p
        self._loss_log.discard()
        self._saved, self._metrics = False, {}
        training.log.rollback(p.epoch, p.step, Path(path).name, error.what)
        training.log.message(f"step {p.step}: {error.what}; goes on with the weights of {Path(path).name}")
