"""The value that a rule of the configuration watches."""

from __future__ import annotations

import math

from hvd_train.config import EarlyStoppingConfig
from hvd_train.config.keys.optim import PlateauConfig
from hvd_train.core.hooks import Epoch
from hvd_train.core.training import Training


def monitored(trainer: Training, epoch: Epoch, rule: EarlyStoppingConfig | PlateauConfig) -> float | None:
    """Return the rule's value after an epoch, negated if larger is better; None if there is none to compare.

    None for an epoch that is incomplete or not evaluated, and for a NaN (no label counted).
    """
    if not epoch.complete or "val_loss" not in epoch.metrics:
        return None  # an interruption within an epoch must not affect early stopping or plateaus
    value = epoch.metrics[rule.monitor] * (1 if trainer.config.mode_of(rule) == "min" else -1)
    return None if math.isnan(value) else value
