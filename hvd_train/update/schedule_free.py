"""Schedule-free training (Defazio et al. 2024, "The Road Less Scheduled", arXiv 2405.15682).

Gradients are taken at y = (1 - beta) z + beta x. z moves by them, and x, the mean of the z, is
evaluated and saved. The formulas are in update/elementwise.py; the model holds y while it trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_train.protocol import Cell, Tensor
from hvd_train.update.replicated import Replicated
from hvd_train.update.weight_average import Number, WeightAverage

OFFSET = "offset"  # the slot with z - y


class ScheduleFree(WeightAverage):
    """The average x = (1 - c) x + c z with c = w / (sum of all w so far), w = (highest learning rate so far)^2.

    w is as in the authors' package, schedulefree, by default. With a constant rate x is the plain mean.
    """

    def __init__(self, update: Replicated, *, beta: float) -> None:
        super().__init__(update)
        self.beta = beta
        self._highest, self._total = (self._ops.keep(np.zeros(())) for _ in range(2))

    def step(self, gradients: Sequence[Tensor], learning_rate: Any) -> None:
        ops = self._ops
        # TensorFlow would convert a Python float to 32 bits.
        number = np.array(learning_rate) if isinstance(learning_rate, float) else None
        rate = ops.cast(learning_rate if number is None else ops.from_numpy(number), "float64")
        before = self._highest.read()
        highest = ops.where(rate > before, rate, before)
        total = self._total.read() + highest * highest
        share = highest * highest / ops.where(total > 0, total, 1.0)
        self._highest.write(highest)
        self._total.write(total)
        # A parameter group multiplies all three by its factor on the rate. The share is then the second over the
        # third, also if the rate is 0.
        self._update_weights(gradients, ops.stack([rate, share, rate * 0 + 1]))

    def global_weights(self) -> list[Tensor]:
        share = 1 / self.beta - 1
        return [y - share * self._optimizer.slot(OFFSET, bucket) for bucket, y in enumerate(self._weights.read())]

    def numbers(self) -> Mapping[str, Number]:
        cells = {"slots/largest_rate": self._highest, "slots/weight_sum": self._total}
        return {name: self._number(cell) for name, cell in cells.items()}

    def _number(self, cell: Cell) -> Number:
        ops = self._ops
        return Number(lambda: ops.to_numpy(cell.read()), lambda x: cell.write(ops.from_numpy(x)))
