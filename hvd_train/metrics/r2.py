"""The coefficient of determination."""

from __future__ import annotations

import math

import numpy as np

from hvd_train.metrics.metric import Metric, Predictions
from hvd_train.protocol import Tensor

EPSILON = 2.0**-52  # of numbers in 64 bits


class R2(Metric):
    """1 - sum of (z - y)^2 / sum of (y - mean of y)^2, over all numbers together (Wright 1921).

    It is nan where all labels are equal. The sums are W, the sum of y, of y^2 and of (z - y)^2.
    """

    length = 4

    def sums(self, predictions: Predictions) -> Tensor:
        ops = predictions.ops
        # In 64 bits: where the labels' mean is large (years, prices), the squares cancel in all digits of 32 bits.
        z, y, w = (ops.cast(x, "float64") for x in predictions.flat())  # (places,) each
        return ops.stack([ops.sum(w * x, 0) for x in (w * 0 + 1, y, y**2, (z - y) ** 2)])

    def result(self, sums: np.ndarray) -> float:
        count, first, second, residual = map(float, sums)
        spread = second - first**2 / count if count else 0.0
        # Equal labels leave what rounding left of the squares, about its standard deviation over so many sums.
        least = 4 * EPSILON * math.sqrt(count) * second
        return 1 - residual / spread if spread > least else math.nan
