"""The error of compression, measured every so many steps."""

from __future__ import annotations

import math
from typing import Any

from hvd_train.core.training import Training
from hvd_train.protocol import Scale


class CompressionErrorLog:
    """Measures the error of the compressed gradient. Not a hook, because it needs a batch before its step."""

    def __init__(self, every: int) -> None:
        self._every = every  # steps; 0: never

    def due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def measure(self, trainer: Training, placed: Any, scale: Scale, seed: int) -> None:
        """Log the cosine with the exact gradient for one micro-batch on the device. The gradient is discarded."""
        frontend, p = trainer.frontend, trainer.progress
        trainer.update.finish_transfers()  # so that residuals are those of this step
        dot, exact, decoded, sent, plain = map(
            float, frontend.ops.to_numpy(frontend.compression_error(placed, scale, seed))
        )
        length = math.sqrt(exact * decoded)
        trainer.log.compression_error(p.epoch, p.step, dot / length if length else 1.0, sent, plain)
