"""The speed of training in samples per second."""

from __future__ import annotations

from collections import deque

import numpy as np

from hvd_train.core.hooks import Hook, StepInfo
from hvd_train.core.training import Training

ENOUGH_STEPS = 50  # fewer steps have no fastest tenth
WARMUP_STEPS = 20  # steps left out of samples_per_second: tracing, allocation and caches settle in them


class Speed(Hook):
    """Measures samples per second of all ranks: the median over the steps after the first 20.

    Excludes evaluation and saving. ``uneven``: steps differ in their work, as of samples of different lengths; then it
    is the mean over these steps, whose median would depend on what most steps hold.
    """

    def __init__(self, uneven: bool = False) -> None:
        self._rates: deque[float] = deque(maxlen=10_000)
        self._uneven, self._total = uneven, np.zeros(2)  # samples and seconds of the steps
        self._steps, self._warm = 0, False
        self._open = 0, 0.0  # samples and seconds since the last rate

    def on_step(self, trainer: Training, info: StepInfo) -> None:
        self.count(info.batch.count, info.seconds, bool(trainer.frontend.queued))

    def count(self, samples: int, seconds: float, queued: bool) -> None:
        """Add a step. ``queued``: it has not run yet. Steps of one call count together."""
        self._steps += 1
        self._open = self._open[0] + samples, self._open[1] + seconds
        if queued:
            return
        if self._steps > WARMUP_STEPS and not self._warm:
            self._rates.clear()
            self._total[:] = 0
            self._warm = True
        self._total += self._open
        self._rates.append(self._open[0] / max(self._open[1], 1e-9))
        self._open = 0, 0.0

    def median(self) -> float:
        """Samples per second of all ranks; 0 before the first step."""
        if self._uneven and self._rates:
            return float(self._total[0] / max(self._total[1], 1e-9))
        return float(np.median(self._rates)) if self._rates else 0.0

    def spread(self) -> tuple[float, float]:
        """Samples per second of all steps together and of the fastest tenth; zeros before there are enough steps."""
        if len(self._rates) < ENOUGH_STEPS:
            return 0.0, 0.0
        return 1 / float(np.mean(1 / np.array(self._rates))), float(np.quantile(self._rates, 0.9))
