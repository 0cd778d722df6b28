"""Early stopping."""

from __future__ import annotations

import math

from hvd_train.config import EarlyStoppingConfig
from hvd_train.core.callbacks.monitor import monitored
from hvd_train.core.hooks import Epoch, Hook
from hvd_train.core.training import Training


class EarlyStopping(Hook):
    """Stops training when the monitored value has not improved for ``patience`` evaluations."""

    def __init__(self, rule: EarlyStoppingConfig) -> None:
        self._rule = rule

    def on_epoch(self, trainer: Training, epoch: Epoch) -> None:
        rule, p = self._rule, trainer.progress
        value = monitored(trainer, epoch, rule)
        if value is None:
            return
        if math.isfinite(value) and (p.best is None or value < p.best - rule.min_delta):
            p.best, p.waited = value, 0
            return
        p.waited += 1
        if p.waited >= rule.patience:
            trainer.stop(f"early stopping: {rule.monitor} has not improved for {p.waited} evaluations")
