"""Early stopping."""

from __future__ import annotations

from hvd_train.core.callbacks.monitor import Monitor
from hvd_train.core.training import Training


class EarlyStopping(Monitor):
    """Stops training when the monitored value has not improved for ``patience`` evaluations."""

    def judge(self, trainer: Training, value: float) -> None:
        rule, p = self._rule, trainer.progress
        if self.improves(value, p.best):
            p.best, p.waited = value, 0
            return
        p.waited += 1
        if p.waited >= rule.patience:
            trainer.stop(f"early stopping: {rule.monitor} has not improved for {p.waited} evaluations")
