"""The comparison of the ranks' weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from hvd_train.core.agreement import agree_on_weights, collectively
from hvd_train.core.callbacks.loss_log import LossLog
from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.training import Training


class WeightCheck(Hook):
    """Compares the ranks' weights, except while local training lets them differ."""

    def __init__(self, loss_log: LossLog) -> None:
        self._loss_log = loss_log

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        if info.due.check:
            self.compare(trainer)

    @contextmanager
    def global_weights(self, trainer: Training) -> Iterator[None]:
        """Give the model the weights that are evaluated and saved, for an evaluation or a checkpoint."""
        update = trainer.update
        # A signal within an evaluation saves a checkpoint: the weights are already global, and the evaluation restores
        # the local ones.
        if update.has_global_weights:
            yield
            return
        update.take_global_weights()
        try:
            self.compare(trainer)
            yield
        finally:
            update.take_local_weights()

    def compare(self, trainer: Training) -> None:
        groups = trainer.groups
        if not trainer.config.agreement_every_n_steps or trainer.update.diverged or groups.data.size == 1:
            return
        # A non-finite loss also makes weights differ; the error then names the loss.
        finite = all(np.isfinite(trainer.frontend.ops.to_numpy(sums)).all() for sums in self._loss_log.pending)
        where = f"epoch {trainer.progress.epoch + 1}, step {trainer.progress.step}"
        check = partial(agree_on_weights, groups.data, trainer.frontend.checksums(), where, finite=finite)
        # Each stage compares its own weights; all stop together.
        collectively(groups.world, check) if groups.links else check()
