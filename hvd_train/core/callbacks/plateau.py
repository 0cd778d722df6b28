"""Lower the learning rate when the monitored value stops improving."""

from __future__ import annotations

from hvd_train.core.callbacks.monitor import Monitor
from hvd_train.core.training import Training
from hvd_train.errors import amount


class Plateau(Monitor):
    """Multiplies the learning rate by ``factor`` when the monitored value has not improved for ``patience``
    evaluations.

    The value is the same on all ranks, so all lower the rate together. ``rate_factor``, ``plateau_best`` and
    ``plateau_waited`` are in the progress; the last one counts up to 0 during the cooldown.
    """

    def judge(self, trainer: Training, value: float) -> None:
        rule, p = self._rule, trainer.progress
        improved = self.improves(value, p.plateau_best)
        if improved:
            p.plateau_best = value
        p.plateau_waited = 0 if improved and p.plateau_waited >= 0 else p.plateau_waited + 1
        if p.plateau_waited >= rule.patience:
            p.rate_factor, p.plateau_waited = p.rate_factor * rule.factor, -rule.cooldown
            what = f"{rule.monitor} has not improved for {amount(rule.patience, 'evaluation')}"
            trainer.log.message(f"learning rate times {rule.factor:g} ({p.rate_factor:g} in all): {what}")
