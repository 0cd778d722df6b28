"""The value that a rule of the configuration watches."""

from __future__ import annotations

import math

from hvd_train.config import EarlyStoppingConfig
from hvd_train.config.keys.optim import PlateauConfig
from hvd_train.core.hooks import Epoch
from hvd_train.core.training import Training


def monitored(trainer: Training, epoch: Epoch, rule: EarlyStoppingConfig | PlateauConfig) -> float | None:
    """Return the rule's value after an epoch, of which a smaller one is better; None: there is nothing to compare.

    That is so for an epoch that was left or not evaluated, and where the value is not a number: no label counted in it.
    """
    if not epoch.complete or "val_loss" not in epoch.metrics:
        return None  # an interruption within an epoch must not change when training stops, or its rate falls
    value = epoch.metrics[rule.monitor] * (1 if trainer.config.mode_of(rule) == "min" else -1)
    return None if math.isnan(value) else value
