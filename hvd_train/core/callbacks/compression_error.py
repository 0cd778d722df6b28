"""The error of compression, measured every so many steps."""

from __future__ import annotations

import math
from typing import Any

from hvd_train.core.training import Training
from hvd_train.protocol import Scale


class CompressionErrorLog:
    """Measure how far the compressed gradient is from the exact one. Not a hook: it needs a batch before its step."""

    def __init__(self, every: int) -> None:
        self._every = every  # steps; 0: never

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def measure(self, trainer: Training, placed: Any, scale: Scale, seed: int) -> None:
        """Log the cosine between both, on a micro-batch on the device; the gradient is then discarded."""
        frontend, p = trainer.frontend, trainer.progress
        trainer.update.finish_transfers()  # residuals are then those that this gradient meets
        dot, exact, decoded, sent, plain = map(
            float, frontend.ops.to_numpy(frontend.compression_error(placed, scale, seed))
        )
        length = math.sqrt(exact * decoded)
        trainer.log.compression_error(p.epoch, p.step, dot / length if length else 1.0, sent, plain)
