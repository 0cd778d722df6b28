"""The learning rate as a pure function of (step, global batch)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_train.config import OptimConfig


def scale(optim: OptimConfig, global_batch: int) -> float:
    """Return the factor on ``optim.lr``: linear (Goyal et al. 2017), square root (Krizhevsky 2014), or 1."""
    if optim.lr_scaling == "none" or optim.lr_reference_batch is None:
        return 1.0
    ratio = global_batch / optim.lr_reference_batch
    return ratio if optim.lr_scaling == "linear" else math.sqrt(ratio)


@dataclass(frozen=True)
class Schedule:
    """``rate(step)`` for step 0, 1, ...: warm-up rises linearly to the base rate, then the schedule begins.

    With base = lr * scale, W warm-up steps, T total steps, S steps per epoch, t = step - W and e = t / S epochs:
    step < W: base (step + 1) / W; constant: base; step: base gamma^floor(e / step_size); exponential: base gamma^e;
    cosine (Loshchilov and Hutter 2017): min_lr + (base - min_lr) (1 + cos(pi t / (T - W))) / 2. Never below min_lr
    after warm-up.
    """

    optim: OptimConfig
    global_batch: int
    steps_per_epoch: int
    total_steps: int

    @property
    def warmup_steps(self) -> int:
        return self.optim.warmup_steps or round(self.optim.warmup_epochs * self.steps_per_epoch)

    def rate(self, step: int) -> float:
        optim, warmup = self.optim, self.warmup_steps
        base = optim.lr * scale(optim, self.global_batch)
        if step < warmup:
            return base * (step + 1) / warmup
        done = step - warmup
        epochs = done / self.steps_per_epoch
        if optim.schedule == "cosine":
            part = min(1.0, done / max(1, self.total_steps - warmup))
            return optim.min_lr + (base - optim.min_lr) * (1 + math.cos(math.pi * part)) / 2
        if optim.schedule == "step":
            base *= optim.gamma ** math.floor(epochs / optim.step_size)
        elif optim.schedule == "exponential":
            base *= optim.gamma**epochs
        return max(base, optim.min_lr)
