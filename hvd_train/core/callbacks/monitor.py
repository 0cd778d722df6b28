"""Hooks that watch a value of each evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from hvd_train.core.hooks import Epoch, Hook
from hvd_train.core.training import Training


class Monitor(Hook, ABC):
    """The base of hooks that watch the value that a rule of the configuration names (``monitor``)."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    @abstractmethod
    def judge(self, trainer: Training, value: float) -> None:
        """Judge the value of an evaluation, which is negated if larger is better."""

    def on_epoch(self, trainer: Training, epoch: Epoch) -> None:
        # An interruption within an epoch must not affect early stopping or plateaus.
        if epoch.complete and "val_loss" in epoch.metrics:
            value = epoch.metrics[self._rule.monitor] * (1 if trainer.config.mode_of(self._rule) == "min" else -1)
            if not math.isnan(value):  # no label counted
                self.judge(trainer, value)

    def improves(self, value: float, best: float | None) -> bool:
        return math.isfinite(value) and (best is None or value < best - self._rule.min_delta)
