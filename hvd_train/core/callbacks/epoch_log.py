"""The row of each epoch on the terminal."""

from __future__ import annotations

from hvd_train.core.callbacks.noise_log import NoiseLog
from hvd_train.core.callbacks.straggler_log import log_straggler
from hvd_train.core.callbacks.time_log import TimeLog
from hvd_train.core.hooks import Epoch, Hook
from hvd_train.core.training import Training


class EpochLog(Hook):
    """Logs the row of an epoch. Metrics that were not evaluated have an empty cell."""

    def __init__(self, time_log: TimeLog, noise_log: NoiseLog) -> None:
        self._time_log, self._noise_log = time_log, noise_log

    def on_epoch_end(self, trainer: Training, epoch: Epoch) -> None:
        empty = {name.replace("train", "val", 1): None for name in trainer.progress.train}
        notes = [self._time_log.epoch_ended(trainer), log_straggler(trainer, epoch.number)]
        trainer.log.epoch_line(
            epoch=epoch.number,
            step=trainer.progress.step,
            values=trainer.progress.train | empty | dict(epoch.metrics),
            lr=epoch.learning_rate,
            samples_per_second=epoch.samples / epoch.seconds if epoch.seconds else None,
            seconds=epoch.seconds,
            notes=[*notes, self._noise_log.epoch_ended(trainer, epoch.number)],
        )
        if note := trainer.update.note():
            trainer.log.message(note)
